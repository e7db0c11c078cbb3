"""A replica of a module whose gradients are averaged over the ranks of any communicator while backward runs.

Takes a module, the same on every rank, and a communicator; gives a module with the same forward whose ``.grad`` hold
the mean over the ranks when backward returns. After Li et al. 2020, PyTorch Distributed: Experiences on Accelerating
Data Parallel Training, section 3.2: flat buckets in reverse order of the parameters, each summed once it is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from parallel.comm.communicator import Communicator, Work
from parallel.comm.grad_reducer import Bucket, bucketed, on_gradient
from parallel.comm.objects import broadcast_tensors


class AveragedModule(nn.Module):
    """``module``, averaged. Rank 0's parameters and buffers are given to every rank first.

    A parameter that no rank had a gradient for keeps ``.grad`` None; one that some ranks had none for counts as zero
    there. On every rank at least one parameter must take part in a backward pass that is averaged.

    Args:
        module: dense parameters; those that need gradients now are averaged.
        communicator: the ranks that hold a replica.
        bucket_bytes: of gradients summed at once; 0: all of one dtype; None: ``grad_reducer.BUCKET_BYTES``.
    """

    def __init__(self, module: nn.Module, communicator: Communicator, bucket_bytes: int | None = None) -> None:
        super().__init__()
        self.module = module
        self._communicator = communicator
        self._sync = True
        self._running = False
        self._works: list[Work] = []
        needed = [p for p in module.parameters() if p.requires_grad]
        self._buckets = [Bucket(run) for run in bucketed(needed, bucket_bytes)]
        broadcast_tensors(communicator, [*module.parameters(), *module.buffers()], 0)
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                on_gradient(parameter, self._count, bucket)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes add up gradients on this rank only."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _count(self, bucket: Bucket) -> None:
        """One more parameter of ``bucket`` has its gradient."""
        if not self._sync:
            return
        if not self._running:
            self._running = True
            for each in self._buckets:
                each.missing = len(each.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        bucket.missing -= 1
        # In the order of the buckets, which is the same on every rank.
        while len(self._works) < len(self._buckets) and self._buckets[len(self._works)].missing == 0:
            self._begin(self._buckets[len(self._works)])

    @torch.no_grad()
    def _begin(self, bucket: Bucket) -> None:
        bucket.touched = {number for number, parameter in enumerate(bucket.parameters) if parameter.grad is not None}
        bucket.count()
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        self._works.append(self._communicator.iall_reduce(bucket.flat))

    @torch.no_grad()
    def _finish(self) -> None:
        """Put the averages into the gradients, at the end of backward."""
        for bucket in self._buckets[len(self._works) :]:
            self._begin(bucket)
        works, self._works, self._running = self._works, [], False
        for work, bucket in zip(works, self._buckets, strict=True):
            work.wait()
            bucket.flat.div_(self._communicator.world)
            bucket.settle()
