"""Numbers with their noun, for messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return ``number`` and ``noun``, in the plural unless it is one.

    >>> counted(1, "slide"), counted(2, "slide"), counted(0, "class"), counted(1200, "patch")
    ('1 slide', '2 slides', '0 classes', '1200 patches')
    """
    plural = noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")
    return f"{number} {noun if number == 1 else plural}"
