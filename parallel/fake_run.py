"""One run of a traced model without memory or time: what every layer gives, costs, draws and changes.

Takes the fx graph of a model in training and the shape of a microbatch; gives ``Facts`` for every node. The run is on
fake tensors (shape, dtype and device, no data); a model that looks at data is run on real zeros instead.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True, slots=True)
class Facts:
    """What one node did.

    Attributes:
        output_bytes: of the tensors it gave.
        flops: of its forward pass.
        differentiable: one of the tensors it gave needs a gradient.
        random: it drew random numbers.
        changed: the earliest node whose value it changed in place, itself where there is none.
    """

    output_bytes: int
    flops: int
    differentiable: bool
    random: bool
    changed: str


def fake_run(
    training: fx.GraphModule, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> dict[str, Facts]:
    """Facts of every node by name. Parameters, buffers and random state of the modules stay as they are.

    Raises:
        ValueError: the model cannot run on ``shape``.
    """
    state: dict[str, Tensor] = {
        **dict(training.named_parameters(remove_duplicate=False)),
        **dict(training.named_buffers(remove_duplicate=False)),
    }
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
            with fake:
                replaced = _once_each(state, lambda t: _empty_like(t, device))
                example = torch.empty(shape, dtype=dtype, device=device)
            return _run(training, replaced, example, fake)
        except Exception:  # data-dependent, or an operation without a fake version: the real run tells faults apart
            real = next((t.device for t in state.values()), device)
            replaced = _once_each(state, lambda t: t if isinstance(t, nn.Parameter) else t.detach().clone())
            return _run(training, replaced, torch.zeros(shape, dtype=dtype, device=real), None)


def _run(
    training: fx.GraphModule, state: dict[str, Tensor], example: Tensor, mode: FakeTensorMode | None
) -> dict[str, Facts]:
    observed = _Observed(training)
    named = {f"model.{name}": tensor for name, tensor in state.items()}
    watch = _Watch()
    observed.facts, observed.watch = {}, watch
    counter = FlopCounterMode(display=False)
    observed.counter = counter
    if mode is None:
        with counter, watch:
            torch.func.functional_call(observed, named, (example,), tie_weights=False)
    else:
        with mode, counter, watch:
            torch.func.functional_call(observed, named, (example,), tie_weights=False)
    return observed.facts


class _Observed(nn.Module):
    """Runs the graph node by node; a module so that ``functional_call`` swaps and restores what it uses."""

    facts: dict[str, Facts]
    watch: _Watch
    counter: FlopCounterMode

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__()
        # Not through nn.Module.train: the modes of the user's modules stay as the trace left them.
        self.model = model

    def forward(self, example: Tensor) -> None:
        _Interpreter(self).run(example)


class _Interpreter(fx.Interpreter):
    def __init__(self, observed: _Observed) -> None:
        super().__init__(observed.model)
        self.observed = observed
        self.makers: dict[int, str] = {}
        self.kept: list[Any] = []

    def run_node(self, n: fx.Node) -> Any:
        watch, counter = self.observed.watch, self.observed.counter
        watch.written.clear()
        watch.drew = False
        before = counter.get_total_flops()
        try:
            value = super().run_node(n)
        except Exception as error:
            where = f"module {n.target!r}" if n.op == "call_module" else f"{n.op} {n.name!r}"
            raise ValueError(f"the model fails on its example input at {where}: {error}") from error
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        changed = n.name
        for key in watch.written:
            maker = self.makers.get(key)
            if maker is not None and (changed == n.name or self.order[maker] < self.order[changed]):
                changed = maker
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.makers.setdefault(storage._cdata, n.name)
            self.kept.append(storage)  # an address is not given away twice while this run looks at it
        self.observed.facts[n.name] = Facts(
            output_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            flops=counter.get_total_flops() - before,
            differentiable=any(tensor.requires_grad for tensor in tensors),
            random=watch.drew,
            changed=changed,
        )
        return value

    @property
    def order(self) -> dict[str, int]:
        if not hasattr(self, "_order"):
            self._order = {node.name: k for k, node in enumerate(self.module.graph.nodes)}
        return self._order


class _Watch(TorchDispatchMode):
    """Notes which storages are written to, and whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p", 1) > 0:
            self.drew = True
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_leaves(given.get(argument.name)):
                    if isinstance(leaf, Tensor):
                        self.written.add(leaf.untyped_storage()._cdata)
        return func(*args, **kwargs)


def _once_each(state: dict[str, Tensor], replace: Any) -> dict[str, Tensor]:
    """Every tensor replaced, one that has two names by one."""
    replaced: dict[int, Tensor] = defaultdict()
    for tensor in state.values():
        if id(tensor) not in replaced:
            replaced[id(tensor)] = replace(tensor)
    return {name: replaced[id(tensor)] for name, tensor in state.items()}


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
