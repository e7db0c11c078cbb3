"""Checkpoint files: any state that torch can save, and the errors when one cannot be written or read.

A run folder holds ``checkpoints/last.pt`` and ``best.pt``. A file is written under a temporary name, flushed to the
disk and renamed: the one before stays readable. It ends with a checksum, ``TRAILER_BYTES`` that ``torch.load`` ignores:
it is read as it was written or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from app.settings.cli import RunError
from parallel.profile.gpu import is_device_fault
from pipelines.slides.slide import printable_values

MAGIC = b"MegaTile blake2b "
DIGEST_BYTES = 16
TRAILER_BYTES = len(MAGIC) + 2 * DIGEST_BYTES + 1
READ_AT_ONCE = 1 << 20
ZIP_END = b"PK\x05\x06"
ZIP_END_BYTES = 22
"""What ``torch.save`` ends a file with (ZIP's end of central directory, without a comment)."""
FORMAT = 2
"""Since 2 a checkpoint ends with its checksum. One without is refused, as one that was cut short."""
PRINTED = ("settings", "classes", "task")
"""Of a checkpoint's state, what is printed and logged."""
NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
"""Errors of file systems that give a file no second name, or no further one."""


class ChecksumError(Exception):
    """A file that is not as it was written; the message says how that shows."""


class HashingWriter:
    """A file that is written to, and the checksum of what was written.

    Attributes:
        error: of the last write that failed; torch reports only where it stopped.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = blake2b(digest_size=DIGEST_BYTES)
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview, /) -> int:
        """Write ``data``; return the number of bytes written."""
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        """End the file with its checksum."""
        self._file.write(_tail(self._digest.hexdigest()))


def check_bytes(file: BinaryIO) -> None:
    """Compare all of ``file``, open at whatever position, with its checksum, and go back to its start.

    Raises:
        ChecksumError: the file has no checksum, or another than that of its bytes.
    """
    payload_bytes = file.seek(0, os.SEEK_END) - TRAILER_BYTES
    file.seek(max(0, payload_bytes))
    tail = file.read()
    if payload_bytes < 0 or not tail.startswith(MAGIC):
        raise ChecksumError("it does not end with a checksum: it was cut short, or a version before checksums wrote it")
    digest, left = blake2b(digest_size=DIGEST_BYTES), payload_bytes
    file.seek(0)
    while left:
        data = file.read(min(left, READ_AT_ONCE))
        digest.update(data)
        left -= len(data)
    if tail != _tail(digest.hexdigest()):
        raise ChecksumError("its bytes are not those that were written: their checksum differs")
    file.seek(0)


def has_checksum(file: BinaryIO) -> bool:
    """Return whether ``file`` ends with a checksum, right or wrong."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - TRAILER_BYTES - ZIP_END_BYTES))
    tail = file.read()
    # With a damaged MAGIC the ZIP file still ends where a trailer would begin; a file without one ends in ZIP_END.
    damaged = len(tail) == TRAILER_BYTES + ZIP_END_BYTES and tail.startswith(ZIP_END) and ZIP_END not in tail[1:]
    return damaged or tail[ZIP_END_BYTES:].startswith(MAGIC)


def _tail(digest: str) -> bytes:
    return MAGIC + digest.encode() + b"\n"


def save_checkpoint(path: Path, state: dict[str, Any], also: Path | None = None) -> None:
    """Write ``state`` to ``path`` atomically; ``also``: a second name of the file once it is there.

    Raises:
        RunError: the disk is full or the folder cannot be written; a checkpoint that was there before still is.
        RuntimeError: of the device that the state is copied from.
    """
    try:
        write_file(path, lambda file: _write_state({"format": FORMAT, **state}, file))
    except (OSError, RuntimeError) as error:
        if is_device_fault(error):
            raise
        kept = "there is none before it; remove the cause, then start again"
        if path.exists():
            kept = f"the previous one is kept: {path}; remove the cause, then --resume"
        raise RunError(f"checkpoint {path} could not be written ({_reason(error)}); {kept}") from error
    if also is not None:
        keep_as(path, also)


def _write_state(state: dict[str, Any], file: HashingWriter) -> None:
    try:
        torch.save(state, cast(IO[bytes], file))
    except RuntimeError as error:  # torch's, of a write that failed
        raise file.error or error from None


def write_file(path: Path, write: Callable[[HashingWriter], object]) -> None:
    """Write ``path`` with the bytes that ``write`` writes, and their checksum behind them.

    Raises:
        OSError: the disk is full or the folder cannot be written; a file that was there before still is.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # it may be a second name of another checkpoint
        with temporary.open("xb") as file:
            writer = HashingWriter(file)
            write(writer)
            writer.finish()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def keep_as(source: Path, target: Path) -> None:
    """Give the checkpoint ``source`` a second name, atomically. Its bytes are copied only where the file system has no
    hard links.

    Raises:
        RunError: it could not be done; what had that name before still has.
    """
    temporary = target.with_suffix(".tmp")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError as fault:
            if fault.errno not in NO_HARD_LINKS:
                raise
            shutil.copyfile(source, temporary)
            _sync(temporary)
        temporary.replace(target)
        _sync(target.parent)
    except OSError as fault:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RunError(f"checkpoint {target} could not be written ({_reason(fault)})") from fault


def resume_state(last: Path, best: Path) -> dict[str, Any]:
    """Return the state in ``last``.

    Raises:
        RunError: as ``load_checkpoint``; says whether ``best`` is whole and how to go on from it. That is for the user
            to decide: it is of an earlier step.
    """
    try:
        return load_checkpoint(last)
    except RunError as fault:
        if not last.exists():
            raise
        try:
            step = load_checkpoint(best)["step"]
        except (RunError, KeyError):
            left = "No other checkpoint of the run is whole: start anew in another --out"
        else:
            left = f"{best}, of step {step}, is whole: to go on from there, `cp {best} {last}`, then --resume"
        raise RunError(f"{fault}. {left}") from fault


def not_resumable(path: Path, fault: Exception) -> RunError:
    """Return the error of a file whose content is not that of a run's checkpoint."""
    first = next(iter(str(fault).splitlines()), type(fault).__name__)
    what = f"lacks {fault}" if isinstance(fault, KeyError) else first
    return RunError(f"checkpoint {path} cannot be resumed from: {what}; restore it, or start anew in another --out")


def check_weights(path: Path) -> None:
    """Refuse a checkpoint of ours that is not as it was written; whatever else may be a file of weights passes.

    Raises:
        ValueError: it is damaged.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:  # not there: an error where it is loaded
        try:
            if has_checksum(file):
                check_bytes(file)
        except ChecksumError as fault:
            raise ValueError(f"--weights {path} is damaged ({fault}); name another checkpoint of its run") from fault


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in ``path``, on the CPU.

    Raises:
        RunError: there is none, it is not as it was written, or not a checkpoint of this version.
    """
    if not path.exists():
        raise RunError(f"no checkpoint at {path}: name the folder of a run that has written one")
    try:
        with path.open("rb") as file:
            check_bytes(file)
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except ChecksumError as fault:
        raise RunError(f"checkpoint {path} is damaged and was not loaded ({fault})") from fault
    except Exception as fault:  # torch.load raises whatever its unpickler meets
        raise RunError(f"checkpoint {path} cannot be read ({_reason(fault)})") from fault
    if not isinstance(state, dict):
        raise RunError(f"{path} is no checkpoint of app.train: it holds a {type(state).__name__}")
    if state.get("format") != FORMAT:
        raise RunError(f"checkpoint {path} has format {state.get('format')}, this version reads {FORMAT}")
    return state | {key: printable_values(state[key]) for key in PRINTED if key in state}


def _sync(path: Path) -> None:
    """Make the bytes of a file, or the renames in a folder, last through a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as fault:
        if fault.errno != errno.EINVAL or not path.is_dir():  # some file systems flush files alone
            raise
    finally:
        os.close(descriptor)


def _reason(fault: BaseException) -> str:
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    first = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {first[0]}" if first else type(fault).__name__


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the default generators, from which only a model that draws in validation continues."""
    return {"cpu": torch.get_rng_state(), "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []}


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators of the CPU and of ``device``. Older checkpoints have a state for each GPU, first rank 0's."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"]:
        torch.cuda.set_rng_state(state["cuda"][0], device)
