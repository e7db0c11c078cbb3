"""One run of a traced model without memory or time: what every layer gives, costs, draws and changes.

Takes the fx graph of a model in training and the shape of a microbatch; gives ``Facts`` for every node. The run is on
fake tensors (shape, dtype and device, no data); a model that looks at data is run on real zeros instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from parallel.op import Convolution, Op

_aten = torch.ops.aten
ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten.empty_strided.default,
)
"""They give memory and touch none."""


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
                replaced = _once_each(state, lambda t: _empty_like(t, device))
                example = torch.empty(shape, dtype=dtype, device=device)
            return _run(training, replaced, example, fake)
        except Exception:  # data-dependent, or an operation without a fake version: the real run tells faults apart
            real = next((t.device for t in state.values()), device)
            replaced = _once_each(state, lambda t: t if isinstance(t, nn.Parameter) else t.detach().clone())
            return _run(training, replaced, torch.zeros(shape, dtype=dtype, device=real), nullcontext())


def _run(
    training: fx.GraphModule, state: dict[str, Tensor], example: Tensor, mode: AbstractContextManager[Any]
) -> dict[str, Facts]:
    watch = _Watch({_memory(tensor) for tensor in state.values()})
    observed = _Observed(training, watch)
    named = {f"model.{name}": tensor for name, tensor in state.items()}
    with mode, watch, saved_tensors_hooks(watch.pack, lambda tensor: tensor):
        torch.func.functional_call(observed, named, (example,), tie_weights=False)
    return observed.facts


class _Observed(nn.Module):
    """Runs the graph node by node; a module so that ``functional_call`` swaps and restores what it uses."""

    def __init__(self, model: fx.GraphModule, watch: _Watch) -> None:
        super().__init__()
        self.model = model
        self.watch = watch

    def forward(self, example: Tensor) -> None:
        interpreter = _Interpreter(self.model, self.watch)
        interpreter.run(example)
        self.facts = interpreter.facts


class _Interpreter(fx.Interpreter):
    def __init__(self, model: fx.GraphModule, watch: _Watch) -> None:
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
            self._makers.setdefault(_memory(tensor), n.name)
        self.facts[n.name] = Facts(
            output_bytes=sum(map(_bytes, tensors)),
            flops=sum(op.flops for op in self._watch.ops),
            differentiable=any(tensor.requires_grad for tensor in tensors),
            random=self._watch.drew,
            changed=tuple(changed),
            saved=tuple(self._watch.saved.items()),
            ops=tuple(self._watch.ops),
            gives=tuple(sorted(set(filter(None, map(self._watch.numbered, tensors))))),
        )
        return value


@dataclass(frozen=True, slots=True)
class _Signature:
    """What an operation's schema says of it.

    Attributes:
        arguments: their names in order.
        written: those of them that it changes.
        draws: it draws random numbers.
        computes: it makes or changes something; views and allocations do not.
        composite: it is made of others, whose flops are its own.
    """

    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    draws: bool
    computes: bool
    composite: bool


@functools.lru_cache(maxsize=1024)
def _signature(func: Any) -> _Signature:
    schema = func._schema
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return _Signature(
        name=schema.name.rpartition("::")[2],
        arguments=tuple(argument.name for argument in schema.arguments),
        written=tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        computes=func.namespace != "prim" and not views and func not in ALLOCATIONS,
        composite=func.namespace != "prim" and func.overloadpacket not in flop_registry and func._can_decompose(),
    )


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what one node computes: storages written to, random numbers drawn, operations, and what autograd keeps.

    Args:
        state: memory of parameters and buffers, which is there anyway.
    """

    def __init__(self, state: set[StorageWeakRef]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state
        self._numbers: dict[StorageWeakRef, int] = {}
        self.begin()

    def begin(self) -> None:
        """A new node."""
        self.written: set[StorageWeakRef] = set()
        self.saved: dict[int, int] = {}
        self.ops: list[Op] = []
        self.drew = False

    def pack(self, tensor: Tensor) -> Tensor:
        """Takes what autograd keeps, and keeps it as autograd does."""
        if piece := self.numbered(tensor):
            number, size = piece
            self.saved[number] = size
        return tensor

    def numbered(self, tensor: Tensor) -> tuple[int, int] | None:
        """(number, bytes) of the memory of ``tensor``; None where a parameter or buffer lies in it."""
        memory = _memory(tensor)
        if memory in self._state:
            return None
        return self._numbers.setdefault(memory, len(self._numbers)), tensor.untyped_storage().nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        signature = _signature(func)
        given = dict(zip(signature.arguments, args, strict=False)) | kwargs
        if signature.draws and given.get("dropout_p", 1) > 0:
            self.drew = True
        if signature.written:
            self.written |= {_memory(tensor) for tensor in _tensors(map(given.get, signature.written))}
        value, flops = self._parts(func, args, kwargs) if signature.composite else _counted(func, args, kwargs)
        if signature.computes:
            self.ops.append(self._op(func, signature.name, given, value, flops))
        return value

    def _parts(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, int]:
        """What a composite operation gives, and the flops of its parts, which are not noted themselves."""
        before = len(self.ops)
        with self:
            value = func.decompose(*args, **kwargs)
        flops = sum(op.flops for op in self.ops[before:])
        del self.ops[before:]
        return value, flops

    def _op(self, func: Any, name: str, given: dict[str, Any], value: Any, flops: int) -> Op:
        read, written = _tensors(given.values()), _tensors((value,))
        return Op(
            name=name,
            flops=flops,
            read_bytes=sum(map(_bytes, read)),
            written_bytes=sum(map(_bytes, written)),
            differentiable=any(tensor.requires_grad for tensor in read),
            passes_on=any(tensor.requires_grad and _memory(tensor) not in self._state for tensor in read),
            convolution=_convolution(given, value) if func is _aten.convolution.default else None,
        )


def _counted(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, int]:
    """What an operation gives, and its flops: 0 of one for which torch has no formula."""
    value = func(*args, **kwargs)
    formula = flop_registry.get(func.overloadpacket)
    return value, 0 if formula is None else formula(*args, **kwargs, out_val=value)


def _convolution(given: dict[str, Any], value: Tensor) -> Convolution:
    images, weight = given["input"], given["weight"]
    return Convolution(
        batch=images.shape[0],
        channels_in=images.shape[1],
        channels_out=value.shape[1],
        kernel=tuple(weight.shape[2:]),
        stride=tuple(given["stride"]),
        dilation=tuple(given["dilation"]),
        groups=given["groups"],
        size_in=tuple(images.shape[2:]),
        size_out=tuple(value.shape[2:]),
        transposed=given["transposed"],
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Among what an operation takes or gives: tensors, and those in lists."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


def _once_each(state: dict[str, Tensor], replace: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Every tensor replaced, one that has two names by one."""
    replaced: dict[int, Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in replaced:
            replaced[id(tensor)] = replace(tensor)
    return {name: replaced[id(tensor)] for name, tensor in state.items()}


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _memory(tensor: Tensor) -> StorageWeakRef:
    """What tensors share when a change of one shows in the other."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
