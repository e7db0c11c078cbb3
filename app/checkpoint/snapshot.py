"""A consistent copy of everything a checkpoint holds, made while the next step computes.

Takes a state and the names of what in it changes in updates alone; gives the same state on the host, in memory that is
reused. What forward passes change is copied before ``begin`` returns, the rest by ``complete``, which has to be done
when the next update begins. After Mohan, Phanishayee, Chidambaram 2021, CheckFreq, section 4.2: the snapshot phase.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.checkpoint.shared_buffer import ALIGNMENT, SharedBuffer
from parallel.offload.copies import Copies, Mark


class Snapshot:
    """One copy of a state, in ``buffer``.

    Storages are copied whole and once, however many tensors lie in them: what is saved of the copy is, bit for bit,
    what would have been saved of the original.

    Args:
        buffer: nobody else uses it until the copy is not needed any more.
        copies: of the device on which tensors may lie.

    Attributes:
        state: the copy; its tensors are right once ``complete`` has returned.
    """

    def __init__(self, buffer: SharedBuffer, copies: Copies) -> None:
        self._buffer = buffer
        self._copies = copies
        self._later: list[tuple[Tensor, Tensor]] = []
        self._marks: list[tuple[Mark, Tensor]] = []
        """Of copies under way, with what has to be held until then."""
        self.state: dict[str, Any] = {}

    def begin(self, state: Mapping[str, Any], parameter_names: frozenset[str]) -> None:
        """Take everything over; tensors of the optimizer, and those of the model with ``parameter_names``, have to be
        left as they are until ``complete`` has returned.

        Args:
            state: as a checkpoint holds it: ``model`` by name, ``optimizer``, and anything else.

        Raises:
            OSError: there is no memory to copy it to.
        """
        steady = {name: value for name, value in state.get("model", {}).items() if name in parameter_names}
        waiting = {key(tensor) for tensor in tensors_in([steady, state.get("optimizer")])}
        tensors = list(tensors_in(state))
        sources = {key(tensor): tensor.untyped_storage() for tensor in tensors}
        offsets, size = _laid_out(sources)
        self._buffer.reserve(size)
        targets: dict[int, Tensor] = {}
        # First what cannot wait.
        for number in sorted(sources, key=lambda number: number in waiting):
            source = sources[number]
            if not source.nbytes():
                targets[number] = torch.empty(0, dtype=torch.uint8)
                continue
            targets[number] = self._buffer.part(offsets[number], source.nbytes())
            self._copy(_bytes_of(source), targets[number], at_once=number not in waiting)
        copies = {id(tensor): _like(tensor, targets[key(tensor)]) for tensor in tensors}
        self.state = copy.deepcopy(dict(state), memo=dict(copies))

    def complete(self) -> None:
        """Copy what is left; on any thread. Lets other threads compute meanwhile."""
        for mark, _ in self._marks:
            self._copies.synchronize(mark)
        for source, target in self._later:
            copy_bytes(source, target)
        self._marks, self._later = [], []

    def _copy(self, source: Tensor, target: Tensor, at_once: bool) -> None:
        if source.device.type != "cpu":
            mark = self._copies.to_host(source, target)
            if at_once:
                self._copies.wait(mark)
            self._marks.append((mark, source))
        elif at_once:
            copy_bytes(source, target)
        else:
            self._later.append((source, target))


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copy uint8 (n,) on the CPU, on this thread alone, letting other threads of Python run."""
    np.copyto(target.numpy(), source.numpy())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def key(tensor: Tensor) -> int:
    """Return a number that is the same for tensors of one storage, by which ``torch.save`` tells storages apart, while
    they are held."""
    return int(tensor.untyped_storage()._cdata)


def _laid_out(storages: Mapping[int, torch.UntypedStorage]) -> tuple[dict[int, int], int]:
    """Return the offset of each storage, and the bytes of them all."""
    offsets, size = {}, 0
    for number, storage in storages.items():
        offsets[number] = size
        size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
    return offsets, size


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return all of ``storage`` as uint8 (n,)."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _like(tensor: Tensor, target: Tensor) -> Tensor:
    """Return ``tensor`` as it lies in its storage, in ``target`` instead: uint8 (n,)."""
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(target.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
