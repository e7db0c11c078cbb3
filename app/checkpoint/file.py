"""Checkpoints: what is in the file, and what is said when one cannot be written or read.

Takes any state torch can save; gives it back. A run folder holds ``checkpoints/last.pt`` and ``checkpoints/best.pt``;
whatever happens while one is written, the one before stays readable (``atomic_file.py``), and whatever happens to one
afterwards, it is read as it was written or not at all (``seal.py``).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch

from app.checkpoint.atomic_file import link_file, write_file
from app.checkpoint.seal import SealError, check_seal, has_seal
from app.settings.cli import RunError
from parallel.profile.gpu import is_device_fault
from pipelines.slides.printable import printable_values

FORMAT = 2
"""Since 2 a checkpoint ends with its checksum. One without is refused, as one that was cut short."""


PRINTED = ("settings", "classes", "task")
"""Of a checkpoint's state, what is printed and logged."""


class Sink(Protocol):
    """What a checkpoint is written to, from its first byte to its last."""

    def write(self, data: bytes, /) -> int:
        """Write ``data``; return the number of bytes written."""
        ...

    def flush(self) -> None:
        """Pass on what is not written yet."""
        ...


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` to ``path`` atomically.

    Raises:
        RunError: the disk is full or the folder cannot be written; a checkpoint that was there before still is.
        RuntimeError: of the device that the state is copied from.
    """
    try:
        write_file(path, lambda file: write_state(state, file))
    except (OSError, RuntimeError) as fault:
        if is_device_fault(fault):
            raise
        raise not_written(path, fault) from fault


def write_state(state: dict[str, Any], sink: Sink) -> None:
    """Write the bytes of a checkpoint of ``state`` to ``sink``.

    Raises:
        OSError: as ``sink`` raised it.
    """
    writer = _Writer(sink)
    try:
        torch.save({"format": FORMAT, **state}, cast(IO[bytes], writer))
    except RuntimeError as fault:  # what torch makes of a write that failed
        raise writer.fault or fault from None


def keep_as(source: Path, target: Path) -> None:
    """Give the checkpoint ``source`` a second name, atomically and without copying its bytes.

    Raises:
        RunError: it could not be done; what had that name before still has.
    """
    try:
        link_file(source, target)
    except OSError as fault:
        raise RunError(f"checkpoint {target} could not be written ({_reason(fault)})") from fault


def not_written(path: Path, fault: BaseException) -> RunError:
    """Return what a user is told about a checkpoint that could not be written, and what to do."""
    kept = "there is none before it; free space, then start again"
    if path.exists():
        kept = f"the previous one is kept: {path}; free space, then --resume"
    return RunError(f"checkpoint {path} could not be written ({_reason(fault)}); {kept}")


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
    """Return what a user is told about a file whose content is not that of a run's checkpoint."""
    what = f"lacks {fault}" if isinstance(fault, KeyError) else _first_line(fault)
    return RunError(f"checkpoint {path} cannot be resumed from: {what}; restore it, or start anew in another --out")


def _first_line(fault: Exception) -> str:
    return next(iter(str(fault).splitlines()), type(fault).__name__)


def check_weights(path: Path) -> None:
    """Refuse a checkpoint of ours that is not as it was written; whatever else may be a file of weights passes.

    Raises:
        ValueError: it is damaged.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:  # not there: whoever loads it says so
        try:
            if has_seal(file):
                check_seal(file)
        except SealError as fault:
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
            check_seal(file)
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except SealError as fault:
        raise RunError(f"checkpoint {path} is damaged and was not loaded ({fault})") from fault
    except Exception as fault:  # torch.load raises whatever its unpickler meets
        raise RunError(f"checkpoint {path} cannot be read ({_reason(fault)})") from fault
    if not isinstance(state, dict):
        raise RunError(f"{path} is no checkpoint of app.train: it holds a {type(state).__name__}")
    if state.get("format") != FORMAT:
        raise RunError(f"checkpoint {path} has format {state.get('format')}, this version reads {FORMAT}")
    return state | {key: printable_values(state[key]) for key in PRINTED if key in state}


class _Writer:
    """A sink that remembers why it could not be written to: torch reports only where it stopped."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.fault: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._sink.write(data)
        except OSError as fault:
            self.fault = fault
            raise

    def flush(self) -> None:
        self._sink.flush()


def _reason(fault: BaseException) -> str:
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    first = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {first[0]}" if first else type(fault).__name__
