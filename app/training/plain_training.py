"""The training loop of one process, which a strategy is compared with, and the trial that both compute.

A trial has random tiles and a loss for any model. With delayed gradients a step is a window of minibatches, the
microbatches of ``ExactnessTrial``. Under pipedream each updates every stage, with gradients of the weights that it went
forward with (Harlap et al., 2018, section 3.3: weight stashing). Under async the log of pushes says which minibatch
updates which version, with gradients of which.
"""

from __future__ import annotations

import copy
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from app.settings.optimization import OptimizerSettings
from app.training.engines import build_optimizer
from models.losses import IGNORE
from parallel.comm.communicator import Communicator
from parallel.engine.async_engine import AsyncEngine
from parallel.engine.engine import Engine
from parallel.engine.optimizer_step import MakeOptimizer
from parallel.engine.step import Microbatch, NeededInputs, TrainingEngine, microbatch_seed
from parallel.schedule.action import versions
from parallel.schedule.shares import Shares
from parallel.stage.stage import Loss
from parallel.trace.patched_kernels import patch_kernels
from parallel.trace.python_random import seed_python
from parallel.trace.stage_module import as_tensor


class RandomProjectionLoss:
    """A loss for any model: its outputs, projected on random weights, are to be a random number.

    In a map of the tile's size, the weight of a value is the fixed weight of its channel times the target of its pixel.
    So the projection is a sum over boxes of the tile.
    """

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        """Return the mean loss ().

        Args:
            output: a tensor (n, ...), or tensors in tuples, lists, dicts and the like.
            targets: (n, h, w).
        """
        return self.value(self.sums(output, targets), targets.shape[1] * targets.shape[2])

    def sums(self, output: Any, targets: Tensor) -> Tensor:
        """Return projections (n, outputs), less their targets; of a map (n, c, h, w), what a box adds."""
        if isinstance(output, Tensor) and output.dim() == 4 and (len(output), *output.shape[2:]) == targets.shape:
            weights = _weights(0, (output.shape[1], 1, 1), output)
            return (output * weights * targets[:, None]).flatten(1).sum(1)[:, None].double()
        rows, columns = targets.shape[1:]
        errors = []
        for k, leaf in enumerate(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
            leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            leaf = leaf if leaf.dim() else leaf.reshape(1, 1)  # a model's own loss, beside the rest
            weights = _weights(k, leaf.shape[1:], leaf)
            projection = (leaf * weights).flatten(1).sum(1) / math.sqrt(weights.numel())
            errors.append((projection - targets[:, 0, 0]) * math.sqrt(rows * columns))
        return torch.stack(errors, 1)

    def value(self, sums: Tensor, pixels: int) -> Tensor:
        """Return the mean loss () of tiles of ``pixels`` px."""
        return sums.square().mean(0).sum() / pixels


def _weights(seed: int, shape: Sequence[int], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(like)


class MeasuredEngine(TrainingEngine, Protocol):
    """An engine that shows its gradients."""

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients of the global batch's mean loss after a step, by name of the parameters of this rank."""
        ...


MakeEngine = Callable[[nn.Module, Loss, MakeOptimizer, Communicator], MeasuredEngine]


@dataclass(frozen=True, eq=False)
class ExactnessTrial:
    """Trial that is computed both ways, on random tiles.

    Attributes:
        module: with the weights to begin with; left as it is.
        sizes: tiles of each microbatch of the global batch.
        steps: optimiser steps, each of which is compared.
        channels_last: memory layout of images and model.
        by_boxes: the engine is given images of which it asks for boxes.
        classes: targets are ids of so many classes, of which every ninth row does not count; 0: numbers.
        shares: of the groups, round robin over the steps after the first; empty: they stay as they are.
    """

    module: nn.Module
    sizes: tuple[int, ...]
    tile: int
    dtype: torch.dtype
    device: torch.device
    steps: int = 3
    seed: int = 0
    lr: float = 1e-3
    channels_last: bool = False
    by_boxes: bool = False
    loss: Loss = field(default_factory=RandomProjectionLoss)
    classes: int = 0
    shares: tuple[Shares, ...] = ()

    def fresh_module(self) -> nn.Module:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        # What hooks compute anew from parameters, as weight norm does, torch refuses to copy with its history.
        attributes = (value for part in self.module.modules() for value in vars(part).values())
        computed = {id(t): t.detach().clone() for t in attributes if isinstance(t, Tensor) and not t.is_leaf}
        return in_precision(copy.deepcopy(self.module, computed), self.dtype).to(memory_format=layout)

    def microbatch(self, step: int, i: int, wants: NeededInputs) -> Microbatch:
        """Microbatch ``i`` of ``step``: images (n, 3, tile, tile), targets (n, tile, tile)."""
        generator = torch.Generator().manual_seed(microbatch_seed(self.seed, step, i) >> 1)
        shape = (self.sizes[i], 3, self.tile, self.tile)
        targets = self._targets((shape[0], *shape[2:]), generator).to(self.device)
        images = torch.randn(shape, generator=generator, dtype=self.dtype).to(self.device) if wants.images else None
        if images is not None and self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return Microbatch(images, targets if wants.targets else None, shape)

    def _targets(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
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
class StepOutcome:
    """Result of one step on one rank.

    Attributes:
        gradients: by name of the parameter; those that the rank holds.
        state: after the step, as ``TrainingEngine.state_dict`` gives it; empty on all ranks but the first.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Any]


class PlainTraining:
    """The training loop of one process: forward, backward, gradients accumulated, update.

    Uses nothing of ours but the seeds, and the workarounds for faults of torch.

    Attributes:
        held_by_ranks: names of the parameters that each rank of the engine has gradients of.
    """

    held_by_ranks: Sequence[Collection[str]] = ()

    def __init__(self, trial: ExactnessTrial) -> None:
        patch_kernels()
        self._trial = trial
        self.module = trial.fresh_module().to(trial.device).train()
        self.optimizer = trial.make_optimizer(self.module.named_parameters())
        self.parameters = [name for name, _ in self.module.named_parameters()]
        numbers = {parameter: number for number, parameter in enumerate(self.module.parameters())}
        # The optimizer numbers parameters group by group, the state of an engine in the order of the model.
        self._numbers = [numbers[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self, step: int) -> StepOutcome:
        """Compute step ``step`` from the present state."""
        trial = self._trial
        self.optimizer.zero_grad()
        total = 0.0
        for i, size in enumerate(trial.sizes):
            loss = self.loss_of(step, i) * (size / sum(trial.sizes))
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.optimizer.step()
        return self.outcome(total)

    def loss_of(self, step: int, i: int) -> Tensor:
        """Return the loss of microbatch ``i`` of ``step``."""
        images, targets, _ = self._trial.microbatch(step, i, NeededInputs(images=True, targets=True))
        assert targets is not None
        torch.manual_seed(seed := microbatch_seed(self._trial.seed, step, i))
        seed_python(seed)
        return self._trial.loss(self.module(images), as_tensor(targets))

    def outcome(self, loss: float) -> StepOutcome:
        """Return what the step left, whose mean loss was ``loss``."""
        gradients = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        states = {self._numbers[own]: values for own, values in self.optimizer.state_dict()["state"].items()}
        return StepOutcome(loss, gradients, {"model": self.module.state_dict(), "optimizer": {"state": states}})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an engine, with the options of this optimizer."""
        for buffer in self.module.buffers():
            if 0 in buffer.stride():  # one value seen as many, which cannot be written to
                buffer.data = buffer.clone()
        self.module.load_state_dict(state["model"])
        states = copy.deepcopy(state["optimizer"]["state"])  # torch would share the engine's tensors
        own = {own: states[number] for own, number in enumerate(self._numbers) if number in states}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": own})


class DelayedTraining(PlainTraining):
    """The loop of one process, with the weights and the learning rate of each update that ``engine`` makes in a step.

    An engine with a schedule has one stage on each rank.
    """

    def __init__(self, trial: ExactnessTrial, engine: MeasuredEngine) -> None:
        super().__init__(trial)
        self._engine = engine

    def step(self, step: int) -> StepOutcome:
        """Make the updates of ``step``, which the engine has made, from the present state."""
        sizes, total = self._trial.sizes, 0.0
        parameters = dict(self.module.named_parameters())
        history = [{name: p.detach().clone() for name, p in parameters.items()}]
        for i, version_of, learning_rate in self._updates():
            for name, version in version_of.items():
                parameters[name].data.copy_(history[version][name])
            self.optimizer.zero_grad()
            loss = self.loss_of(step, i)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * (sizes[i] / sum(sizes))
            for name, parameter in parameters.items():
                parameter.data.copy_(history[-1][name])
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            history.append({name: p.detach().clone() for name, p in parameters.items()})
        return self.outcome(total)

    def _updates(self) -> Iterator[tuple[int, dict[str, int], float]]:
        """Yield microbatch, number of updates in this step before its forward pass by parameter, and learning rate."""
        if isinstance(self._engine, AsyncEngine):
            for push in self._engine.pushes:
                yield push.minibatch, dict.fromkeys(self.parameters, push.pulled), push.learning_rate
            return
        assert isinstance(self._engine, Engine)
        used = ChainMap(*(versions(actions)[0] for actions in self._engine.schedule.values()))
        stage_of = {name: k for k, names in enumerate(self.held_by_ranks) for name in names}
        for i in range(len(self._trial.sizes)):
            yield i, {name: used[stage, i] for name, stage in stage_of.items()}, self._trial.lr
