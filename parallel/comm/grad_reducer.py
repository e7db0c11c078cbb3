"""Sum gradients over the ranks that hold a copy of the parameters: flat buckets, each begun once it is complete.

Gradients are views into the buckets, so that a bucket is summed without copying. Buckets stand in reverse order of the
parameters, about that in which backward completes them (Li et al. 2020, PyTorch Distributed, section 3.2).
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator, Work, sum_bytes
from parallel.comm.objects import in_memory_order
from parallel.memory.rank_bytes import BUCKET_BYTES

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


class Bucket:
    """Parameters of one dtype whose gradients lie in one flat tensor, with one number behind them per parameter: how
    many ranks had a gradient for it. One that no rank had stays None, so that the optimizer passes it over as it would
    in a single process. ``with_grad``: numbers of those that this rank has a gradient for."""

    flat: Tensor
    views: list[Tensor]

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.offsets = [0, *itertools.accumulate(parameter.numel() for parameter in parameters)]
        self.with_grad: set[int] = set()
        self.pending: set[int] = set()

    @property
    def length(self) -> int:
        """Elements of the flat tensor."""
        return self.offsets[-1] + len(self.parameters)

    def open(self) -> Self:
        """Make the flat tensor, of zeros."""
        first = self.parameters[0]
        self.flat = torch.zeros(self.length, dtype=first.dtype, device=first.device)
        self.views = self.views_of(self.flat)
        return self

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Return the part of ``flat`` that belongs to each parameter, in its shape and its order of dims."""
        # A dense parameter's own strides fit into as many elements, whatever the order of its dims.
        places = zip(self.parameters, self.offsets, strict=False)
        return [torch.as_strided(flat, each.shape, each.stride(), offset) for each, offset in places]

    def clear(self) -> None:
        """Zero the gradients and put them where backward adds to them."""
        self.flat.zero_()
        self.with_grad.clear()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def count(self) -> None:
        """Before the sum: put down which parameters this rank has a gradient for."""
        ranks = self.flat[self.offsets[-1] :].fill_(1)
        for number in self.without_grad():
            ranks[number].zero_()

    def drop_unused_grads(self) -> None:
        """After the sum: take the gradient from the parameters that no rank had one for."""
        if without_grad := self.without_grad():  # else nothing is read from the device, which waits for the sum
            ranks = self.flat[self.offsets[-1] :].tolist()
            for number in without_grad:
                if not ranks[number]:
                    self.parameters[number].grad = None

    def without_grad(self) -> list[int]:
        """Return the numbers of the parameters that this rank has no gradient for."""
        return [number for number in range(len(self.parameters)) if number not in self.with_grad]


class GradReducer:
    """The gradients of one stage and the other ranks that hold it.

    Args:
        parameters: of the stage; all dense.
        communicator: the ranks that hold a copy, this one among them.
        overlap: sum while the last backward pass still runs; not where gradients of parameters come after it.
        bucket_bytes: as of ``bucketed``.
    """

    advice = "use --gradient-buckets=0"
    """For a model that adds a gradient after the sum of its bucket has begun."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        communicator: Communicator,
        *,
        overlap: bool,
        bucket_bytes: int | None = None,
    ) -> None:
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self.buckets: list[Bucket] = []
        self._communicators: list[Communicator] = []
        self._works: deque[Work] = deque()
        """Sums under way, of the last of those buckets whose sums have begun."""
        self._begun = 0
        self._final = False
        self._overlap = overlap
        self.add(parameters, communicator)

    def add(self, parameters: Iterable[nn.Parameter], communicator: Communicator) -> None:
        """Sum the gradients of further parameters, after those before, over the ranks that hold a copy of these."""
        for group in bucketed([p for p in parameters if p.requires_grad], self._bucket_bytes):
            self.buckets.append(bucket := self._bucket(group))
            self._communicators.append(communicator)
            for number, parameter in enumerate(bucket.parameters):
                on_gradient(parameter, self._added, len(self.buckets) - 1, number)

    @property
    def summed(self) -> frozenset[int]:
        """Return the ids of the parameters whose gradients are summed."""
        return frozenset(id(parameter) for bucket in self.buckets for parameter in bucket.parameters)

    def _bucket(self, parameters: Sequence[nn.Parameter]) -> Bucket:
        return Bucket(parameters).open()

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends in a step."""
        pairs = zip(self.buckets, self._communicators, strict=True)
        return sum(sum_bytes(bucket.flat.nbytes, ranks.world) for bucket, ranks in pairs)

    def begin_step(self) -> None:
        """Zero the gradients."""
        assert not self._works
        self._final = False
        for bucket in self.buckets:
            bucket.clear()

    def expect_final_grads(self) -> None:
        """The next backward pass is the stage's last of this step: each bucket is summed as soon as it is complete."""
        self._final = self._overlap
        for bucket in self.buckets:
            bucket.pending = set(range(len(bucket.parameters)))

    def begin(self) -> None:
        """Begin to sum what has not been begun. Every rank that holds the stage comes here in the same order."""
        self._final = False
        while self._begun < len(self.buckets):
            self._sum_next()

    def finish(self) -> None:
        """Wait for the sums."""
        self._await_all()
        for bucket in self.buckets:
            bucket.drop_unused_grads()

    def gathered_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients that are divided among ranks, whole, after a step: none here."""
        return {}

    def _added(self, place: int, number: int) -> None:
        bucket = self.buckets[place]
        bucket.with_grad.add(number)
        if not self._final:
            return
        if number not in bucket.pending:
            raise added_twice(bucket.parameters[number], self.advice)
        bucket.pending.remove(number)
        # In the order of the buckets, which is the same on every rank.
        while self._begun < len(self.buckets) and not self.buckets[self._begun].pending:
            self._sum_next()

    def _sum_next(self) -> None:
        self._works.append(self._begin_sum(self.buckets[self._begun]))
        self._begun += 1

    def _begin_sum(self, bucket: Bucket) -> Work:
        bucket.count()
        return self._communicators[self._begun].iall_reduce(bucket.flat)

    def _await_all(self) -> None:
        while self._works:
            self._await_oldest()
        self._begun = 0

    def _await_oldest(self) -> None:
        self._works.popleft().wait()


def bucketed(tensors: Sequence[AnyTensor], bucket_bytes: int | None = None) -> list[list[AnyTensor]]:
    """Return ``tensors`` from the last to the first, in runs of one dtype and device of at most ``bucket_bytes``, or of
    one tensor.

    Args:
        bucket_bytes: 0: as long as the dtype is the same; None: ``BUCKET_BYTES``.
    """
    most = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    runs: list[list[AnyTensor]] = []
    size = 0
    for tensor in reversed(tensors):
        own = tensor.numel() * tensor.element_size()
        before = runs[-1][0] if runs else tensor
        is_alike = (before.dtype, before.device) == (tensor.dtype, tensor.device)
        if not runs or not is_alike or (most and size + own > most):
            runs.append([])
            size = 0
        runs[-1].append(tensor)
        size += own
    return runs


@torch.no_grad()
def broadcast_tensors(communicator: Communicator, tensors: Sequence[Tensor], source: int) -> None:
    """Give every rank the dense ``tensors`` of rank ``source``, in place, in messages of about ``BUCKET_BYTES``."""
    for run in bucketed(tensors) if communicator.world > 1 else ():
        parts = [in_memory_order(tensor) for tensor in run]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        communicator.broadcast(flat, source)
        if len(parts) > 1:
            for part, received in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
                part.copy_(received)


def added_twice(parameter: nn.Parameter, instead: str) -> ValueError:
    """Return the error where a gradient of ``parameter`` that was taken for final was not the last of its pass."""
    return ValueError(
        f"one backward pass adds two gradients to a parameter of shape {tuple(parameter.shape)}, as where "
        "torch.utils.checkpoint is given a layer twice with use_reentrant=True: give it use_reentrant=False, or "
        f"{instead}"
    )


def on_gradient(parameter: nn.Parameter, method: Callable[..., None], *arguments: Any) -> None:
    """Call ``method(*arguments)`` whenever a gradient was added to ``parameter``, until its owner is freed.

    The garbage collector does not see hooks: one that held its owner, which holds the parameter, would keep both.
    """
    weak = weakref.WeakMethod(method)

    def hook(_: Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive(*arguments)

    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    weakref.finalize(method.__self__, handle.remove)  # type: ignore[attr-defined]
