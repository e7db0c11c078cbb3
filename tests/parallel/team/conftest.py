"""Small nets, each on many teams: traced once."""

from tests.helpers.traced_once import traced_once

__all__ = ["traced_once"]
