"""GPipe and 1F1B by torch.distributed.pipelining on the stages of our own: what our schedules are compared with.

Takes what ``assemble`` takes; gives an engine whose step is walked by torch's schedule. Stages, losses, running
statistics, random numbers, update, prediction and checkpoints are those of ``Engine``. Torch orders the passes, sends
the values and keeps what backward passes need. Letters: i microbatch, m microbatches of the global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from parallel.comm.communicator import CommunicationError, Communicator, Pipeline, PipelinePart, Work
from parallel.engine.engine import Engine, Observer
from parallel.engine.rank_program import RankProgram
from parallel.engine.step_batches import StepBatches
from parallel.engine.torch_crossings import Crossing
from parallel.graph.layers import RANDOM_STATE
from parallel.graph.partition import Partition
from parallel.schedule.action import COMPUTE, Action, Kind
from parallel.schedule.microbatch import microbatch_seed
from parallel.stage.rng import state_size
from parallel.stage.stage import LOSS

RANDOM_TAG = 1
"""Of messages beside torch's own, which have 0."""


class TorchPipelineEngine(Engine):
    """An ``Engine`` that hands its rank's passes over to torch's schedule.

    Args:
        name: of the schedule; the lowered one in ``work`` has its compute actions in the order of torch's.
        passing: at the cut behind each stage but the last.
        shape: (n, 3, h, w) of every microbatch.
    """

    def __init__(
        self,
        work: RankProgram,
        communicator: Communicator,
        name: str,
        partition: Partition,
        passing: Sequence[Sequence[Crossing]],
        shape: tuple[int, ...],
        device: torch.device,
        *,
        seed: int = 0,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(work, communicator, seed=seed, observer=observer)
        self._rank, self._device, self._shape = communicator.rank, device, shape
        self._receives = passing[self._rank - 1] if self._rank else ()
        self._gives = passing[self._rank] if self._rank < self._last else ()
        drawing = [(edge.source, edge.target) for edge in partition.edges if edge.value == RANDOM_STATE]
        self._random_from = next((source for source, target in drawing if target == self._rank), None)
        self._random_to = next((target for source, target in drawing if source == self._rank), None)
        self._random_states: list[Work] = []
        self._turns = {action: k for k, action in enumerate(self._actions) if action.kind in COMPUTE}
        self._sent = {peer: 0 for peer in (self._rank - 1, self._rank + 1, self._random_to) if peer is not None}
        gives = [crossing.example for crossing in self._gives] or [torch.empty((), device="meta")]
        part = PipelinePart(
            self._forward_pass, self._around_backward, [crossing.example for crossing in self._receives], gives
        )
        self._pipeline: Pipeline | None = communicator.pipeline(name, part, work.m, device)

    @property
    def bytes_sent(self) -> Mapping[int, int]:
        return {peer: sent for peer, sent in self._sent.items() if sent}

    def close(self) -> None:
        super().close()
        self._pipeline = None

    def _walk(self, feed: StepBatches, step: int) -> Tensor:
        assert self._pipeline is not None, "step after close"
        self._feed, self._step = feed, step
        self._found: dict[int, tuple[Tensor, int]] = {}
        self._shape_of(0)  # before any rank waits for another
        self._tell(next(iter(self._turns.values())), waiting=True)
        try:
            self._pipeline.step()
            for state in self._random_states:
                state.wait()
        finally:
            self._random_states = []
        if self._observer:
            self._observer.at(-1)
        return self._losses(self._found)

    def _forward_pass(self, i: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        stage, action = self._work.stages[self._rank], Action(Kind.FORWARD, self._rank, i)
        position = self._turns[action]
        with self._failing_at(position):
            shape = self._shape_of(i)
            if self._rank:
                values = {c.name: c.received(value) for c, value in zip(self._receives, received, strict=True)}
            else:
                values = {self._work.inputs: self._feed.images(i)}
            random = self._random(i)
            last = self._rank == self._last
            targets = self._feed.targets(i) if last else None
            with self._computing(position, action):
                outputs = stage.forward(i, shape[0], values, random, targets=targets)
            stage.reset()  # torch keeps what its backward passes need
            if self._random_to is not None:
                self._send_random(outputs[RANDOM_STATE], self._random_to)
            self._tell_next(position)
            if last:
                self._found[i] = outputs[LOSS].detach(), shape[0]
                return (outputs[LOSS] * (shape[0] / self._work.batch),)
            sent = tuple(crossing.sent(outputs[crossing.name]) for crossing in self._gives)
            self._sent[self._rank + 1] += sum(value.nbytes for value in sent)
            return sent

    @contextlib.contextmanager
    def _around_backward(self, i: int) -> Iterator[None]:
        action = Action(Kind.BACKWARD, self._rank, i)
        position = self._turns[action]
        with self._failing_at(position):
            with self._computing(position, action):
                yield
            if self._rank:
                self._sent[self._rank - 1] += sum(c.example.nbytes for c in self._receives if c.differentiable)
            self._tell_next(position)

    def _shape_of(self, i: int) -> tuple[int, ...]:
        shape = self._feed.shape(i)
        if shape != self._shape:
            raise ValueError(
                f"torch's pipelines take microbatches of one shape, here {self._shape}; got {shape} as microbatch {i} "
                "of a step: cut the batch into equal parts and the tiles to one size, or use --parallel gpipe or 1f1b"
            )
        return shape

    def _random(self, i: int) -> int | Tensor:
        """What stage i draws from: the state in which an earlier stage left the generators, else a seed."""
        if self._random_from is None:
            return microbatch_seed(self._seed, self._step, i)
        state = torch.empty(state_size(self._device), dtype=torch.uint8)
        self._communicator.irecv(state, self._random_from, RANDOM_TAG).wait()
        return state

    def _send_random(self, state: Tensor, target: int) -> None:
        self._random_states.append(self._communicator.isend(state, target, RANDOM_TAG))
        self._sent[target] += state.nbytes

    def _tell_next(self, position: int) -> None:
        """Until its next pass, this rank waits for others."""
        following = next((turn for turn in self._turns.values() if turn > position), None)
        if following is not None:
            self._tell(following, waiting=True)

    @contextlib.contextmanager
    def _failing_at(self, position: int) -> Iterator[None]:
        try:
            yield
        except CommunicationError:
            raise
        except Exception as fault:
            raise self._fault(position, self._step, fault) from fault
