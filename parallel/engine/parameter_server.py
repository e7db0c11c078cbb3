"""Parameter server: holds parameters and the optimizer, and applies each gradient as it arrives.

Asynchronous SGD after Dean et al. 2012 (Downpour), with bounded staleness after Ho et al. 2013 (SSP). A worker pulls
the parameters, computes the gradient of one minibatch and pushes it; the server applies the push on arrival. Letters: W
workers, S the staleness bound. The server is on rank 0 and serves every other rank from a thread of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.comm.grad_reducer import Bucket, bucketed
from parallel.engine.optimizer_step import MakeOptimizer, OptimizerStep
from parallel.schedule.text import Push, PushRule

TAG = 1
"""Of parameters and gradients."""


class ParameterServer:
    """Parameters that several workers update.

    With equal learning rates, the W pushes of a round sum to one synchronous update on W minibatches: each has the
    gradient of the mean loss of its minibatch, and a W-th of the learning rate.

    Args:
        parameters: of the model, by name; the server updates copies of those that are trained.
        communicator: of all workers; this one is rank 0.

    Attributes:
        update: optimizer over the copies.
        values: the copies.
        pushes: applied in this step so far.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: MakeOptimizer,
        communicator: Communicator,
        rule: PushRule,
    ) -> None:
        copies = {name: nn.Parameter(torch.empty_like(p)) for name, p in parameters.items() if p.requires_grad}
        self._sources: list[Tensor] = [parameters[name] for name in copies]
        self._copies: list[Tensor] = list(copies.values())
        self.values, self._gradients = flat_buckets(copies.values()), flat_buckets(copies.values())
        for bucket in self.values:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.data = view
        self.update = OptimizerStep(
            make_optimizer,
            owned={**parameters, **copies},
            unshared=(),
            held={**parameters, **{f"{name} of the server": each for name, each in copies.items()}},
        )
        self._rule, self._communicator = rule, communicator
        # Parameters that are being sent to each other worker, and gradients that arrive from it.
        self._messages = [(self.snapshot(), self.snapshot()) for _ in range(1, communicator.world)]
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self.pushes: list[Push] = []
        self.reload()

    @torch.no_grad()
    def reload(self) -> None:
        """Take over the parameters of the model, which were loaded or drawn."""
        torch._foreach_copy_(self._copies, self._sources)

    def snapshot(self) -> list[Tensor]:
        """Return the present parameters, flat."""
        return [bucket.flat.clone() for bucket in self.values]

    def begin_step(self, step: int, learning_rate: float, shares: Sequence[Sequence[int]]) -> None:
        """Serve the workers, each of which computes the minibatches of its share in order."""
        self._step, self._learning_rate = step, learning_rate
        self._sizes = [len(share) for share in shares]
        self._pulled, self._pushed = [0] * len(shares), [0] * len(shares)
        self._fault: BaseException | None = None
        self.pushes = []
        self._threads = [
            threading.Thread(target=self._serve, args=(worker, share), name=f"server of rank {worker}", daemon=True)
            for worker, share in enumerate(shares)
            if worker
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until every push of the step is applied.

        Raises:
            CommunicationError: a worker is gone or did not answer in time.
        """
        for thread in self._threads:
            thread.join()
        if self._fault is not None:
            raise self._fault

    def pull(self, worker: int, into: Sequence[Tensor]) -> int:
        """Copy the parameters ``into`` flat tensors once the bound allows it; return their version."""
        with self._changed:
            self._wait(worker, self._pushed, self._pulled[worker] - self._rule.staleness)
            for bucket, target in zip(self.values, into, strict=True):
                target.copy_(bucket.flat)
            self._pulled[worker] += 1
            self._changed.notify_all()
            return len(self.pushes)

    def push(self, worker: int, minibatch: int, pulled: int, gradients: Sequence[Tensor]) -> None:
        """Apply the gradients of ``minibatch``, computed at version ``pulled``, once the bound allows it."""
        with self._changed:
            # Without this wait, a worker could pull what another has pushed in the same round.
            self._wait(worker, self._pulled, self._pushed[worker] + 1 - self._rule.staleness)
            staleness = len(self.pushes) - pulled
            rate = self._learning_rate / (1 + staleness if self._rule.by_staleness else len(self._sizes))
            self.apply(Push(self._step, len(self.pushes), worker, minibatch, pulled, staleness, rate), gradients)
            self._pushed[worker] += 1
            self._changed.notify_all()

    def apply(self, push: Push, gradients: Sequence[Tensor]) -> None:
        """Update the parameters."""
        for bucket, gradient in zip(self._gradients, gradients, strict=True):
            bucket.flat.copy_(gradient)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
            bucket.drop_unused_grads()
        self.update.apply(push.learning_rate, scale=1)
        self.pushes.append(push)

    def on_device(self) -> Iterator[Tensor]:
        """Yield the messages to and from other workers."""
        for messages in self._messages:
            yield from itertools.chain(*messages)

    def _wait(self, worker: int, counts: Sequence[int], least: int) -> None:
        """Return once ``counts`` of every other worker is ``least``, or all that it has."""
        others = [other for other in range(len(counts)) if other != worker]
        self._changed.wait_for(
            lambda: self._fault or all(counts[each] >= min(least, self._sizes[each]) for each in others)
        )
        if self._fault is not None:
            raise self._fault

    def _serve(self, worker: int, share: Sequence[int]) -> None:
        values, gradients = self._messages[worker - 1]
        try:
            for minibatch in share:
                pulled = self.pull(worker, values)
                for flat in values:
                    # Not awaited: the gradients come after it, and sends to slower workers may complete before it.
                    self._communicator.isend(flat, worker, TAG)
                for flat in gradients:
                    self._communicator.irecv(flat, worker, TAG).wait()
                self.push(worker, minibatch, pulled, gradients)
        except BaseException as fault:
            with self._changed:
                self._fault = self._fault or fault
                self._changed.notify_all()


def flat_buckets(parameters: Iterable[nn.Parameter]) -> list[Bucket]:
    """Return a flat tensor for each run of parameters of one dtype, with room for their values or gradients."""
    return [Bucket(run).open() for run in bucketed(list(parameters), 0)]
