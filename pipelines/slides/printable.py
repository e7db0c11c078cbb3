"""Text that came from a file, made safe to print, to log and to write into reports.

Table cells, class names, slide paths, error messages about slides and settings of checkpoints pass through
``printable`` where they are read. Everything behind that point may print them as they are.
"""

from __future__ import annotations

import re
from typing import Any

UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (the escape that starts terminal sequences among them), line separators, characters that reverse
the direction of text, and bytes of a file name that are not UTF-8."""


def printable(text: str, keep: str = "") -> str:
    r"""Return ``text`` with each character escaped that a terminal would obey; those in ``keep`` stay.

    >>> printable("a\tb" + chr(0xDCFF) + chr(0x202E) + chr(27) + "[31m")
    'a\\x09b\\xff\\u202e\\x1b[31m'
    """
    return UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escaped(ord(found[0])), text)


def _escaped(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a file name that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def printable_values(value: Any) -> Any:
    """Return a value of nested dictionaries, lists and tuples with every text in it, keys too, made printable."""
    if isinstance(value, str):
        return printable(value, keep="\n\t")
    if isinstance(value, dict):
        return {printable_values(key): printable_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(printable_values, value))
    return value
