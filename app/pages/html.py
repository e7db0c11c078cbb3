"""Pages from templates: self-contained HTML that is also well-formed XML, and numbers with their units.

Takes plain values for a template of ``templates/``; gives the page. Nothing is fetched and nothing runs: no script, no
font, no link; only ``slides_page`` has pictures beside it. Light and dark follow the reader's system, paper is always
light, wide tables scroll on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from parallel.units import bytes_text

TEMPLATES = Environment(
    loader=PackageLoader("app.pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
"""Escapes all that it is given; a value that a template asks for and does not get is an error."""


class Card(NamedTuple):
    """One large figure with its name above and where it comes from below."""

    name: str
    value: str
    unit: str = ""
    note: str = ""


class Table(NamedTuple):
    """Rows of cells under headers; the columns ``numeric`` stand to the right."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[int] = ()


def rendered(template: str, **values: Any) -> str:
    """Return the page of a template with these values."""
    return TEMPLATES.get_template(template).render(values)


def format_value(value: float, digits: int = 4) -> str:
    """A number as a reader would write it: ``digits`` digits, whole numbers in full, powers of ten for the extremes."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size and (size < 1e-3 or (size >= 1e6 and not isinstance(value, int))):
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
    if size >= 1e4:
        return f"{value:,.0f}".replace("-", "−").replace(",", "\u2009")
    text = f"{value:.0f}" if size >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    return text.replace("-", "−")


def format_duration(seconds: float) -> str:
    """``1 h 02 min``, ``3 min 05 s`` or ``4.2 s``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_setting(name: str, value: Any) -> str:
    """A value as a person reads it; the end of ``name`` tells its unit (``_bytes``, ``_s``, ``_fraction``)."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(format_setting(name, one) for one in value) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_setting(str(key), one)}" for key, one in value.items())
    if isinstance(value, int | float):
        for end, form in (("_bytes", bytes_text), ("_s", format_duration), ("_fraction", _percent)):
            if name.endswith(end):
                return form(value)
        return str(value) if isinstance(value, int) else format_value(value)
    return str(value)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def flattened(values: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """(name, value) of all values, nested ones under ``outer inner``, underscores as spaces."""
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{above} {key}".strip().replace("_", " ")
        if isinstance(value, Mapping) and value:
            pairs += flattened(value, name)
        else:
            shown = name.removesuffix(" bytes")
            pairs.append((shown, format_setting(str(key), value)))
    return pairs
