"""One run of a traced model without memory or time: what every layer gives, computes, draws and changes.

Takes the fx graph of a model in training and the shape of a microbatch; gives ``Facts`` for every node. The run is on
fake tensors (shape, dtype and device, no data); a model that looks at data is run on real zeros instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from parallel.graph.layers import Op
from parallel.trace.left_as_it_was import left_as_it_was
from parallel.trace.op_recorder import OpRecorder, bytes_of, storage_of


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one node after the run.

    Attributes:
        output_bytes: of the tensors it gave.
        flops: of its forward pass.
        differentiable: one of the tensors it gave needs a gradient.
        random: it drew random numbers.
        changed: the nodes that made the memory it changed in place.
        saved: (number, bytes) of each storage that autograd saves for its backward pass, but parameters and buffers.
        ops: what it computed.
        output_storages: (number, bytes) of each storage that its value lies in, but parameters and buffers.
    """

    output_bytes: int
    flops: int
    differentiable: bool
    random: bool
    changed: tuple[str, ...]
    saved: tuple[tuple[int, int], ...]
    ops: tuple[Op, ...]
    output_storages: tuple[tuple[int, int], ...]


def fake_run(
    training: fx.GraphModule,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> dict[str, Facts]:
    """Return the facts of every node by name. Parameters, buffers and random state of the modules stay as they are.

    Raises:
        ValueError: the model cannot run on ``shape``.
    """
    state = state_of(training)
    precision = torch.autocast(device.type, autocast, enabled=autocast is not None)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), precision:
        try:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            with fake:
                replaced = once_each(state, lambda t: empty_like(t, device))
                example = torch.empty(shape, dtype=dtype, device=device)
            return _run(training, replaced, example, fake)
        except Exception:  # data-dependent, or an operation without a fake version: the real run tells faults apart
            real = next((t.device for t in state.values()), device)
            return _run(
                training, once_each(state, copy_of), torch.zeros(shape, dtype=dtype, device=real), nullcontext()
            )


def _run(
    training: fx.GraphModule, state: dict[str, Tensor], example: Tensor, mode: AbstractContextManager[Any]
) -> dict[str, Facts]:
    recorder = OpRecorder({storage_of(tensor) for tensor in state.values()})
    observed = _Observed(training, recorder)
    named = {f"model.{name}": tensor for name, tensor in state.items()}
    with mode, recorder, saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
        torch.func.functional_call(observed, named, (example,), tie_weights=False)
    return observed.facts


class _Observed(nn.Module):
    """A graph run node by node; a module so that ``functional_call`` swaps and restores what it uses."""

    def __init__(self, model: fx.GraphModule, recorder: OpRecorder) -> None:
        super().__init__()
        self.model = model
        self.recorder = recorder

    def forward(self, example: Tensor) -> None:
        interpreter = _Interpreter(self.model, self.recorder)
        interpreter.run(example)
        self.facts = interpreter.facts


class _Interpreter(fx.Interpreter):
    def __init__(self, model: fx.GraphModule, recorder: OpRecorder) -> None:
        super().__init__(model)
        self.extra_traceback = False
        self.facts: dict[str, Facts] = {}
        self._recorder = recorder
        # Weak: the data goes when its last use is done, but its address is not given away again during this run.
        self._makers: dict[StorageWeakRef, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        self._recorder.begin()
        try:
            value = super().run_node(n)
        except Exception as error:
            where = f"module {n.target!r}" if n.op == "call_module" else f"{n.op} {n.name!r}"
            raise ValueError(f"the model does not run on the example input, at {where}: {error}") from error
        changed = [self._makers[storage] for storage in self._recorder.written if storage in self._makers]
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._makers.setdefault(storage_of(tensor), n.name)
        self.facts[n.name] = Facts(
            output_bytes=sum(map(bytes_of, tensors)),
            flops=sum(op.flops for op in self._recorder.ops),
            differentiable=any(tensor.requires_grad for tensor in tensors),
            random=self._recorder.uses_rng,
            changed=tuple(changed),
            saved=tuple(self._recorder.saved.items()),
            ops=tuple(self._recorder.ops),
            output_storages=tuple(sorted(set(filter(None, map(self._recorder.numbered, tensors))))),
        )
        return value


def state_of(module: nn.Module, *, recurse: bool = True) -> dict[str, Tensor]:
    """Return parameters, then buffers, by every name that they have in ``module``."""
    named = (module.named_parameters, module.named_buffers)
    return {name: tensor for tensors in named for name, tensor in tensors(recurse=recurse, remove_duplicate=False)}


def once_each(state: dict[str, Tensor], replace: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return every tensor of ``state`` replaced; one that has two names, by one."""
    replaced: dict[int, Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in replaced:
            replaced[id(tensor)] = replace(tensor)
    return {name: replaced[id(tensor)] for name, tensor in state.items()}


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor or parameter on ``device`` laid out as ``tensor``, with any values."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a parameter or buffer, with its values, for a run that may change it."""
    copy = tensor.detach().clone()
    return nn.Parameter(copy, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def run_without_data(
    model: nn.Module,
    shape: tuple[int, ...],
    layout: torch.memory_format = torch.contiguous_format,
    watch: AbstractContextManager[Any] | None = None,
) -> None:
    """Run ``model`` on the CPU on tiles that have no data, and leave it as it was.

    Args:
        shape: (n, c, h, w) of a microbatch.
        layout: of tiles and of parameters of four dimensions.
        watch: context of the forward pass.

    Raises:
        Exception: whatever the model raises; a model that looks at its data cannot run so.
    """

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor.to(memory_format=layout) if tensor.dim() == 4 else tensor

    dtype = next((p.dtype for p in model.parameters()), torch.float32).to_real()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with left_as_it_was(model), torch.random.fork_rng(devices=[]), fake, watch or nullcontext():
        values = once_each(state_of(model), lambda t: laid_out(empty_like(t, torch.device("cpu"))))
        images = laid_out(torch.empty(shape, dtype=dtype))
        torch.func.functional_call(model, values, (images,), tie_weights=False)
