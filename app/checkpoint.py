"""Checkpoints that are whole or not there: a temporary file, flushed to the disk, then renamed.

Takes any state torch can save; gives it back. A run folder holds ``checkpoints/last.pt`` and ``checkpoints/best.pt``;
whatever happens while one is written, the one before stays readable.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from app.cli import RunError

FORMAT = 1


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` to ``path`` atomically.

    Raises:
        RunError: the disk is full or the folder cannot be written; a checkpoint that was there before still is.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            writer = _Writer(file)
            try:
                torch.save({"format": FORMAT, **state}, cast(IO[bytes], writer))
            except RuntimeError as fault:  # what torch makes of a write that failed
                raise writer.fault or fault from None
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as fault:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        kept = f"the previous one is kept: {path}" if path.exists() else "there is none before it"
        raise RunError(
            f"checkpoint {path} could not be written ({_reason(fault)}); {kept}; free space, then --resume"
        ) from fault


def keep_as(source: Path, target: Path) -> None:
    """Give the checkpoint ``source`` a second name, atomically and without copying its bytes."""
    temporary = target.with_suffix(".tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.link(source, temporary)
        temporary.replace(target)
        _sync_folder(target.parent)
    except OSError as fault:
        raise RunError(f"checkpoint {target} could not be written ({_reason(fault)})") from fault


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state in ``path``, on the CPU.

    Raises:
        RunError: there is none, or it is not a checkpoint of this version.
    """
    if not path.exists():
        raise RunError(f"no checkpoint at {path}: start without --resume, or name the run folder with --out")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as fault:  # torch.load raises whatever its unpickler meets in a damaged file
        raise RunError(f"checkpoint {path} cannot be read ({_reason(fault)})") from fault
    if state.get("format") != FORMAT:
        raise RunError(f"checkpoint {path} has format {state.get('format')}, this version reads {FORMAT}")
    return state


class _Writer:
    """A file that remembers why it could not be written: torch reports only where it stopped."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.fault: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as fault:
            self.fault = fault
            raise

    def flush(self) -> None:
        self._file.flush()


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(fault: BaseException) -> str:
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    first = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {first[0]}" if first else type(fault).__name__
