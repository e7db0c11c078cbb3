"""A file that stands for a slide on a server: one line of text, the URL of an OME-Zarr image.

``case-7.ome.zarr.url`` in the slides folder is the slide ``case-7``: labels and annotations go by its name, as for any
other. Only the name decides that a URL is followed, so that no damaged slide file makes a run ask a server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pipelines.slides.slide import SlideError

URL_ENDING: Final = ".zarr.url"
SCHEMES: Final = ("http", "https", "s3")

_MOST_BYTES: Final = 4096


def is_url_name(name: str) -> bool:
    """Return whether a file of this name holds the URL of a slide.

    >>> is_url_name("case-7.OME.zarr.url"), is_url_name("hospital.url")
    (True, False)
    """
    return name.lower().endswith(URL_ENDING)


def read_url(path: Path) -> str:
    """Return the URL that a file holds, without a slash at its end.

    Raises:
        SlideError: the file holds anything else, or a password.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_MOST_BYTES)
    url = head.decode("utf-8", "replace").strip()
    try:
        parts = urlsplit(url)
        usable = parts.scheme in SCHEMES and bool(parts.hostname) and url.isprintable() and " " not in url
    except ValueError:  # a bracket that is not closed, for example
        usable = False
    if not usable or len(head) == _MOST_BYTES:
        raise SlideError(
            f"{path}: a file *{URL_ENDING} holds one line, the URL of an OME-Zarr image that begins with "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}; this one holds other text"
        )
    if parts.username is not None or parts.password is not None:
        raise SlideError(
            f"{path}: the URL holds a user name or password; take it out: docs/slides.md says where it goes"
        )
    if parts.query or parts.fragment:
        raise SlideError(f"{path}: the files of a slide are asked for below its URL, which so has no `?` and no `#`")
    return url.rstrip("/")
