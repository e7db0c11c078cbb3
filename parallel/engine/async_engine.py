"""Asynchronous SGD: workers push the gradient of each minibatch to a parameter server, which applies it as it arrives.

A step of the training loop is a window: its m microbatches are minibatches of one update each. Workers compute their
shares in order; between two steps all of them have the same parameters, so that validation, checkpoints and shares are
those of data parallelism. Delayed gradients are not those of the plain step; the log of pushes repeats a run.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.comm.communicator import Communicator
from parallel.engine.engine import Engine
from parallel.engine.parameter_server import TAG, flat_buckets
from parallel.engine.rank_program import RankProgram
from parallel.engine.step import Microbatch, NonFiniteLoss, Observer, StepBatches, StepResult, mean_loss, read_losses
from parallel.schedule.action import Action, Kind
from parallel.schedule.text import Push


class AsyncEngine(Engine):
    """Minibatches of one worker.

    Args:
        work: of this rank: one stage, the whole model; on rank 0, which computes its share as well, with the server.
        communicator: all workers.
        replayed: pushes of an earlier run, in order, which are applied in place of those of workers; with one rank.
    """

    def __init__(
        self,
        work: RankProgram,
        communicator: Communicator,
        *,
        replayed: Sequence[Push] = (),
        seed: int = 0,
        observer: Observer | None = None,
    ) -> None:
        self._server = work.server
        super().__init__(work, communicator, seed=seed, observer=observer)
        self._stage = work.stages[0]
        self._pulled = flat_buckets(p for p in self._stage.module.parameters() if p.requires_grad)
        self._flats = [bucket.flat for bucket in self._pulled]
        self._replayed: dict[int, list[Push]] = {}
        for push in replayed:
            self._replayed.setdefault(push.step, []).append(push)
        if len({push.worker for push in replayed}) > 1:
            self._stage.statistics.alone = False

    def _follow(self, work: RankProgram) -> None:
        super()._follow(work)
        self._of: dict[int, list[tuple[int, Action]]] = defaultdict(list)
        for position, action in enumerate(self._actions):
            if action.microbatch is not None:
                self._of[action.microbatch].append((position, action))

    def step(self, microbatches: Iterable[Microbatch], step: int, learning_rate: float) -> StepResult:
        self._stage.module.train()
        self._stage.statistics.begin_step(self._work.m)
        self._work.update.begin_step()
        self._marks, self._losses, self._waited_s = [], {}, 0.0
        self._feed, self._step = StepBatches(microbatches, self.share), step
        if self._replayed:
            self._replay(step)
        else:
            self._work_off(step, learning_rate)
        losses = read_losses(self._losses, self._work.m)
        tiles = int(losses[1].sum())
        try:
            loss = mean_loss(self._communicator, losses)
        except NonFiniteLoss as fault:
            fault.updated = True
            raise
        self._stage.statistics.end_step()
        return StepResult(loss, tiles, self._own_seconds(), self._waited_s, pushes=self.pushes)

    @property
    def pushes(self) -> tuple[Push, ...]:
        """Updates of the last step, on the server's rank."""
        return tuple(self._server.pushes) if self._server else ()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last update, on the rank that computed them."""
        return super().gradients() if self._newest in self.share else {}

    def _work_off(self, step: int, learning_rate: float) -> None:
        """Pull, compute and push the minibatches of this rank's share; return once all ranks have the same state."""
        if self._server:
            shares = [[a.i for a in self.schedule[rank] if a.kind is Kind.FORWARD] for rank in sorted(self.schedule)]
            self._server.begin_step(step, learning_rate, shares)
        for i in self.share:
            with self._waiting():
                pulled = self._pull()
            gradients = self._gradients_of(i)
            if self._server:
                with self._waiting():
                    self._server.push(0, i, pulled, gradients)
            else:
                for flat in gradients:
                    self._communicator.isend(flat, 0, TAG)  # done before the next pull
        with self._waiting():
            self._drain()

    def _pull(self) -> int:
        """Take the server's present parameters; return their version, which other ranks than the server's ignore."""
        version = 0
        if self._server:
            version = self._server.pull(0, self._flats)
        else:
            for flat in self._flats:
                self._communicator.irecv(flat, 0, TAG).wait()
        self._load()
        return version

    @torch.no_grad()
    def _load(self) -> None:
        """Set the parameters of the model to what was pulled."""
        for bucket in self._pulled:
            torch._foreach_copy_(bucket.parameters, bucket.views)

    def _gradients_of(self, i: int) -> list[Tensor]:
        """Return the flat gradients of minibatch ``i``; none counts where its loss is not finite."""
        reducer = self._work.reducers[0]
        reducer.begin_step()
        for position, action in self._of[i]:
            self._perform(position, action)
        for bucket in reducer.buckets:
            if not self._losses[i][0].isfinite():
                bucket.with_grad.clear()
            bucket.count()
        return [bucket.flat for bucket in reducer.buckets]

    def _drain(self) -> None:
        """Give every rank the last parameters, and the order of the pushes, in which statistics are updated."""
        order = torch.zeros(self._work.m, dtype=torch.int64)
        if self._server:
            self._server.finish()
            for push in self._server.pushes:
                order[push.minibatch] = push.push
        self._communicator.broadcast(order)
        self._stage.statistics.renumber(order.tolist())
        self._newest = int(order.argmax())
        self._share_parameters()

    def _share_parameters(self) -> None:
        if self._server:
            for flat, own in zip(self._flats, self._server.snapshot(), strict=True):
                flat.copy_(own)
        for flat in self._flats:
            self._communicator.broadcast(flat)
        self._load()

    def _replay(self, step: int) -> None:
        """Apply the logged pushes of ``step`` in their order."""
        server, pushes = self._server, self._replayed.get(step, [])
        assert server is not None
        if sorted(push.minibatch for push in pushes) != list(self.share):
            raise ValueError(
                f"the log of pushes has {len(pushes)} minibatches of step {step + 1}, of {len(self.share)}: replay it "
                "with the --steps and --microbatches of its run"
            )
        uses, versions = Counter(push.pulled for push in pushes), {}
        server.begin_step(step, 0.0, [self.share])
        for push in pushes:
            if push.push in uses:
                versions[push.push] = server.snapshot()
            for flat, version in zip(self._flats, versions[push.pulled], strict=True):
                flat.copy_(version)
            self._load()
            uses[push.pulled] -= 1
            if not uses[push.pulled]:
                del versions[push.pulled]
            server.apply(push, self._gradients_of(push.minibatch))
        self._drain()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        if self._observer:
            self._observer.at(-1)  # in none of its actions, which are timed more strictly
        begun_s = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - begun_s

    def _swap_average(self) -> None:
        super()._swap_average()
        self._share_parameters()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._server:
            self._server.reload()

    def on_device(self) -> Iterator[Tensor]:
        yield from super().on_device()
        yield from self._flats
        if self._server:
            yield from self._server.on_device()

    @property
    def sent_in_step(self) -> int:
        """Bytes that this rank sent in the last step: gradients, or parameters to every worker."""
        minibatches = self._work.m - len(self.share) if self._server else len(self.share)
        return minibatches * sum(flat.nbytes for flat in self._flats)
