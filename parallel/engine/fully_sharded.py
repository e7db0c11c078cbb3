"""Fully sharded data parallelism: each rank holds a part of every parameter, gradient and optimizer state.

Ranks compute their shares of the microbatches; the parameters of one unit (``sharding_units``) after the other are
gathered while they are needed. After Rajbhandari et al. 2020, ZeRO, stage 3, and Zhao et al. 2023, PyTorch FSDP; parts
and messages are torch's (``comm.torch_shard``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator, part_bytes
from parallel.comm.torch_shard import (
    divided_like,
    own_part,
    part_like,
    recompute_in_backward,
    run_sharded,
    shard_module,
    whole_tensor,
)
from parallel.engine.optimizer_step import MakeOptimizer, OptimizerStep, requires_grad_changed
from parallel.engine.sharding_units import recomputed_modules, sharding_units
from parallel.engine.state_dict import options_by_name, own_state, states_by_name, whole_state
from parallel.engine.step import (
    Microbatch,
    NeededInputs,
    StepResult,
    TrainingEngine,
    mean_loss,
    measured,
    microbatch_seed,
    missing_microbatch,
    read_losses,
)
from parallel.memory.policy import NO_BLOCKS
from parallel.offload.copies import Copies
from parallel.offload.rng import drawing
from parallel.schedule.shares import share_of
from parallel.stage.batchnorm import running_statistics
from parallel.stage.stage import Loss
from parallel.streaming.box_sums import Sums
from parallel.trace.patched_kernels import patch_kernels
from parallel.trace.python_random import preserve_python_state, python_state, set_python_state
from parallel.trace.stage_module import as_tensor


class FullyShardedEngine(TrainingEngine):
    """One step on a global batch, by ranks that hold the model together; by torch's FSDP2.

    A forward or backward pass gathers what the other ranks hold, so all ranks make the same number of passes, of the
    same submodules in the same order. A rank with fewer microbatches than others computes one twice, and counts it
    once. Gradients are summed with every pass, so that a rank holds its part of them alone; under autocast, the copies
    of weights in the smaller type are kept from the forward to the backward pass.

    Args:
        module: the whole model on the CPU, the same on every rank; changed in place.
        make_optimizer: over this rank's parts of the parameters, as of ``OptimizerStep``.
        communicator: 2 ranks or more that can divide a module.
        loss: mean over the tiles of a microbatch.
        batch: tiles of a step over all ranks.
        m: microbatches of a step over all ranks.
        device: of the parts and of computing.
        seed: of dropout and every other random number the model draws.
        autocast: type for mixed precision; None computes in the model's own.
        statistics: running statistics of normalisation layers once per microbatch, or deferred to once per step.
        recompute: blocks (``recomputed_modules``) save what enters them alone, and are recomputed in the backward pass.
        offload: copies to and from the host, where the optimizer then is; None: it is on the device.

    Raises:
        ValueError: ``batch``, ``m`` and the number of ranks do not fit together; the communicator cannot, the model has
            a parameter that cannot be divided, or no block that could be recomputed.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        make_optimizer: MakeOptimizer,
        communicator: Communicator,
        *,
        batch: int,
        m: int,
        device: torch.device,
        seed: int = 0,
        autocast: torch.dtype | None = None,
        statistics: Literal["per-microbatch", "deferred"] = "per-microbatch",
        recompute: bool = False,
        offload: Copies | None = None,
    ) -> None:
        patch_kernels()
        for parameter in module.parameters():
            # FSDP2 refuses other layouts; convolutions take images in any of them all the same.
            parameter.data = parameter.data.contiguous()
            communicator.broadcast(parameter.data)  # parts of different models would make a model of none
        units = sharding_units(module)
        blocks = recomputed_modules(module, units) if recompute else []
        if recompute and not blocks:
            raise ValueError(f"--recompute block: {NO_BLOCKS}; use --recompute none")
        for block in blocks:
            recompute_in_backward(block, self._second_pass)
        self.module, self.counted = shard_module(module, units, communicator, device), True
        self._held = dict(module.named_parameters())
        self._trained = [parameter.requires_grad for parameter in self._held.values()]
        self._parts = {
            name: nn.Parameter(own_part(each), requires_grad=each.requires_grad) for name, each in self._held.items()
        }
        self._update = OptimizerStep(
            make_optimizer,
            owned=self._parts,
            unshared=[*self._held.values(), *self._parts.values()],
            held=self._parts,
            offload=offload,
        )
        assert self._update.optimizer is not None, "a model has parameters"
        self.optimizer = self._update.optimizer
        self.share: Sequence[int] = share_of(communicator.rank, communicator.world, m)
        self._loss, self._communicator, self._device = loss, communicator, device
        self._batch, self._m, self._seed, self._autocast = batch, m, seed, autocast
        self._statistics = running_statistics(module, communicator, statistics)
        self._dtype = next(module.parameters()).dtype.to_real()
        self._idle = len(self.share) < len(share_of(0, communicator.world, m))

    def _second_pass(self, block: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ``block`` computes what it does from now on."""
        state = python_state()

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with preserve_python_state(), self._statistics.frozen(set(block.modules())):
                set_python_state(state)
                yield

        return context()

    def wants(self, i: int) -> NeededInputs:
        return self.predict_wants

    @property
    def predict_wants(self) -> NeededInputs:
        return NeededInputs(images=True, targets=True)

    def step(self, microbatches: Iterable[Microbatch], step: int, learning_rate: float) -> StepResult:
        if [parameter.requires_grad for parameter in self._held.values()] != self._trained:
            raise requires_grad_changed(self._held, self._trained)
        self.module.train()
        self._update.begin_step()
        self._statistics.begin_step(self._m)
        computed = {i: self._accumulate(i, each, step) for i, each in zip(self.share, microbatches, strict=False)}
        if len(computed) < len(self.share):
            raise missing_microbatch(self.share[len(computed)])
        losses = read_losses(computed, self._m)
        tiles = int(losses[1].sum())
        mean = mean_loss(self._communicator, losses)
        self._statistics.end_step()
        for name, part in self._parts.items():
            gradient = self._held[name].grad
            part.grad = None if gradient is None else own_part(gradient)
        self._update.apply(learning_rate, scale=self._batch / int(losses[1].sum()))
        return StepResult(mean, tiles)

    def _accumulate(self, i: int, microbatch: Microbatch, step: int) -> tuple[Tensor, int]:
        """Run forward and backward of microbatch ``i``; return its own mean loss and its tiles."""
        if i == self.share[-1] and self._idle:
            # Weighs nothing; the running statistics it leaves are those of the pass that follows, which replace them.
            (self._forward(i, microbatch, step) * 0).backward()  # type: ignore[no-untyped-call]
        loss = self._forward(i, microbatch, step)
        (loss * (microbatch.shape[0] / self._batch)).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), microbatch.shape[0]

    def _forward(self, i: int, microbatch: Microbatch, step: int) -> Tensor:
        """Return the loss of microbatch ``i``."""
        assert microbatch.images is not None
        assert microbatch.targets is not None
        with (
            drawing(microbatch_seed(self._seed, step, i), self._device),
            self._statistics.microbatch(i),
            self._precision(),
        ):
            return self._loss(run_sharded(self.module, as_tensor(microbatch.images)), as_tensor(microbatch.targets))

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None)

    @contextlib.contextmanager
    def predicting(self) -> Iterator[None]:
        """Let ranks that have no more predictions to make gather the model with the others."""
        yield
        while (shape := self._agreed_shape(None)) is not None:
            self._predict(torch.zeros(shape, dtype=self._dtype, device=self._device))

    def predict(self, microbatch: Microbatch, sums: Sums | None = None) -> Tensor:
        """Every rank takes part, within ``predicting`` or by a prediction of its own at the same time."""
        assert microbatch.images is not None
        self._agreed_shape(microbatch.shape)
        output: Tensor = measured(self._predict(as_tensor(microbatch.images)), microbatch, sums)
        return output

    @torch.no_grad()
    def _predict(self, images: Tensor) -> Tensor:
        self.module.eval()
        with self._precision():
            output: Tensor = run_sharded(self.module, images)
        self.module.reshard()  # frees what the forward pass left gathered
        return output.float()

    def _agreed_shape(self, mine: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Shape of the images of any rank that has some; None when no rank has."""
        shapes = self._communicator.all_gather(torch.tensor(mine or (0, 0, 0, 0)))
        return next((tuple(shape) for shape in shapes.tolist() if shape[0]), None)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the global batch's mean loss, whole, by name of the parameter; after a step. Every
        rank takes part."""
        return {name: whole_tensor(each.grad) for name, each in self._held.items() if each.grad is not None}

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        self._update.swap_average()
        yield
        self._update.swap_average()

    def on_device(self) -> Iterator[Tensor]:
        yield from self.module.buffers()
        yield from self._update.on_device()

    def before_update(self, call: Callable[[], None]) -> None:
        self._update.before_update(call)

    @property
    def parameter_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.module.named_parameters(remove_duplicate=False))

    @property
    def sent_in_step(self) -> int:
        """Parameters are gathered by every forward and every backward pass, gradients summed by the latter."""
        world = self._communicator.world
        passes = len(share_of(0, world, self._m))
        model = sum(p.nbytes for p in self.module.parameters())
        return 3 * passes * part_bytes(model, world)

    def state_dict(self) -> dict[str, Any]:
        model = self._kept(self.module.state_dict())
        states = {name: self._kept(self._divided(name, s)) for name, s in states_by_name(self.optimizer).items()}
        optimizer = whole_state(list(self._held), states, options_by_name(self.optimizer))
        return {} if self._communicator.rank > 0 else {"model": model, "optimizer": optimizer}

    def _divided(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a part as that of a divided parameter: what has its shape is divided as it is."""
        parameter, shape = self._held[name], self._parts[name].shape
        alike = {key for key, value in state.items() if getattr(value, "shape", None) == shape}
        return {key: divided_like(value, parameter) if key in alike else value for key, value in state.items()}

    def _kept(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``values`` whole, on the CPU of rank 0: a device may not have the room that all ranks have."""
        tensors = ((key, whole_tensor(value) if isinstance(value, Tensor) else value) for key, value in values.items())
        first = self._communicator.rank == 0
        return {key: (value.cpu() if isinstance(value, Tensor) else value) if first else None for key, value in tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.module.state_dict()
        model = {key: part_like(value, own[key]) if key in own else value for key, value in state["model"].items()}
        self.module.load_state_dict(model)
        names = [name for group in self.optimizer.param_groups for name in group["param_names"]]
        saved = own_state(self.optimizer, state["optimizer"], list(self._held))
        for number, values in saved["state"].items():
            parameter = self._held[names[number]]  # what has its shape is divided as it is, counters are not
            alike = (key for key, value in values.items() if getattr(value, "shape", None) == parameter.shape)
            parts = {key: own_part(part_like(values[key], parameter)) for key in alike}
            saved["state"][number] = {**values, **parts}
        self.optimizer.load_state_dict(saved)
