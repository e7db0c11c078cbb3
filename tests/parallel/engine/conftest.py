"""A few small nets, each under every strategy: what they are traced to is found out once."""

from tests.helpers.traced_once import traced_once

__all__ = ["traced_once"]
