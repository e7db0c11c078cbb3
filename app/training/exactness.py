"""Compare a strategy with the plain single-process training loop, on the same tiles and microbatches.

Takes a model and a function that makes an engine of it; returns the largest errors of losses, gradients, running
statistics, updated parameters and optimizer state. Every step is compared from the same state: before each step but the
first, the plain loop loads the state in which the engine ended the last one. So rounding does not add up over steps,
and the bound is the same for every model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from app.training.plain_training import ExactnessTrial, MakeEngine, MeasuredEngine, PlainTraining, StepOutcome
from parallel.comm.communicator import Communicator
from parallel.comm.objects import gather_objects
from parallel.engine.step import Microbatch, TrainingEngine
from parallel.space.cuts import Span
from parallel.trace.stage_module import as_tensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest error of a tensor that passes, relative to the largest value of the tensor."""
FLOOR = 1e-3
"""The error of a tensor is relative to at least this share of the largest value of its kind in the model: the gradient
of a bias before batch norm, which is zero but for rounding, has no scale of its own."""
KINDS = ("gradients", "parameters", "statistics", "optimizer")


@dataclass(frozen=True)
class Errors:
    """Largest relative errors of a strategy.

    Attributes:
        of_tensors: kind (of ``KINDS``) -> name of the tensor -> largest relative error.
        tolerance: largest error that passes.
    """

    loss: float = 0.0
    of_tensors: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    tolerance: float = 0.0

    @property
    def passed(self) -> bool:
        return self.largest <= self.tolerance

    @property
    def excesses(self) -> list[tuple[str, str]]:
        """(kind, name) of the tensors whose error is above the tolerance, the worst first."""
        errors = {(kind, name): error for kind, of in self.of_tensors.items() for name, error in of.items()}
        return sorted((key for key, error in errors.items() if error > self.tolerance), key=lambda key: -errors[key])

    @property
    def largest(self) -> float:
        return max(self.loss, *(error for errors in self.of_tensors.values() for error in errors.values()))

    def of_kind(self, kind: str) -> float:
        """Largest error of the tensors of ``kind``."""
        return max(self.of_tensors[kind].values(), default=0.0)

    def by_group(self) -> dict[str, dict[str, float]]:
        """Top-level module -> kind -> largest relative error of its tensors."""
        groups: dict[str, dict[str, float]] = {}
        for kind, errors in self.of_tensors.items():
            for name, error in errors.items():
                group = groups.setdefault(name.split(".")[0], {})
                group[kind] = max(group.get(kind, 0.0), error)
        return groups

    def joined(self, other: Errors) -> Errors:
        """Return the larger error of the two, tensor by tensor."""
        of_tensors = {
            kind: {name: max(errors.get(name, 0.0), more.get(name, 0.0)) for name in {**errors, **more}}
            for kind, errors, more in ((kind, self.of_tensors[kind], other.of_tensors[kind]) for kind in KINDS)
        }
        return Errors(max(self.loss, other.loss), of_tensors, other.tolerance)


def verify_engine(
    trial: ExactnessTrial,
    make_engine: MakeEngine,
    communicator: Communicator,
    *,
    deferred: bool = False,
    make_reference: Callable[[ExactnessTrial, MeasuredEngine], PlainTraining] = lambda trial, _: PlainTraining(trial),
) -> Errors | None:
    """Compare every step of an engine with the plain step from the same state.

    The plain loop takes over the engine's state, not the other way round. So copies of the model that drift apart, or
    state that an engine loses between steps, are not repaired on the way.

    Args:
        deferred: running statistics differ from those of the plain step by intention, and are not compared.
        make_reference: returns the loop that the engine is compared with.

    Returns:
        The errors on rank 0; None on the others.
    """
    engine = make_engine(trial.fresh_module(), trial.loss, trial.make_optimizer, communicator)
    plain = None if communicator.rank else make_reference(trial, engine)
    errors = Errors()
    for step in range(trial.steps):
        if step and trial.shares:
            engine.reshare(trial.shares[(step - 1) % len(trial.shares)])
        microbatches = (_made(trial, engine, step, i) for i in engine.share)
        loss = engine.step(microbatches, step, trial.lr).loss
        ranks = gather_objects(communicator, (loss, engine.gradients()))
        state = engine.state_dict()
        if plain is not None and ranks is not None:
            outcomes = [StepOutcome(loss, gradients, state) for loss, gradients in ranks]
            plain.held_by_ranks = [outcome.gradients.keys() for outcome in outcomes]
            errors = errors.joined(compare(plain.step(step), outcomes, plain.parameters, deferred=deferred))
            plain.load_state_dict(state)
        communicator.barrier()  # ranks that are threads share torch's random numbers with the plain step
    engine.close()
    return errors if plain is not None else None


def _made(trial: ExactnessTrial, engine: TrainingEngine, step: int, i: int) -> Microbatch:
    microbatch = trial.microbatch(step, i, engine.wants(i))
    if not trial.by_boxes or microbatch.images is None:
        return microbatch
    return microbatch._replace(images=CroppedImages(as_tensor(microbatch.images)))


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
    plain: StepOutcome, ranks: Sequence[StepOutcome], parameters: Sequence[str], *, deferred: bool = False
) -> Errors:
    """Return the errors of one step of an engine.

    Args:
        ranks: outcomes of the engine's ranks; the first has the state.
        parameters: names, in the order of the model. All else in its state are running statistics.
        deferred: leave out running statistics.
    """
    of_tensors = {"gradients": _errors(plain.gradients, [rank.gradients for rank in ranks])}
    ours, theirs = (_tensors_of(outcome.state, parameters) for outcome in (ranks[0], plain))
    for kind, expected in theirs.items():
        of_tensors[kind] = {} if deferred and kind == "statistics" else _errors(expected, [ours[kind]])
    loss = max(_relative(abs(rank.loss - plain.loss), abs(plain.loss)) for rank in ranks)
    dtype = next(value.dtype for value in plain.gradients.values()).to_real()
    return Errors(loss, of_tensors, TOLERANCE[dtype])


def _tensors_of(state: Mapping[str, Any], parameters: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Kind -> name -> tensor, of a state dict whose optimizer numbers the parameters in their order."""
    model = state["model"]
    return {
        "parameters": {name: model[name] for name in parameters if name in model},
        "statistics": {name: value for name, value in model.items() if name not in set(parameters)},
        "optimizer": {
            f"{parameters[number]}.{key}": value
            for number, values in state["optimizer"]["state"].items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        },
    }


def _errors(expected: Mapping[str, Tensor], found: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Largest relative error of each tensor on any rank that has it; one that is missing counts as zeros."""
    sizes = {name: _size(value) for name, value in expected.items()}
    floor = FLOOR * max((sizes[name] for name, value in expected.items() if not _counts(value)), default=0.0)
    errors = {}
    for name in {name: None for tensors in (expected, *found) for name in tensors}:
        copies = [rank[name] for rank in found if name in rank]
        reference = expected[name] if name in expected else torch.zeros_like(copies[0])
        difference = max(_distance(reference, ours) for ours in copies or [torch.zeros_like(reference)])
        errors[name] = _relative(difference, max(sizes.get(name, 0.0), 0.0 if _counts(reference) else floor))
    return errors


def _counts(value: Tensor) -> bool:
    """Return whether these are counters, indices or flags, which have no rounding."""
    return not (value.is_floating_point() or value.is_complex())


def _size(value: Tensor) -> float:
    sizes = value.detach().to(torch.promote_types(value.dtype, torch.float64)).abs()
    return float(sizes[sizes.isfinite()].max()) if sizes.isfinite().any() else 0.0


def _distance(expected: Tensor, found: Tensor) -> float:
    """The largest difference; not finite where one side alone is not, or the shapes differ."""
    if expected.shape != found.shape:
        return math.inf
    wide = torch.promote_types(expected.dtype, torch.float64)
    expected, found = (value.detach().cpu().to(wide) for value in (expected, found))
    distances = torch.where(expected == found, 0.0, (expected - found).abs())
    return float(distances.max()) if distances.numel() else 0.0


def _relative(difference: float, scale: float) -> float:
    """Return infinity where ``difference`` is not a finite number."""
    if not math.isfinite(difference):
        return math.inf
    return difference / (scale or difference) if difference else 0.0
