"""Is a strategy exact? What it computes, beside the plain single-process step on the same tiles and microbatches.

Takes a model and a way to make an engine of it; gives the largest errors of losses, gradients, running statistics and
updated parameters. The plain step is written out here: forward, backward, gradients accumulated, update.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from app.settings.optimization import OptimizerSettings
from app.training.engines import build_optimizer
from app.training.projected_error import ProjectedError
from models.losses import IGNORE
from parallel.comm.communicator import Communicator
from parallel.comm.objects import gather_objects
from parallel.engine.optimizer_step import MakeOptimizer
from parallel.engine.step import Microbatch, TrainingEngine, Wants
from parallel.engine.tickets import DrawnMicrobatches
from parallel.schedule.microbatch import microbatch_seed
from parallel.schedule.shares import Shares
from parallel.space.span import Span
from parallel.stage.stage import Loss
from parallel.streaming.images import whole
from parallel.trace.norm_gradients import mend_norm_gradients

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest error, relative to the largest value of the tensor it is in."""

NOISE = 32
"""Times what rounding alone does to a tensor, that its error may be: a strategy rounds in more places than the tiles
do, on which it is tried."""

CEILING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Errors that rounding never excuses, however much of it a model amplifies: a lost microbatch, a detached halo and a
doubled bias are 1e-2 or more."""

ROUNDING = 1000
"""A tensor whose largest value is below this many roundings (machine epsilons) of the largest value of its kind in the
model holds nothing but rounding, as the gradient of a bias before batch norm does: its error counts relative to that
largest value instead."""

KINDS = ("gradients", "parameters", "statistics")


class MeasuredEngine(TrainingEngine, Protocol):
    """An engine that shows its gradients."""

    def gradients(self) -> dict[str, Tensor]:
        """Of the global batch's mean loss, by name of the parameter, for what this rank holds; after a step."""
        ...


MakeEngine = Callable[[nn.Module, Loss, MakeOptimizer, Communicator], MeasuredEngine]


@dataclass(frozen=True, eq=False)
class ExactnessTrial:
    """What is computed both ways, on random tiles.

    Attributes:
        module: with the weights to begin with; left as it is.
        sizes: tiles of each microbatch of the global batch.
        tile: px.
        steps: optimiser steps; the gradients of the first are compared, all else after the last.
        channels_last: memory layout of images and model.
        nudge: other than 0: each value of the images is rounded up or down by one, drawn from this seed.
        by_boxes: the engine is given images of which it asks for boxes.
        loss: what is minimised; None: ``ProjectedError``.
        classes: targets are ids of so many classes, of which every ninth row does not count; 0: numbers.
        shares: of the groups, taken in turns by the steps after the first; empty: they stay as they are.
    """

    module: nn.Module
    sizes: tuple[int, ...]
    tile: int
    dtype: torch.dtype
    device: torch.device
    steps: int = 3
    seed: int = 0
    lr: float = 0.01
    channels_last: bool = False
    nudge: int = 0
    by_boxes: bool = False
    loss: Loss | None = None
    classes: int = 0
    shares: tuple[Shares, ...] = ()

    @property
    def minimised(self) -> Loss:
        """The loss."""
        return self.loss or ProjectedError()

    def fresh_module(self) -> nn.Module:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        # What hooks compute anew from parameters, as weight norm does, torch refuses to copy with its history.
        attributes = (value for part in self.module.modules() for value in vars(part).values())
        computed = {id(t): t.detach().clone() for t in attributes if isinstance(t, Tensor) and not t.is_leaf}
        return in_precision(copy.deepcopy(self.module, computed), self.dtype).to(memory_format=layout)

    def microbatch(self, step: int, i: int, wants: Wants) -> Microbatch:
        """Microbatch ``i`` of ``step``: images (n, 3, tile, tile), targets (n, tile, tile)."""
        generator = torch.Generator().manual_seed(microbatch_seed(self.seed, step, i) >> 1)
        shape = (self.sizes[i], 3, self.tile, self.tile)
        targets = self._targets((shape[0], *shape[2:]), generator).to(self.device)
        images = torch.randn(shape, generator=generator, dtype=self.dtype).to(self.device) if wants.images else None
        if images is not None and self.nudge:
            signs = torch.randint(0, 2, shape, generator=generator.manual_seed(self.nudge + 1000 * step + i)) * 2 - 1
            images *= 1 + torch.finfo(self.dtype).eps * signs.to(images)
        if images is not None and self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return Microbatch(images, targets if wants.targets else None, shape)

    def _targets(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """(n, tile, tile)."""
        if not self.classes:
            return torch.randn(shape, generator=generator, dtype=self.dtype)
        classes = torch.randint(0, self.classes, shape, generator=generator, dtype=torch.uint8)
        classes[:, ::9] = IGNORE
        return classes

    def make_optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return build_optimizer(OptimizerSettings(optimizer="sgd", lr=self.lr), parameters)


def in_precision(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``module`` with parameters and buffers of this precision, complex ones among them, which ``nn.Module.to`` would
    make real."""

    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    converted_module: nn.Module = module._apply(converted)  # type: ignore[no-untyped-call]
    return converted_module


@dataclass(frozen=True)
class StepsResult:
    """What a few steps leave.

    Attributes:
        losses: of all steps.
        gradients: of the first, by name; of a rank, those that it holds.
        state: parameters and buffers after the last; empty on all ranks but the first.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Errors:
    """How far a strategy is from the plain step.

    Attributes:
        loss: largest relative error of a step's loss.
        of_tensors: kind (of ``KINDS``) -> name of the tensor -> largest relative error.
        allowed_loss, allowed: what each of them may be; what is missing there may be ``tolerance``.
    """

    loss: float
    of_tensors: Mapping[str, Mapping[str, float]]
    tolerance: float = 0.0
    allowed_loss: float = 0.0
    allowed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.loss <= max(self.tolerance, self.allowed_loss) and not self.excesses

    @property
    def excesses(self) -> list[tuple[str, str]]:
        """(kind, name) of the tensors whose error is more than allowed, those that exceed it most first."""
        ratios = {
            (kind, name): error / max(self.tolerance, self.allowed.get(kind, {}).get(name, 0.0), 1e-300)
            for kind, errors in self.of_tensors.items()
            for name, error in errors.items()
        }
        return sorted((place for place, ratio in ratios.items() if ratio > 1), key=lambda place: -ratios[place])

    @property
    def largest(self) -> float:
        return max(self.loss, *(error for errors in self.of_tensors.values() for error in errors.values()))

    def by_group(self) -> dict[str, dict[str, float]]:
        """Top-level module -> kind -> largest relative error of its tensors."""
        groups: dict[str, dict[str, float]] = {}
        for kind, errors in self.of_tensors.items():
            for name, error in errors.items():
                group = groups.setdefault(name.split(".")[0], {})
                group[kind] = max(group.get(kind, 0.0), error)
        return groups


def run_plain(trial: ExactnessTrial) -> StepsResult:
    """The step written out; nothing of ours but the seeds, and gradients that torch's norms read right."""
    mend_norm_gradients()
    module = trial.fresh_module().to(trial.device).train()
    optimizer = trial.make_optimizer(module.named_parameters())
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(trial.steps):
        optimizer.zero_grad()
        total = 0.0
        for i, size in enumerate(trial.sizes):
            images, targets, _ = trial.microbatch(step, i, Wants(images=True, targets=True))
            assert targets is not None
            torch.manual_seed(microbatch_seed(trial.seed, step, i))
            loss = trial.minimised(module(images), whole(targets)) * (size / sum(trial.sizes))
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        gradients = gradients or {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(total)
    return StepsResult(losses, gradients, module.state_dict())


def run_noise(trial: ExactnessTrial) -> list[StepsResult]:
    """The plain step twice more on tiles whose every value is one rounding off: what rounding alone does to the model.

    Another order of summation, in gradients that several layers give to one value or in a matrix product, is rounding
    in other places; a model that amplifies one amplifies the other. So a tensor's error is judged against how far these
    runs are from the first, and a strategy is not blamed for what 200 layers, or three updates through them, make of
    the last bit.
    """
    return [run_plain(dataclasses.replace(trial, nudge=seed)) for seed in (1, 2)]


def settled_steps(
    trial: ExactnessTrial, plain: StepsResult, noise: Sequence[StepsResult], parameters: Iterable[str]
) -> int:
    """Steps after which rounding is still small enough to see a fault behind it: those of ``trial``, else 1."""
    ceiling = CEILING[trial.dtype]
    return trial.steps if NOISE * compare(plain, noise, parameters).largest <= ceiling else 1


def run_engine(trial: ExactnessTrial, make_engine: MakeEngine, communicator: Communicator) -> list[StepsResult] | None:
    """The same by a strategy: what every rank has of it, on rank 0; None on the others."""
    engine = make_engine(trial.fresh_module(), trial.minimised, trial.make_optimizer, communicator)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(trial.steps):
        if step and trial.shares:
            engine.reshare(trial.shares[(step - 1) % len(trial.shares)])
        microbatches = DrawnMicrobatches(engine.share, functools.partial(_made, trial, engine, step))
        losses.append(engine.step(microbatches, step, trial.lr).loss)
        gradients = gradients or {name: gradient.clone() for name, gradient in engine.gradients().items()}
    state = engine.state_dict()
    ranks = gather_objects(communicator, (losses, gradients))
    engine.close()
    if ranks is None:
        return None
    return [StepsResult(losses, gradients, state["model"]) for losses, gradients in ranks]


def _made(trial: ExactnessTrial, engine: TrainingEngine, step: int, i: int) -> Microbatch:
    """Microbatch ``i`` as the engine takes it."""
    microbatch = trial.microbatch(step, i, engine.wants(i))
    if not trial.by_boxes or microbatch.images is None:
        return microbatch
    return microbatch._replace(images=CroppedImages(whole(microbatch.images)))


class CroppedImages:
    """Images whose boxes are crops.

    Args:
        images: (n, c, h, w).
    """

    def __init__(self, images: Tensor) -> None:
        self.shape: tuple[int, ...] = tuple(images.shape)
        self.dtype, self.device = images.dtype, images.device
        self._images = images

    def box(self, rows: Span, columns: Span) -> Tensor:
        """Return a crop in memory of its own, in the same layout."""
        crop = self._images[..., rows.start : rows.stop, columns.start : columns.stop]
        channels_last = self._images.is_contiguous(memory_format=torch.channels_last)
        return crop.clone(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def compare(
    plain: StepsResult,
    ranks: Sequence[StepsResult],
    parameters: Iterable[str],
    *,
    deferred: bool = False,
    noise: Sequence[StepsResult] = (),
) -> Errors:
    """Errors of ``ranks`` against ``plain``.

    Args:
        noise: of ``run_noise``, with as many steps: allows errors above the tolerance.
        parameters: names of the model's parameters; all else in its state are running statistics.
        deferred: these are not the plain step's, by intention: leave them out.
    """
    names = set(parameters)
    state = ranks[0].state
    found = {
        "gradients": _errors(plain.gradients, [rank.gradients for rank in ranks]),
        "parameters": _errors(_part(plain.state, names, True), [_part(state, names, True)]),
        "statistics": {} if deferred else _errors(_part(plain.state, names, False), [_part(state, names, False)]),
    }
    loss = max(
        _relative(abs(ours - theirs), abs(theirs))
        for rank in ranks
        for ours, theirs in zip(rank.losses, plain.losses, strict=True)
    )
    dtype = next(value.dtype for value in plain.gradients.values()).to_real()
    if not noise:
        return Errors(loss, found, TOLERANCE[dtype])
    runs = [compare(plain, [run], names) for run in noise]
    allowed = {
        kind: {name: _allowed([run.of_tensors[kind].get(name, 0.0) for run in runs], dtype) for name in errors}
        for kind, errors in found.items()
    }
    return Errors(loss, found, TOLERANCE[dtype], _allowed([run.loss for run in runs], dtype), allowed)


def _allowed(noise: Sequence[float], dtype: torch.dtype) -> float:
    """The error that ``noise`` of several runs excuses."""
    return min(CEILING[dtype], NOISE * max(noise))


def _part(state: Mapping[str, Tensor], names: set[str], wanted: bool) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if (name in names) == wanted}


def _errors(expected: Mapping[str, Tensor], found: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Largest relative error of each tensor on any rank that has it; one that is missing counts as zeros."""
    if not expected:
        return {}
    sizes = {name: float(value.abs().max()) if value.numel() else 0.0 for name, value in expected.items()}
    largest = max(sizes.values())
    errors = {}
    for name, value in expected.items():
        epsilon = torch.finfo(value.dtype).eps if value.is_floating_point() or value.is_complex() else 0.0
        scale = sizes[name] if sizes[name] > ROUNDING * epsilon * largest else largest
        copies = [rank[name] for rank in found if name in rank] or [torch.zeros_like(value)]
        difference = max(_distance(value, ours) for ours in copies)
        errors[name] = _relative(difference, scale)
    for name in {name for rank in found for name in rank} - expected.keys():
        extra = max(float(rank[name].abs().max()) for rank in found if name in rank)
        errors[name] = _relative(extra, largest)
    return errors


def _distance(expected: Tensor, found: Tensor) -> float:
    if not expected.numel():
        return 0.0
    wide = torch.complex128 if expected.is_complex() or found.is_complex() else torch.float64
    return float((expected.cpu().to(wide) - found.cpu().to(wide)).abs().max())


def _relative(difference: float, scale: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return difference / scale if difference else 0.0
