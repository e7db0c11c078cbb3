"""A stage at work: the part of the model between two cuts, and what its microbatches in flight need for backward.

Takes the values that earlier stages made, gives those that later stages use; the last stage gives the loss. Knows
nothing of schedules or ranks: the engine calls it in whatever order the schedule says.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from parallel.graph.layers import RANDOM_STATE
from parallel.memory.policy import ActivationPolicy
from parallel.offload.rng import drawing, get_random_state
from parallel.offload.saved_tensors import SavedTensors
from parallel.stage.batchnorm import RunningStatistics
from parallel.stage.microbatch_state import (
    MicrobatchState,
    WeightVersions,
    capture_grad,
    edges_of,
    gradients_of,
    renew_buffers,
)
from parallel.stage.split_backward import DeferredWeights
from parallel.streaming.box_sums import BoxSums
from parallel.team.team_comm import ReplayLog
from parallel.trace.stage_module import Boxes, Run, SegmentRun, StageModule

LOSS = "#loss"
"""Name of the last stage's only value."""

Loss = Callable[[Any, Tensor], Tensor]
"""(output of the model, targets) -> scalar: the mean over the tiles of a microbatch, so that losses add up by size."""


Gradients = dict[str, list[Tensor]]
"""Name of a value -> gradients of those of its tensors that need one, in order."""


class Stage:
    """Forward and backward of one stage, for any number of microbatches in flight.

    Args:
        module: the layers.
        device: where its parameters are, or come to.
        autocast: type for mixed precision; None computes in the module's own.
        compiled: run through ``torch.compile``.
        loss: of the last stage: (output, targets) -> mean over the microbatch; None for the others.
        no_grad_outputs: names of the values given that no gradient flows back to from the loss.
        statistics: of the module's normalisation layers.
        uses_rng: the module may draw random numbers.
        weights: of the module, where backward is called in two halves (zero bubble).
        saved_tensors: of the rank; says what becomes of what forward passes keep. None: autograd keeps it.
        updated: names of buffers that forward passes update, outside normalisation layers.
        versions: of the module's weights, where every microbatch updates them by ``update``.
    """

    def __init__(
        self,
        module: StageModule,
        device: torch.device,
        *,
        statistics: RunningStatistics,
        autocast: torch.dtype | None = None,
        compiled: bool = False,
        loss: Loss | None = None,
        no_grad_outputs: Iterable[str] = (),
        uses_rng: bool = False,
        weights: DeferredWeights | None = None,
        saved_tensors: SavedTensors | None = None,
        updated: Collection[str] = (),
        versions: WeightVersions | None = None,
    ) -> None:
        self.module = module
        self._versions = versions
        self.statistics = statistics
        self._loss = loss
        self._no_grad_outputs = frozenset(no_grad_outputs)
        self._device, self._autocast = device, autocast
        self._uses_rng = uses_rng
        self._weights = weights
        self._saved_tensors = saved_tensors
        self._moves = saved_tensors is not None and saved_tensors.rule.moves
        state = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._updated = [name for name, tensor in state if name in updated and not tensor.requires_grad]
        # Inductor's own random numbers would differ from those of the plain model.
        self._run: Callable[..., Any] = module
        if compiled:
            self._run = torch.compile(module, options={"fallback_random": True})
        self._in_flight: dict[int, MicrobatchState] = {}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the whole model."""
        return dict(self.module.named_parameters())

    def forward(
        self,
        i: int,
        values: dict[str, Any],
        random: int | Tensor,
        *,
        targets: Tensor | Boxes | None = None,
        recomputed: bool = False,
        shape: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        """Run the forward pass of microbatch ``i``.

        Args:
            values: what the module uses, by name. They belong to the stage until its backward pass.
            random: a seed, or the state handed on by an earlier stage.
            targets: for the loss, in the last stage.
            recomputed: keep only what came in; ``recompute`` is called before backward, or backward does so itself.
            shape: (n, 3, h, w) of the tiles, for a stage that a team computes.

        Returns:
            By name what later stages use, with ``RANDOM_STATE`` if the stage draws; ``LOSS`` in the last stage.
        """
        self._in_flight[i] = microbatch = MicrobatchState(values)
        if self._versions is not None:
            self._versions.begin(i)
        if self._updated:
            renew_buffers(self.module, self._updated)
        if recomputed and self._saved_tensors is None:
            self._saved_tensors = SavedTensors(ActivationPolicy(), self._device)
        log = self.module.replay_log() if recomputed else None
        compute = functools.partial(self._compute, targets)
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(self.statistics.microbatch(i))
            draws = scopes.enter_context(self._pass(random, shape, log))
            if self._weights is not None:
                scopes.enter_context(self._weights.recording(i))
            if self._saved_tensors is not None:
                state = (*self.module.parameters(), *self.module.buffers())
                scopes.enter_context(self._saved_tensors.watching((self, i), state))
                scopes.enter_context(self._in_segments(self._saved_tensors))
            if self._saved_tensors is not None and recomputed:
                entering, context = list(self._entering(microbatch)), self._recomputing(random, shape, log)
                segment = self._saved_tensors.checkpoint(
                    compute, entering, self.module.parameters(), context, received=True
                )
                microbatch.segment, given = segment, segment.forward(entering)
            else:
                given = compute(*self._entering(microbatch))
        outputs = dict(zip(self.module.outputs if self._loss is None else (LOSS,), given, strict=True))
        for name in self._no_grad_outputs.intersection(outputs):
            outputs[name] = tree_map(_detached, outputs[name])
        # Edges, not tensors: what was sent can be freed before its gradient comes back.
        microbatch.roots = {name: edges for name, value in outputs.items() if (edges := edges_of(value))}
        if self._uses_rng:
            outputs[RANDOM_STATE] = draws.end
        return outputs

    @torch.no_grad()
    def rehearse(self, values: Mapping[str, Any], random: int | Tensor, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return what ``forward`` will give, with the output of the model in place of the loss; keep nothing of it, and
        leave running statistics as they are. The module must update no other state: ``forward`` would update it again.
        """
        with self.statistics.frozen(), self._pass(random, shape, None) as draws:
            given = self._run(*(values[name] for name in self.module.inputs))
        outputs = dict(zip(self.module.outputs, given, strict=True))
        if self._uses_rng:
            outputs[RANDOM_STATE] = draws.end
        return outputs

    def flush(self, i: int) -> None:
        """Send what microbatch ``i`` keeps off the device now."""
        assert self._saved_tensors is not None
        self._saved_tensors.flush((self, i))

    def prefetch(self, i: int) -> None:
        """Begin to bring what microbatch ``i`` keeps back to the device."""
        assert self._saved_tensors is not None
        self._saved_tensors.prefetch((self, i))

    def recompute(self, i: int) -> None:
        """Run the forward pass of microbatch ``i`` again, keeping what backward needs; it is counted nowhere."""
        segment = self._in_flight[i].segment
        assert segment is not None
        with self._weights_of(i):
            segment.recompute()

    def backward(self, i: int, gradients: Gradients, weight: float = 1.0, *, whole: bool = False) -> Gradients:
        """Run the backward pass of microbatch ``i``; parameters' gradients add up in place.

        Args:
            gradients: of the values given, summed over the stages that use them.
            weight: of the loss, in the last stage.
            whole: with the gradients of deferred weights, which otherwise follow in ``backward_weight``.

        Returns:
            Gradients of the values that came in.
        """
        microbatch = self._in_flight.pop(i)
        if self._loss is not None:
            weight *= self.module.counts
            gradients = {LOSS: [torch.full((), weight, dtype=self._loss_dtype, device=self._device)]}
        edges = [*chain.from_iterable(microbatch.roots.values())]
        if edges:
            with self._weights_of(i):  # parts of the model may be recomputed
                torch.autograd.backward(edges, [*chain.from_iterable(map(gradients.__getitem__, microbatch.roots))])
        if whole and self._weights is not None:
            self._weights.backward_weight(i)
        if self._saved_tensors is not None:
            self._saved_tensors.release((self, i))
        if microbatch.captures:
            return {name: [capture.take() for capture in captures] for name, captures in microbatch.captures.items()}
        return dict(zip(microbatch.values, map(gradients_of, microbatch.values.values()), strict=True))

    def backward_weight(self, i: int) -> None:
        """Add the gradients of the weights that ``backward`` of microbatch ``i`` deferred."""
        assert self._weights is not None
        self._weights.backward_weight(i)

    def update(self, i: int, step: Callable[[Mapping[nn.Parameter, nn.Parameter]], None]) -> None:
        """Update the weights after the backward pass of microbatch ``i``; for ``step`` see ``WeightVersions``."""
        assert self._versions is not None
        self._versions.update(i, step)

    @torch.no_grad()
    def predict(
        self, values: Mapping[str, Any], sums: BoxSums | None = None, shape: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        """Return by name what the module gives in evaluation mode; a value that only training makes is missing.

        Args:
            sums: wanted in place of the last stage's only value, of a module that gives them.
            shape: (n, 3, h, w) of the tiles.
        """
        entering = tuple(values.get(name) for name in self.module.inputs)
        with self._precision(), self.module.context(shape):
            if sums is not None:
                return {self.module.outputs[0]: self.module.sums(entering, sums)}
            outputs = self.module(*entering)
        return dict(zip(self.module.outputs, outputs, strict=True))

    def reset(self) -> None:
        """Drop every microbatch in flight, after a step that was given up."""
        self._in_flight.clear()
        if self._versions is not None:
            self._versions.clear()
        if self._saved_tensors is not None:
            self._saved_tensors.reset()

    def _weights_of(self, i: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the module has the weights that microbatch ``i`` went forward with."""
        return contextlib.nullcontext() if self._versions is None else self._versions.of(i)

    def _compute(self, targets: Tensor | Boxes | None, *values: Any) -> tuple[Any, ...]:
        if self._loss is None:
            return tuple(self._run(*values))
        assert targets is not None
        loss = self.module.loss(self._run, self._loss, values, targets)
        self._loss_dtype = loss.dtype
        return (loss,)

    @contextlib.contextmanager
    def _pass(self, random: int | Tensor, shape: tuple[int, ...], log: ReplayLog | None) -> Iterator[Any]:
        """Return a context of a forward pass; what it gives knows in ``end`` the random state after the pass."""
        with contextlib.ExitStack() as scopes:
            draws = scopes.enter_context(self.module.context(shape, random, log))
            if self._uses_rng and draws is None:  # members draw one number after the other: they wait in between
                draws = scopes.enter_context(drawing(random, self._device))
            scopes.enter_context(self._precision())
            yield draws

    @contextlib.contextmanager
    def _recomputing(self, random: int | Tensor, shape: tuple[int, ...], log: ReplayLog | None) -> Iterator[None]:
        """Return a context of a second forward pass, which is counted nowhere."""
        weights = contextlib.nullcontext() if self._weights is None else self._weights.redirecting([])
        with self.statistics.frozen(), self._pass(random, shape, log), weights:
            yield

    def _entering(self, microbatch: MicrobatchState) -> Iterator[Any]:
        """Return the values the module takes. Where activations go to the host, the stage itself holds none of them."""
        if not self._moves:
            return map(microbatch.values.__getitem__, self.module.inputs)
        values, microbatch.values = microbatch.values, {}
        entering = []
        for name in self.module.inputs:
            value, microbatch.captures[name] = capture_grad(values.pop(name))
            entering.append(value)
        return iter(entering)

    @contextlib.contextmanager
    def _in_segments(self, saved_tensors: SavedTensors) -> Iterator[None]:
        """Let ``saved_tensors`` run the module, segment by segment where it has any."""

        def run_segment(segment: SegmentRun, compute: Run, values: tuple[Any, ...]) -> tuple[Any, ...]:
            return saved_tensors.run_segment(segment, compute, values, self._recomputing_segment)

        self.module.run_segment = run_segment
        try:
            yield
        finally:
            self.module.run_segment = None

    def _recomputing_segment(self, segment: SegmentRun) -> contextlib.AbstractContextManager[None]:
        """Return a context of the second pass of ``segment``, whose first pass is about to begin."""
        start = get_random_state(self._device) if segment.uses_rng else None

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            draws = contextlib.nullcontext() if start is None else drawing(start, self._device)
            with draws, self._precision(), self.statistics.frozen(segment.modules):
                yield

        return context()

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._autocast)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
