"""The user's cache of what was measured on this machine.

Takes all that a measurement holds for, and its text; gives the file where it is kept. Where there is no such folder, or
it cannot be written, what was measured is used and not kept.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"

log = logging.getLogger(__name__)


def kept_at(key: dict[str, Any], what: str = "costs") -> Path | None:
    """Return the file of the measurement, whether there is one or not; None for a user without a home.

    Args:
        key: all that the measurement holds for.
        what: was measured; first part of the file's name.
    """
    folder = _folder()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{what}-{digest[:16]}.json" if folder else None


def own_torch_cache() -> None:
    """Have torch keep what it compiles in this user's cache, for this process and those it starts.

    By itself it makes a folder under a name that anybody can guess in the temporary folder of all users, as soon as
    there is an optimizer, and runs the code that it finds there. What the user has set stays. Without a cache it is a
    temporary folder, gone with this process.
    """
    if INDUCTOR in os.environ:
        return
    try:
        folder = (_folder() or Path(os.devnull)) / "torchinductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        os.environ[INDUCTOR] = str(folder)
    except OSError:
        os.environ[INDUCTOR] = tempfile.mkdtemp(prefix="megatile-torch-")
        atexit.register(shutil.rmtree, os.environ[INDUCTOR], ignore_errors=True)


def _folder() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "megatile"
    except RuntimeError:  # neither HOME nor an entry in the list of users, as in many a container
        return None


def kept_text(path: Path | None) -> str | None:
    """Return the text that was kept at ``path``, of ``kept_at``; None where there is none, or it is damaged.

    A damaged file is named in a warning; its measurement is made anew, and replaces it.
    """
    try:
        data = path.read_bytes() if path is not None else None
    except OSError:
        return None
    text, _, digest = (data or b"").rpartition(b"\n")
    if data is None:
        return None
    if hashlib.sha256(text).hexdigest().encode() != digest:
        log.warning("%s is damaged, or of an earlier version: measured anew", path)
        return None
    return text.decode()


def keep(path: Path | None, text: str) -> None:
    """Write ``text`` to ``path``, of ``kept_at``, and its digest; where that cannot be done, say so once."""
    if path is None:
        _tell("this user has no home folder")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            try:
                file.write(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}")
                file.flush()
                os.replace(file.name, path)  # ranks of one machine may come here at once
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as fault:
        _tell(f"{path.parent} cannot be written ({fault.strerror})")


@functools.cache
def _tell(reason: str) -> None:
    log.warning(
        "%s: what was measured of this machine is used now and not kept; XDG_CACHE_HOME names another folder", reason
    )
