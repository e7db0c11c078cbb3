"""Property tests draw the same examples in every run: what lands is what passed, on any machine.

To look for new ones: `pytest --hypothesis-profile=search`. A failure it finds becomes an `@example` of its test.
"""

from __future__ import annotations

from hypothesis import settings

# No deadline: a shared machine is at times ten times slower, and a time limit per test catches what hangs.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile("same")
