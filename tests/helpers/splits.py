"""Slides of one split."""

from collections.abc import Mapping


def slides_in(split: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the slides that ``split`` has in train, val or test, sorted."""
    return tuple(sorted(slide for slide, part in split.items() if part == name))
