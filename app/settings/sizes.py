"""Sizes of memory as users write them: ``512MiB`` in, bytes out."""

from __future__ import annotations

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def bytes_of(text: str) -> int | None:
    """Bytes of a size such as ``512MiB`` or ``1.5GiB``; None when it is not one.

    >>> bytes_of("1.5MiB"), bytes_of("lots")
    (1572864, None)
    """
    for unit, factor in UNITS.items():
        number = text.removesuffix(unit)
        if number != text:
            try:
                size = float(number) * factor
            except ValueError:
                return None
            return int(size) if size >= 1 else None
    return None
