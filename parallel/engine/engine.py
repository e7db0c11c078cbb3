"""The engine: walks its rank's actions, whatever schedule they come from.

Every strategy is data to it: replicas, chunks, skips and groups appear only as actions, routes and holders. Letters: i
microbatch, m microbatches of the global batch.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from parallel.comm.communicator import CommunicationError, Communicator
from parallel.engine.inference import Outputs, predict, rehearse
from parallel.engine.messages import take_apart
from parallel.engine.rank_program import RankProgram, completing_backwards, last_backwards
from parallel.engine.recorded import DeviceClock, Mark
from parallel.engine.step import (
    EngineFault,
    Microbatch,
    NeededInputs,
    NonFiniteLoss,
    Observer,
    StepBatches,
    StepResult,
    TrainingEngine,
    mean_loss,
    microbatch_seed,
    read_losses,
)
from parallel.graph.layers import RANDOM_STATE
from parallel.schedule.action import Action, Kind, Schedule
from parallel.schedule.shares import Shares
from parallel.schedule.text import describe_fault
from parallel.schedule.timeline import Span
from parallel.space.team import Box
from parallel.stage.stage import LOSS
from parallel.streaming.box_sums import Sums


class Engine(TrainingEngine):
    """Optimiser steps of a model whose stages are spread over ranks.

    Args:
        work: of this rank.
        communicator: all ranks.
        seed: of dropout and every other random number the model draws.
        observer: is notified of every action.
    """

    def __init__(
        self, work: RankProgram, communicator: Communicator, *, seed: int = 0, observer: Observer | None = None
    ) -> None:
        self.mesh = work.mesh
        self.counted = work.mesh.member_of(communicator.rank) == 0
        self._communicator, self._seed, self._observer = communicator, seed, observer
        self._last = work.mesh.stages - 1
        self._whole = work.mesh.depth == 1 and work.mesh.members == 1
        self._waits_for_sums = self._whole and work.mesh.groups > 1
        self._learning_rate, self._sent_in_step, self._shapes = 0.0, 0, ""
        self._clock = DeviceClock(work.messenger.device)
        self._marks: list[tuple[Action, Mark, Mark]] = []
        self._losses: dict[int, tuple[Tensor, int]] = {}
        self._follow(work)

    def _follow(self, work: RankProgram) -> None:
        """Walk the actions of ``work`` from the next step on."""
        self._work, self.schedule, self.share = work, work.schedule, work.share
        self._actions = tuple(self.actions_of_ranks[self._communicator.rank])
        forwards = [a for a in self._actions if a.kind is Kind.FORWARD]
        self._wants = {i: self._needed({a.stage for a in forwards if a.microbatch == i}) for i in work.share}
        self._recomputed = {(a.stage, a.microbatch) for a in self._actions if a.kind is Kind.RECOMPUTE}
        # Sums in a backward pass hold a GPU until the other rank of a pair begins them, which may need that pass first.
        self._completing = frozenset(completing_backwards(self._actions) if work.mesh.replicas == 1 else ())
        self._finishing = frozenset(last_backwards(self._actions))
        self._updates = any(action.kind is Kind.UPDATE for action in self._actions)
        self._texts: dict[tuple[int, tuple[int, ...]], str] = {}
        if self._observer:
            self._observer.follow(self.actions_of_ranks)

    def reshare(self, shares: Shares) -> None:
        self._follow(self._work.of_shares(shares, self._communicator.rank))

    @property
    def actions_of_ranks(self) -> Schedule:
        """Rank -> actions of a step; members of a team have the same."""
        return {rank: self.schedule[self.mesh.team_of(rank)] for rank in range(self.mesh.world)}

    def wants(self, i: int) -> NeededInputs:
        return self._wants[i]

    def samples(self, count: int) -> range:
        return self._work.stages[0].module.samples(count) if 0 in self._work.stages else range(count)

    def parts(self, shape: tuple[int, ...]) -> tuple[Box | None, Box | None]:
        stages, last = self._work.stages, self._last
        images = stages[0].module.part_of_tiles(shape) if 0 in stages else None
        return images, stages[last].module.part_of_masks(shape) if last in stages else None

    @property
    def predict_wants(self) -> NeededInputs:
        return self._needed({action.stage for action in self._work.prediction if action.kind is Kind.FORWARD})

    def _needed(self, stages: Collection[int]) -> NeededInputs:
        """Return what forward passes through ``stages`` need: the first one images, the last one targets."""
        return NeededInputs(0 in stages, self._last in stages)

    def step(self, microbatches: Iterable[Microbatch], step: int, learning_rate: float) -> StepResult:
        work = self._work
        for stage in work.stages.values():
            stage.module.train()
            stage.statistics.begin_step(work.m)
        work.update.begin_step()
        for reducer in work.reducers.values():
            reducer.begin_step()
        self._marks, self._learning_rate, sent = [], learning_rate, self._sent_so_far
        begun_s = time.perf_counter()
        self._feed, self._step, self._losses = StepBatches(microbatches, self.share, self.samples), step, {}
        losses = self._walk()
        walked_s = time.perf_counter() - begun_s
        tiles = int(losses[1].sum())
        work.messenger.finish()
        if work.link:
            work.link.finish()
        self._sent_in_step = self._sent_so_far - sent
        for reducer in work.reducers.values():
            reducer.finish()
        waited_s = time.perf_counter() - begun_s - walked_s
        summed = self._clock.mark() if self._waits_for_sums else None
        try:
            loss = mean_loss(self._communicator, losses)
        except NonFiniteLoss as fault:
            fault.updated = self._updates
            work.update.rollback()
            for stage in work.stages.values():
                stage.statistics.rollback()
            raise
        for number in sorted(work.stages):
            work.stages[number].statistics.end_step()
        if not self._updates:
            work.update.apply(learning_rate, scale=work.batch / int(losses[1].sum()))
        if self._waits_for_sums:
            return StepResult(loss, tiles, self._own_seconds(), *self._clock.durations([(self._marks[-1][2], summed)]))
        if self.mesh.groups == 1 or work.messenger.device.type != "cpu":  # which computes behind the clock's back
            return StepResult(loss, tiles)
        return StepResult(loss, tiles, tuple((i, walked_s / len(self.share)) for i in self.share), waited_s)

    def _own_seconds(self) -> tuple[tuple[int, float], ...]:
        """Return the seconds of each microbatch, from the begin of its forward to the end of its backward pass."""
        begun = {action.i: mark for action, mark, _ in reversed(self._marks)}
        ended = {action.i: mark for action, _, mark in self._marks}
        seconds = self._clock.durations([(begun[i], ended[i]) for i in self.share])
        return tuple(zip(self.share, seconds, strict=True))

    def predict(self, microbatch: Microbatch, sums: Sums | None = None) -> Any:
        return predict(self._work, microbatch, sums)

    def outputs(self, microbatches: Iterable[Microbatch], step: int) -> Outputs:
        feed = StepBatches(microbatches, self.share)
        return rehearse(self._work, self._actions, feed, (self._seed, step), self._observer)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        self._swap_average()
        yield  # after an error the run is over, and ranks that are gone take no copies
        self._swap_average()

    def _swap_average(self) -> None:
        self._work.update.swap_average()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the global batch's mean loss, by name of the parameter, for the stages this rank
        holds; after a step. Every rank takes part."""
        divided = [reducer.gathered_gradients() for reducer in self._work.reducers.values()]
        whole = dict(pair for gradients in divided for pair in gradients.items())
        named = [pair for stage in self._work.stages.values() for pair in stage.parameters.items()]
        found = {name: whole.get(parameter, parameter.grad) for name, parameter in named}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def on_device(self) -> Iterator[Tensor]:
        for stage in self._work.stages.values():
            yield from stage.module.buffers()
        yield from self._work.update.on_device()

    def spans(self) -> tuple[Span, ...]:
        """Return the compute actions of the last step, in ``time.perf_counter`` seconds; waits for a GPU."""
        moments = self._clock.host_seconds([mark for _, *marks in self._marks for mark in marks])
        return tuple(
            Span(action, start_s, end_s)
            for (action, _, _), start_s, end_s in zip(self._marks, moments[::2], moments[1::2], strict=True)
        )

    @property
    def _sent_so_far(self) -> int:
        link, messenger = self._work.link, self._work.messenger
        return sum(messenger.bytes_sent.values()) + (link.sent_bytes if link else 0)

    @property
    def sent_in_step(self) -> int:
        return self._sent_in_step + sum(reducer.sent_bytes for reducer in self._work.reducers.values())

    def before_update(self, call: Callable[[], None]) -> None:
        self._work.update.before_update(call)

    @property
    def parameter_names(self) -> frozenset[str]:
        held = (pair for stage in self._work.stages.values() for pair in stage.parameters.items())
        # A forward pass may update parameters without gradient, such as codebooks. Other ranks send copies.
        without_grad = {name for name, parameter in held if not parameter.requires_grad}
        return frozenset(self._work.full_state.parameters) - without_grad

    def state_dict(self) -> dict[str, Any]:
        return self._work.full_state.gather()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._work.full_state.scatter(state)

    def close(self) -> None:
        for stage in self._work.stages.values():
            stage.reset()
        self._work.transfers.clear()

    def _walk(self) -> Tensor:
        """Do all actions of this rank; return mean losses and sizes (2, m) of microbatches whose loss it computed."""
        for position, action in enumerate(self._actions):
            self._shapes = ""
            try:
                self._perform(position, action)
            except Exception as fault:
                if self._whole or isinstance(fault, CommunicationError):
                    raise
                raise self._fault(position, fault) from fault
        if self._observer:
            self._observer.at(-1)
        losses = self._losses if self.counted else {}
        if losses and self._clock.on_gpu:
            ends = [end for each, _, end in self._marks if each.stage == self._last and each.kind is Kind.FORWARD]
            ends[-1].synchronize()
        return read_losses(losses, self._work.m)

    def _perform(self, position: int, action: Action) -> None:
        work, feed = self._work, self._feed
        if action.kind is Kind.REDUCE:
            work.reducers[action.stage].begin()
            return
        i, stage = action.microbatch, work.stages[action.stage]
        assert i is not None, action
        match action.kind:
            case Kind.FORWARD:
                self._forward(position, action, i)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                self._backward(position, action, i)
            case Kind.BACKWARD_WEIGHT:
                with self._computing(position, action):
                    stage.backward_weight(i)
            case Kind.RECOMPUTE:
                with self._computing(position, action):
                    stage.recompute(i)
            case Kind.UPDATE:
                with self._computing(position, action):
                    stage.update(i, functools.partial(work.update.apply_to, learning_rate=self._learning_rate))
            case Kind.OFFLOAD:
                stage.flush(i)
            case Kind.PREFETCH:
                stage.prefetch(i)
            case Kind.SEND_FORWARD:
                work.transfers.send_forward(action, feed.shape(i))
            case Kind.SEND_BACKWARD:
                work.transfers.send_backward(action)
            case Kind.RECEIVE_FORWARD:
                work.transfers.recv_forward(action, feed.shape(i))
            case Kind.RECEIVE_BACKWARD:
                work.transfers.recv_backward(action)

    def _forward(self, position: int, action: Action, i: int) -> None:
        work, feed = self._work, self._feed
        shape, stage, is_last = feed.shape(i), work.stages[action.stage], action.stage == self._last
        self._shapes = f"tiles {shape}"
        if self._observer:
            self._observer.at(position, True, self._shapes)
        values = work.transfers.wait_forward(action)
        if action.stage == 0:
            values[work.inputs] = stage.module.tiles(feed.images(i), shape)
        random = values.pop(RANDOM_STATE, None)
        self._describe(position, shape, "inputs", values)
        with self._computing(position, action):
            outputs = stage.forward(
                i,
                values,
                microbatch_seed(self._seed, self._step, i) if random is None else random,
                targets=feed.targets(i) if is_last else None,
                recomputed=(action.stage, i) in self._recomputed,
                shape=shape,
            )
            if is_last:
                loss = outputs[LOSS].detach()
                self._losses[i] = loss.to("cpu", non_blocking=True) if self._clock.on_gpu else loss, shape[0]
        work.transfers.stash_output(action, outputs)

    def _backward(self, position: int, action: Action, i: int) -> None:
        work, stage, shape = self._work, self._work.stages[action.stage], self._feed.shape(i)
        self._shapes, whole = f"tiles {shape}", action.kind is Kind.BACKWARD
        if self._observer:
            self._observer.at(position, True, self._shapes)
        if gradients := work.transfers.wait_backward(action):
            self._describe(position, shape, "gradients", gradients)
        if position in self._completing:
            work.reducers[action.stage].expect_final_grads()
        if position in self._finishing:
            work.update.expect_final_grads(stage.parameters, self._learning_rate)
        with self._computing(position, action):
            incoming = stage.backward(i, gradients, 1.0 if self._updates else shape[0] / work.batch, whole=whole)
        work.transfers.stash_gradients(action, incoming)

    @contextlib.contextmanager
    def _computing(self, position: int, action: Action) -> Iterator[None]:
        if self._observer:
            self._observer.at(position, False, self._shapes)
        link = self._work.link
        if link and self._observer:
            link.report = functools.partial(self._tell_wait, position)
        begun = self._clock.mark()
        yield
        self._marks.append((action, begun, self._clock.mark()))
        if link:
            link.report = None

    def _tell_wait(self, position: int, what: str | None) -> None:
        """Notify the observer that the rank waits, within an action, for others of its team, or no longer does."""
        assert self._observer is not None
        self._observer.at(position, what is not None, f"waiting for {what}; {self._shapes}" if what else self._shapes)

    def _describe(self, position: int, shape: tuple[int, ...], what: str, values: Mapping[str, Any]) -> None:
        """Note names and shapes of ``values``; they follow from those of the tiles, so they are put into words once."""
        if (position, shape) not in self._texts:
            texts = (f"{name} {take_apart(value)[0]}" for name, value in values.items())
            self._texts[position, shape] = f"{what} {'; '.join(texts)}"
        self._shapes = self._texts[position, shape]

    def _fault(self, position: int, fault: Exception) -> EngineFault:
        reason = f"failed ({type(fault).__name__}: {str(fault).strip() or 'no message'})"
        return EngineFault(
            describe_fault(self.actions_of_ranks, self._communicator.rank, position, self._step, self._shapes, reason)
        )
