"""Checkpoints in two phases: copied while the next step computes, written while training continues.

Takes a state and where to write it; returns immediately. The engine's update waits for the copy (``await_copy``); the
thread that copied then writes. After Mohan, Phanishayee, Chidambaram 2021, CheckFreq, section 4.2.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from app.checkpoint.file import save_checkpoint
from parallel.comm.device_thread import on_current_device
from parallel.offload.copies import Copies, Mark

ALIGNMENT = 64
"""Bytes, as torch aligns its own storages."""
NICENESS = 15
"""Of the thread that writes: a step waits for the slowest of its threads, whatever core that one shares."""


class TwoPhaseCheckpoints:
    """Checkpoints in two phases, one at a time; the memory for the copy is reused."""

    def __init__(self, device: torch.device) -> None:
        self._copies = Copies.for_device(device)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._blocked_s = self._write_s = 0.0
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is being copied or written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, state: Mapping[str, Any], parameter_names: frozenset[str], path: Path, also: Path | None) -> None:
        """Begin a checkpoint; call ``finish`` before. From now on updates have to ``await_copy`` first.

        Args:
            state: what ``save_checkpoint`` takes: ``model`` by name, ``optimizer``, and anything else.
            parameter_names: of the model's tensors that only updates change, as they do those of the optimizer. They
                are copied later, all others before this returns.
            also: second name of the file once it is there.

        Raises:
            MemoryError: there is no memory to copy to. What ``state`` holds may be changed again.
        """
        assert self._thread is None, "finish comes first"
        parameters = {name: value for name, value in state.get("model", {}).items() if name in parameter_names}
        deferred = {storage_key(tensor) for tensor in tensors_in([parameters, state.get("optimizer")])}
        tensors = list(tensors_in(state))
        sources = {storage_key(tensor): _bytes_of(tensor) for tensor in tensors}
        targets = self._targets(sources)
        later: list[tuple[Tensor, Tensor]] = []
        marks: list[tuple[Mark, Tensor]] = []
        for key in sorted(sources, key=lambda key: key in deferred):  # first what cannot wait
            source, target = sources[key], targets[key]
            if source.device.type != "cpu":
                mark = self._copies.to_host(source, target)
                if key not in deferred:
                    self._copies.wait(mark)
                marks.append((mark, source))
            elif key in deferred:
                later.append((source, target))
            else:
                copy_bytes(source, target)
        copies = {id(tensor): _like(tensor, targets[storage_key(tensor)]) for tensor in tensors}
        # deepcopy takes an object that it finds in its memo, by id, for copied.
        snapshot = copy.deepcopy(dict(state), memo=dict(copies))

        def complete() -> None:
            for mark, _ in marks:
                self._copies.synchronize(mark)
            for source, target in later:
                copy_bytes(source, target)

        self._copied.clear()
        self._blocked_s = 0.0
        task, arguments = on_current_device(self._copy_and_write), (complete, snapshot, path, also, time.monotonic())
        # A daemon: an interpreter that has to end does not wait for it.
        self._thread = threading.Thread(target=task, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def _copy_and_write(
        self, complete: Callable[[], None], state: dict[str, Any], path: Path, also: Path | None, begun_s: float
    ) -> None:
        try:
            try:
                complete()
            finally:
                self._copied.set()
            # Updates wait for the copy, not for what follows: it takes what they leave of the processor.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            save_checkpoint(path, state, also)
        except BaseException as error:
            self._error = error
        finally:
            self._write_s = time.monotonic() - begun_s

    def await_copy(self) -> None:
        """Wait until no copy is under way, and count how long; from whatever thread updates."""
        if self._thread is None or self._copied.is_set():
            return
        begun_s = time.monotonic()
        self._copied.wait()
        self._blocked_s += time.monotonic() - begun_s

    def finish(self) -> tuple[float, float] | None:
        """Wait until the checkpoint under way is on the disk; None when there is none.

        Return the seconds that an update waited for the copy, and those from ``begin``'s end until it was on the disk.

        Raises:
            RunError: it could not be written; the one before is still there.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._blocked_s, self._write_s

    def _targets(self, sources: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return uint8 tensors for the copies of ``sources`` in the buffer, each a storage of its own."""
        sizes = [-(-source.numel() // ALIGNMENT) * ALIGNMENT for source in sources.values()]
        if sum(sizes) > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)
            try:
                self._buffer = self._copies.empty_on_host(sum(sizes))
            except (OSError, RuntimeError) as error:
                raise MemoryError(f"{sum(sizes)} bytes of host memory cannot be had: {error}") from error
        memory, targets, start = self._buffer.numpy(), {}, 0
        for (key, source), size in zip(sources.items(), sizes, strict=True):
            part = memory[start : start + source.numel()]
            targets[key] = torch.frombuffer(part, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
            start += size
        return targets


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copy uint8 (n,) on the CPU, on this thread alone, letting other threads of Python run."""
    np.copyto(target.numpy(), source.numpy())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested dicts, lists and tuples."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors of one storage share while it is held; ``torch.save`` writes each storage once."""
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of ``tensor`` as uint8 (n,)."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _like(tensor: Tensor, target: Tensor) -> Tensor:
    """Return ``tensor`` as it lies in its storage, in ``target`` instead: uint8 (n,)."""
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(target.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
