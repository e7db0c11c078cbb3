"""One run of a traced model without memory or time: what every layer gives, costs, draws and changes.

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

from parallel.graph.op import Op
from parallel.trace.op_watch import OpWatch, bytes_of, memory_of


@dataclass(frozen=True, slots=True)
class Facts:
    """What one node did.

    Attributes:
        output_bytes: of the tensors it gave.
        flops: of its forward pass.
        differentiable: one of the tensors it gave needs a gradient.
        random: it drew random numbers.
        changed: the nodes that made the memory it changed in place.
        saved: (number, bytes) of each piece of memory that autograd keeps of it, parameters and buffers not counted.
        ops: what it computed.
        gives: (number, bytes) of each piece of memory that its value lies in, parameters and buffers not counted.
    """

    output_bytes: int
    flops: int
    differentiable: bool
    random: bool
    changed: tuple[str, ...]
    saved: tuple[tuple[int, int], ...]
    ops: tuple[Op, ...]
    gives: tuple[tuple[int, int], ...]


def fake_run(
    training: fx.GraphModule,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> dict[str, Facts]:
    """Facts of every node by name. Parameters, buffers and random state of the modules stay as they are.

    Raises:
        ValueError: the model cannot run on ``shape``.
    """
    state: dict[str, Tensor] = {
        **dict(training.named_parameters(remove_duplicate=False)),
        **dict(training.named_buffers(remove_duplicate=False)),
    }
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
            replaced = once_each(state, lambda t: t if isinstance(t, nn.Parameter) else t.detach().clone())
            return _run(training, replaced, torch.zeros(shape, dtype=dtype, device=real), nullcontext())


def _run(
    training: fx.GraphModule, state: dict[str, Tensor], example: Tensor, mode: AbstractContextManager[Any]
) -> dict[str, Facts]:
    watch = OpWatch({memory_of(tensor) for tensor in state.values()})
    observed = _Observed(training, watch)
    named = {f"model.{name}": tensor for name, tensor in state.items()}
    with mode, watch, saved_tensors_hooks(watch.pack, lambda tensor: tensor):
        torch.func.functional_call(observed, named, (example,), tie_weights=False)
    return observed.facts


class _Observed(nn.Module):
    """Runs the graph node by node; a module so that ``functional_call`` swaps and restores what it uses."""

    def __init__(self, model: fx.GraphModule, watch: OpWatch) -> None:
        super().__init__()
        self.model = model
        self.watch = watch

    def forward(self, example: Tensor) -> None:
        interpreter = _Interpreter(self.model, self.watch)
        interpreter.run(example)
        self.facts = interpreter.facts


class _Interpreter(fx.Interpreter):
    def __init__(self, model: fx.GraphModule, watch: OpWatch) -> None:
        super().__init__(model)
        self.extra_traceback = False
        self.facts: dict[str, Facts] = {}
        self._watch = watch
        # Weak: the data goes when its last use is done, but its address is not given away again during this run.
        self._makers: dict[StorageWeakRef, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        self._watch.begin()
        try:
            value = super().run_node(n)
        except Exception as error:
            where = f"module {n.target!r}" if n.op == "call_module" else f"{n.op} {n.name!r}"
            raise ValueError(f"the model does not run on the example input, at {where}: {error}") from error
        changed = [self._makers[storage] for storage in self._watch.written if storage in self._makers]
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._makers.setdefault(memory_of(tensor), n.name)
        self.facts[n.name] = Facts(
            output_bytes=sum(map(bytes_of, tensors)),
            flops=sum(op.flops for op in self._watch.ops),
            differentiable=any(tensor.requires_grad for tensor in tensors),
            random=self._watch.drew,
            changed=tuple(changed),
            saved=tuple(self._watch.saved.items()),
            ops=tuple(self._watch.ops),
            gives=tuple(sorted(set(filter(None, map(self._watch.numbered, tensors))))),
        )
        return value


def once_each(state: dict[str, Tensor], replace: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Every tensor replaced, one that has two names by one."""
    replaced: dict[int, Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in replaced:
            replaced[id(tensor)] = replace(tensor)
    return {name: replaced[id(tensor)] for name, tensor in state.items()}


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
