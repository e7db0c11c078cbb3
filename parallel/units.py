"""Bytes, seconds and operations as people read them, three digits and a unit; numbers that may be missing."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """
    >>> bytes_text(0), bytes_text(1023), bytes_text(3 << 19), bytes_text(256 << 30)
    ('0 B', '1023 B', '1.5 MiB', '256 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(count) < 1024:
            return f"{_digits(count)} {unit}"
        count /= 1024
    return f"{_digits(count)} TiB"


def seconds_text(seconds: float) -> str:
    """
    >>> seconds_text(0.0), seconds_text(3.21e-5), seconds_text(0.0998), seconds_text(12)
    ('0 s', '32.1 µs', '99.8 ms', '12 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if not seconds or seconds * factor >= 0.9995:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e9)} ns"


def flops_text(flops: float) -> str:
    """
    >>> flops_text(0), flops_text(4.12e9), flops_text(2e15)
    ('0', '4.12 G', '2 P')
    """
    for unit in ("", "k", "M", "G", "T"):
        if round(flops, 1) < 1000:
            return f"{_digits(flops)} {unit}".rstrip()
        flops /= 1000
    return f"{_digits(flops)} P"


def number_text(value: float | None, form: str = ".4f") -> str:
    """
    >>> number_text(0.91826), number_text(3e-13, ".1e"), number_text(None)
    ('0.9183', '3.0e-13', '-')
    """
    return "-" if value is None else f"{value:{form}}"


def _digits(value: float) -> str:
    """Three digits, or more in front of the point; no zeros at the end."""
    places = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text
