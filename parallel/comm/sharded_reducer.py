"""Divide the gradients and the update of a stage among the ranks that hold it: ZeRO, stages 1 and 2.

Each bucket is divided into flat slices of one size, one for each rank, whatever parameters the borders cut. So
all ranks hold equal bytes of any model, and one reduce-scatter sums a bucket; slices at borders of parameters would
differ by up to the largest parameter, a tenth of ResNet-50. After Rajbhandari et al. 2020, ZeRO, sections 5.1 and 5.2,
with the messages of section 7.2.1: gradients by reduce-scatter, parameters by all-gather, no more than an all-reduce.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator, Work, part_bytes, sum_bytes
from parallel.comm.grad_reducer import Bucket, GradReducer
from parallel.comm.objects import in_memory_order
from parallel.memory.rank_bytes import IN_FLIGHT


@dataclass(frozen=True, eq=False)
class ParameterPiece:
    """Part of a parameter that lies in this rank's slice.

    Attributes:
        parameter: the whole one.
        begin: the first element, in the order of the parameter's memory.
        start: its place in the slice.
        value: (k, 1, ..., 1), with the dims of the parameter; shares the parameter's memory.
    """

    parameter: nn.Parameter
    begin: int
    start: int
    value: nn.Parameter

    def of_state(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return the piece's part of an optimizer's state of the whole parameter."""
        shape = self.parameter.shape
        return {
            key: self._of(value) if isinstance(value, Tensor) and value.shape == shape else value
            for key, value in whole.items()
        }

    def _of(self, whole: Tensor) -> Tensor:
        laid_out = torch.empty_like(self.parameter, dtype=whole.dtype, device=whole.device).copy_(whole)
        return _elements(laid_out, self.begin, self.begin + self.value.numel()).clone()


def _elements(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Return elements in the order of memory, as (k, 1, ..., 1) with the number of dims of ``tensor``."""
    return in_memory_order(tensor.detach())[begin:end].view([-1, *[1] * (tensor.ndim - 1)] if tensor.ndim else [])


def joined(like: Tensor, pieces: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's state of a whole parameter; of several pieces, on the CPU.

    Args:
        like: the parameter.
        pieces: state of each piece, by its first element.
    """
    state = dict(next(iter(pieces.values())))
    for key, value in state.items():
        parts = {begin: piece[key] for begin, piece in pieces.items()}
        is_divided = isinstance(value, Tensor) and value.ndim == like.ndim
        if is_divided and value.shape != like.shape and sum(part.numel() for part in parts.values()) == like.numel():
            state[key] = torch.empty_like(like, dtype=value.dtype, device="cpu")
            for begin, part in parts.items():
                _elements(state[key], begin, begin + part.numel()).copy_(part)
    return state


class SlicedBucket(Bucket):
    """A bucket whose flat tensor is there from its first gradient to its sum; this rank's slice of the sum stays.

    Attributes:
        own: the slice; None before the first sum of a step.
        pieces: of parameters in it, by number.
        unused: numbers of the parameters that no rank had a gradient for.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], communicator: Communicator) -> None:
        super().__init__(parameters)
        self._rank, self._world = communicator.rank, communicator.world
        self.size = -(-self.offsets[-1] // self._world)
        self.views = []
        self.own: Tensor | None = None
        self.unused: set[int] = set()
        self._filled: set[int] = set()
        self.pieces: dict[int, ParameterPiece] = {}
        first = self._rank * self.size
        for number, (parameter, offset) in enumerate(zip(self.parameters, self.offsets, strict=False)):
            begin, end = max(first - offset, 0), min(first + self.size - offset, parameter.numel())
            if begin < end:
                value = nn.Parameter(_elements(parameter, begin, end))
                self.pieces[number] = ParameterPiece(parameter, begin, offset + begin - first, value)

    @property
    def length(self) -> int:
        return self._world * self.size

    def clear(self) -> None:
        """Forget the gradients of the step before."""
        self.with_grad.clear()
        self.own = None
        self._close()
        for each in (*self.parameters, *(piece.value for piece in self.pieces.values())):
            each.grad = None

    def open(self) -> Self:
        """Make the flat tensor, of whatever numbers its memory holds."""
        first = self.parameters[0]
        self.flat = torch.empty(self.length, dtype=first.dtype, device=first.device)
        self.views = self.views_of(self.flat)
        return self

    def take(self, number: int) -> None:
        """Put a gradient that backward has made into the flat tensor, to which it adds those that follow."""
        if not self.views:
            self.open()
        if number not in self._filled:
            parameter, view = self.parameters[number], self.views[number]
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
            self._filled.add(number)

    def rows(self) -> Tensor:
        """Return the slices (world, n) of all ranks, to be summed; zeros where this rank has no gradients."""
        if not self.views:
            self.open()
        for number, parameter in enumerate(self.parameters):
            parameter.grad = None
            if number not in self._filled:
                self.views[number].zero_()
        self.flat[self.offsets[-1] :].zero_()
        return self.flat.view(self._world, self.size)

    def keep_own(self) -> None:
        """After the sum: free all but this rank's slice."""
        own = self.flat.view(self._world, self.size)[self._rank]
        self.own = own.clone() if self.own is None else self.own.add_(own)
        self._close()

    def drop_unused_grads(self) -> None:
        """After the sum: let the pieces have their gradients, but for parameters that no rank had one for."""
        assert self.own is not None
        for number, piece in self.pieces.items():
            part = self.own[piece.start : piece.start + piece.value.numel()].view_as(piece.value)
            piece.value.grad = None if number in self.unused else part

    def values(self) -> Tensor:
        """Return this rank's slice (n,) of the parameters."""
        first = self.parameters[0]
        own = torch.zeros(self.size, dtype=first.dtype, device=first.device)
        for piece in self.pieces.values():
            own[piece.start : piece.start + piece.value.numel()] = piece.value.detach().view(-1)
        return own

    def _close(self) -> None:
        self.views = []
        self._filled.clear()
        self.flat = torch.empty(0)


class ShardedReducer(GradReducer):
    """Gradients of one stage, of which each of the ranks that hold it keeps a slice, and the update of that slice.

    Arguments as of ``GradReducer``. Gradients may be summed several times in a step; the slices add up. The parameters
    have no gradients after a step; ``pieces`` have.

    Args:
        allocating: gives the context in which buckets and slices are made.
    """

    advice = "use --zero 1 and --gradient-buckets=0"

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        communicator: Communicator,
        *,
        overlap: bool,
        bucket_bytes: int | None = None,
        allocating: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._slices: list[SlicedBucket] = []
        self._allocating = allocating
        self._sent, self._all_begun = 0, False
        super().__init__(parameters, communicator, overlap=overlap, bucket_bytes=bucket_bytes)

    def _bucket(self, parameters: Sequence[nn.Parameter]) -> Bucket:
        self._slices.append(SlicedBucket(parameters, self._communicator))
        return self._slices[-1]

    @property
    def pieces(self) -> Iterator[ParameterPiece]:
        """Parts of the parameters that this rank updates."""
        return (piece for bucket in self._slices for piece in bucket.pieces.values())

    @property
    def sent_bytes(self) -> int:
        return self._sent

    def begin_step(self) -> None:
        self._sent, self._all_begun = 0, False
        super().begin_step()

    def begin(self) -> None:
        self._end_round()
        super().begin()
        self._all_begun = True

    def _added(self, place: int, number: int) -> None:
        self._end_round()
        with self._allocating():
            self._slices[place].take(number)
        super()._added(place, number)

    def _begin_sum(self, bucket: Bucket) -> Work:
        if len(self._works) == IN_FLIGHT:
            self._await_oldest()
        with self._allocating():
            rows = self._slices[self._begun].rows()
        self._sent += part_bytes(rows.nbytes, self._communicator.world)
        return self._communicator.ireduce_scatter(rows)

    def _await_oldest(self) -> None:
        oldest = self._slices[self._begun - len(self._works)]
        super()._await_oldest()
        with self._allocating():
            oldest.keep_own()

    def _end_round(self) -> None:
        """Wait for the sums if all have begun, before gradients of another microbatch are taken."""
        if self._all_begun:
            self._await_all()
            self._all_begun = False

    def finish(self) -> None:
        """Wait for the sums, and let the pieces have their gradients."""
        if self._slices:
            self._find_unused()
        super().finish()

    def _find_unused(self) -> None:
        """Find the parameters that no rank had a gradient for."""
        first, numbers = self._slices[0].parameters[0], [len(bucket.parameters) for bucket in self._slices]
        ranks = torch.ones(sum(numbers), device=first.device)
        for bucket, own in zip(self._slices, torch.split(ranks, numbers), strict=True):
            for number in bucket.without_grad():
                own[number].zero_()
        self._sent += sum_bytes(ranks.nbytes, self._communicator.world)
        self._communicator.all_reduce(ranks)
        for bucket, own in zip(self._slices, torch.split(ranks, numbers), strict=True):
            missing = bucket.without_grad()
            found = own.tolist() if missing else []  # where none is missing, nothing is read from the device
            bucket.unused = {number for number in missing if not found[number]}

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """After the update: give every rank the whole parameters."""
        for bucket in self._slices:
            with self._allocating():
                own = bucket.values()
                self._sent += part_bytes(self._communicator.world * own.nbytes, self._communicator.world)
                torch._foreach_copy_(bucket.parameters, bucket.views_of(self._communicator.all_gather(own)))

    def gathered_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the whole gradients; all ranks that hold the stage call it."""
        whole: dict[nn.Parameter, Tensor] = {}
        for bucket in self._slices:
            assert bucket.own is not None
            views = bucket.views_of(self._communicator.all_gather(bucket.own))
            pairs = enumerate(zip(bucket.parameters, views, strict=True))
            whole |= {parameter: view for number, (parameter, view) in pairs if number not in bucket.unused}
        return whole
