"""Works that operations over NCCL and Gloo return, and the share of each member in them, for ``nccl``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.helpers.sim_gpu.hazards import HOST
from tests.helpers.sim_gpu.timeline import Hang, Meeting, Stream, Work

if TYPE_CHECKING:
    from tests.helpers.sim_gpu.gpus import Gpus

OPPOSITE = {"send": "receive", "receive": "send"}


@dataclass(eq=False)
class Group:
    """A process group, as one of its members has it.

    Attributes:
        ranks: of the whole run.
        number: of this member in it.
        backends: "gloo" or "nccl" for each type of device.
    """

    name: str
    ranks: tuple[int, ...]
    number: int
    backends: dict[str, str]
    collectives: int = 0
    members: dict[str, Member] = field(default_factory=dict)


@dataclass(eq=False)
class Share:
    """Tensor and operation that one member brings."""

    who: str
    operation: str
    tensor: Tensor
    work: GlooWork | None = None

    def check(self, other: Share, name: str) -> None:
        """Raise a ``Hang`` unless this and what another member brought are one operation."""
        alike = self.tensor.numel() == other.tensor.numel() and self.tensor.dtype == other.tensor.dtype
        if not alike or OPPOSITE.get(self.operation, self.operation) != other.operation:
            raise Hang(f"{name}: {self} meets {other}: numbers are mixed up, or both hang")

    def __str__(self) -> str:
        return f"{self.operation} of {self.tensor.numel()} {self.tensor.dtype} on {self.who}"


@dataclass(eq=False)
class Member:
    """A member of an NCCL communicator.

    Attributes:
        shared: by all members: what each has brought to operation n.
    """

    stream: Stream
    shared: dict[int, tuple[Meeting, dict[int, Share]]]
    count: int = 0
    last: Work | None = None


class NcclWork:
    """Work of an operation over NCCL; as in torch, it holds the tensors until ``wait``, or until it is done."""

    def __init__(self, gpus: Gpus, tensors: Sequence[Tensor], stream: Stream, done: Any) -> None:
        self._gpus, self._stream, self._done = gpus, stream, done
        self._tensors = tensors

    def wait(self) -> bool:
        self._done.wait(torch.cuda.current_stream(self._stream.device))
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        done: bool = self._done.query()
        if done:
            self.let_go()
        return done

    def is_held(self) -> bool:
        """Return whether the tensors still are; torch's watchdog looks, too."""
        return bool(self._tensors) and not self.is_completed()

    def let_go(self) -> None:
        """If nothing has waited: the memory is given out again after this operation."""
        for tensor in self._tensors:
            memory = self._gpus.memories.of(tensor)
            assert memory is not None
            memory.recorded.add(self._stream)
        self._tensors = ()


class GlooWork:
    """Work that an operation over Gloo returns.

    Args:
        arrive: what is left to do in ``wait``, which alone tells that it is done; None of a send.
    """

    def __init__(self, gpus: Gpus, what: str, tensor: Tensor, arrive: Callable[[], object] | None) -> None:
        self._gpus, self._what, self._tensor, self._arrive = gpus, what, tensor, arrive
        self.met = self._waited = False
        self._touch()

    def wait(self) -> bool:
        self._gpus.timeline.block(lambda: self.met, f"{self._what} waits")
        if not self._waited:
            self._touch()
            if self._arrive:
                self._arrive()
        self._waited = True
        return True

    def is_completed(self) -> bool:
        return self._waited or (self.met and self._arrive is None)

    def _touch(self) -> None:
        """The host uses the tensor, which may be page-locked."""
        memory = self._gpus.memories.of(self._tensor)
        if memory is not None:
            self._gpus.process.hazards.access(HOST, self._what, [], [memory.number])
