"""One run of a traced model without memory or time: what every layer gives, computes, draws and changes.

The run is on fake tensors (shape, dtype and device, no data); a model that looks at data is run on real zeros instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.trace.op_recorder import OpRecorder, bytes_of, storage_of, tensors_of
from parallel.trace.python_random import preserve_python_state
from parallel.trace.tracer import scope_of
from parallel.trace.without_data import Trial, swapped, trials

if TYPE_CHECKING:
    from parallel.trace.trace import Traced

DETERMINISTIC = ("torch.nn.", "torch.ao.nn.", "torchvision.", "timm.")
"""Packages whose modules draw random numbers whenever they can, so that one run shows it."""
IN_FLOAT32 = ("layer_norm", "group_norm", "rms_norm", "softmax", "log_softmax", "interpolate")
"""Functions that autocast computes in float32 on GPUs and not on CPUs, by name (torch's ATen/autocast_mode.h). In plans
it does so on CPUs, too."""


def layer_graph(traced: Traced, shape: tuple[int, ...], dtype: torch.dtype, autocast: torch.dtype | None) -> LayerGraph:
    """Return the layers of the graph of training. Parameters, buffers and random state stay as they are.

    Raises:
        ValueError: the model cannot run on ``shape``.
    """
    precision = torch.autocast("cpu", autocast, enabled=autocast is not None)
    casts: AbstractContextManager[Any] = nullcontext() if autocast is None else _GpuCasts()
    with torch.random.fork_rng(devices=[]), preserve_python_state(), torch.enable_grad(), precision, casts:
        attempts = trials(traced.training, shape, dtype, device=torch.device("cpu"), sides=())
        try:
            run = _run(traced.training, next(attempts))
        except Exception:  # data-dependent, or an operation without a fake version: the real run tells faults apart
            run = _run(traced.training, next(attempts))
    ranges = [*run.changed, *((min(positions), max(positions)) for positions in run.uses.values())]
    # What only training does stays with what it works on: evaluation goes around it and can send no more than training.
    common = {node.name for node in traced.evaluation.graph.nodes}
    ranges += [(k - 1, k) for k, layer in enumerate(run.layers) if layer.name not in common]
    classes = {path: type(submodule).__name__ for path, submodule in traced.model.named_modules()}
    return LayerGraph(tuple(run.layers), merged(ranges), classes, traced.graph.whole)


def _run(training: fx.GraphModule, trial: Trial) -> _LayerInterpreter:
    values = trial.values(training)
    recorder = OpRecorder({storage_of(tensor) for tensor in values.values()})
    interpreter = _LayerInterpreter(training, recorder)
    with swapped(training, values), trial.mode, recorder, saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
        interpreter.run(trial.example)
    return interpreter


class _GpuCasts(TorchFunctionMode):
    """Mode that computes ``IN_FLOAT32`` in float32, as autocast does on GPUs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in IN_FLOAT32:
            args, kwargs = tree_map_only(Tensor, _as_float32, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class _LayerInterpreter(fx.Interpreter):
    """Run a graph node by node and make a layer of each."""

    def __init__(self, training: fx.GraphModule, recorder: OpRecorder) -> None:
        super().__init__(training)
        self.extra_traceback = False
        self.layers: list[Layer] = []
        self.changed: list[tuple[int, int]] = []  # (layer, layer that changes memory which the first made)
        self.uses: dict[int, list[int]] = {}  # id of a parameter or buffer -> positions
        self._recorder = recorder
        self._training = training
        self._position = {node: k for k, node in enumerate(training.graph.nodes)}
        self._state = {node: _state(training, node) for node in training.graph.nodes}  # before others take its place
        # Weak: the data goes when its last use is done, but its address is not given away again during this run.
        self._makers: dict[StorageWeakRef, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        recorder, k, called = self._recorder, self._position[n], n.op == "call_module"
        state = self._state[n]
        recorder.begin()
        try:
            value = super().run_node(n)
        except Exception as error:
            where = f"module {n.target!r}" if called else f"{n.op} {n.name!r}"
            raise ValueError(f"the model does not run on the example input, at {where}: {error}") from error
        tensors = tensors_of(value)
        self.changed += [(self._makers[storage], k) for storage in recorder.written if storage in self._makers]
        for tensor in tensors:
            self._makers.setdefault(storage_of(tensor), k)
        last = max([k, *map(self._position.__getitem__, n.users)]) if n.op == "get_attr" else k
        for tensor in state:
            self.uses.setdefault(id(tensor), []).extend((k, last))
        params = [bytes_of(tensor) for tensor in state if isinstance(tensor, nn.Parameter)]
        self.layers.append(
            Layer(
                name=n.name,
                kind=_kind(self._training, n),
                inputs=tuple(argument.name for argument in n.all_input_nodes),
                module=str(n.target) if called else "",
                scope=str(n.target) if called else scope_of(n),
                output_bytes=sum(map(bytes_of, tensors)),
                param_bytes=sum(params),
                largest_param_bytes=max(params, default=0),
                flops=sum(op.flops for op in recorder.ops),
                differentiable=any(tensor.requires_grad for tensor in tensors),
                random=recorder.uses_rng or _may_draw(self._training, n),
                saved=tuple(recorder.saved.items()),
                ops=tuple(recorder.ops),
                output_storages=tuple(sorted(set(filter(None, map(recorder.numbered, tensors))))),
            )
        )
        return value


def _state(training: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """Return the parameters and buffers that a node uses, each once."""
    if node.op == "call_module":
        module = training.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        tensor = getattr(training.get_submodule(owner), name)
        return [tensor] if isinstance(tensor, Tensor) else []
    return []


def _kind(training: fx.GraphModule, node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return INPUT if node.op == "placeholder" else OUTPUT
    if node.op == "call_module":
        return type(training.get_submodule(str(node.target))).__name__
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return "get_attr" if node.op == "get_attr" else str(node.target)


def _may_draw(training: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a module may draw random numbers though it did not in one run."""
    if node.op != "call_module":
        return False
    module = training.get_submodule(str(node.target))
    # A class derived from a norm of torch, such as one that stays in evaluation, may run the forward of torch.
    code = (type(part).forward if isinstance(part, _NormBase) else type(part) for part in module.modules())
    return any(not each.__module__.startswith(DETERMINISTIC) for each in code)


def merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return disjoint and sorted ranges that forbid the same cuts; those of one position forbid none."""
    result: list[tuple[int, int]] = []
    for first, last in sorted((first, last) for first, last in ranges if first < last):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(last, result[-1][1]))
        else:
            result.append((first, last))
    return tuple(result)
