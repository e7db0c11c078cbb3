"""Property tests draw the same examples in every run: what lands is what passed, on any machine.

To look for new ones: `pytest --hypothesis-profile=search`. A failure it finds becomes an `@example` of its test.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

# No deadline: a shared machine is at times ten times slower, and a time limit per test catches what hangs.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, the README's commands before all: begun last, the longest would keep one process
    waiting for the other."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.name != "test_readme.py", item.path not in slow))
