"""A check that a traced graph computes what its model computes: operation by operation, before a run uses it.

Both are run in training and in evaluation, without data where that can be: what is compared is every operation of torch
with its arguments, of which earlier values each tensor is, and what flows back to where. Runs that agree in this
compute the same numbers. A model that looks at its data is run on random tiles instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from parallel.trace.known_proxy import OtherPathError
from parallel.trace.op_recorder import NORMS, normed_without_data, storage_of, tensors_of, written_by
from parallel.trace.python_random import preserve_python_state, seed_python
from parallel.trace.tracer import scope_of, user_frames
from parallel.trace.without_data import Trial, preserve_module_state, state_of, swapped, trials

if TYPE_CHECKING:
    from parallel.trace.trace import Traced

SEED = 1911
_aten = torch.ops.aten
SILENT = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default)
"""They give what they take; whether anything flows back is compared separately."""


@dataclass(frozen=True)
class Difference:
    """The first place where a graph computes something else than its model: the modules whose forwards were at work
    there, "" for the model's own, and a text for the user."""

    paths: frozenset[str]
    text: str


def first_difference(traced: Traced, shape: tuple[int, ...], dtype: torch.dtype) -> Difference | None:
    """Return where the graphs of training and evaluation compute something else than the model, None where they do not.
    The model stays as it was.

    Args:
        shape: (n, ...) of a microbatch.

    Raises:
        ValueError: the model does not run on ``shape``.
    """
    for training in (True, False):
        graph = traced.training if training else traced.evaluation
        with preserve_module_state(traced.model), torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
            traced.model.train(training)
            for trial in trials(traced.model, shape, dtype, fill=torch.rand):
                try:
                    ours = _run(traced.model, traced.model, trial)
                except Exception as fault:
                    last = fault
                    continue
                try:
                    theirs = _run(traced.model, graph, trial)
                except OtherPathError as fault:
                    last = fault
                    continue
                difference = _compare(traced.model, ours, theirs, "training" if training else "evaluation")
                if difference:
                    return difference
                break
            else:
                raise ValueError(_does_not_run(traced.model, shape, last)) from last
    return None


@dataclass
class _Run:
    operations: list[Any]  # each with its arguments, tensors by what made them
    origins: list[tuple[str, str]]  # (module, line) that each operation is from
    ends: list[Any]  # which of these came out, and autograd's functions behind them


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A record of the operations of one run; ``names`` says what tensors are called, ``origin`` what is at work."""

    def __init__(
        self, names: Sequence[tuple[Tensor, Any]], origin: Callable[[], tuple[str, str]], *, fake: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: Any = WeakIdKeyDictionary()
        for tensor, name in names:
            self.known[tensor] = name
        self.operations: list[Any] = []
        self.origins: list[tuple[str, str]] = []
        self._origin, self._fake = origin, fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        value = normed_without_data(func, args[0]) if self._fake and func in NORMS else func(*args, **kwargs)
        if func.namespace == "prim":  # asks where a tensor lies
            return value
        made = tensors_of(value)
        if func in SILENT and given and given[0] in self.known:
            self.known[made[0]] = self.known[given[0]]
        elif any(tensor in self.known for tensor in given) or torch.Tag.nondeterministic_seeded in func.tags:
            number = len(self.operations)
            written = written_by(func, args, kwargs)
            # A sum in place is the sum, unless who holds the memory by another name looks at it afterwards.
            name = func._schema.name.removesuffix("_") if written else func._schema.name
            self.operations.append((name, tree_map(self.name, args), tree_map(self.name, kwargs)))
            self.origins.append(self._origin())
            for storage in {storage_of(tensor) for tensor in written}:
                for tensor in list(self.known):
                    if storage_of(tensor) == storage:
                        self.known[tensor] = (number, "changed", self.known[tensor])
            for k, tensor in enumerate(made):
                if tensor not in self.known or any(tensor is changed for changed in written):
                    self.known[tensor] = (number, k)
        return value

    def name(self, value: Any) -> Any:
        """Return what an argument is: which tensor, or which number. What depends on no tensor is known by its form."""
        if isinstance(value, Tensor):
            return self.known.get(value, ("constant", tuple(value.shape), str(value.dtype)))
        return str(value) if isinstance(value, (torch.device, torch.dtype)) else repr(value)


def _run(model: nn.Module, runner: nn.Module, trial: Trial) -> _Run:
    """Return what ``runner``, the model or a graph of it, computes of the tiles."""
    # Made for each run: a layer may look at what the run before has counted in its buffers.
    values = trial.values(model)
    paths = {id(submodule): path for path, submodule in model.named_modules()}
    names: list[tuple[Tensor, Any]] = [(trial.example, "input")]
    names += [(values[id(tensor)], name) for name, tensor in state_of(model).items()]
    compute: Callable[[Tensor], Any] = runner
    origin: Callable[[], tuple[str, str]] = functools.partial(_origin, paths)
    if isinstance(runner, fx.GraphModule):
        interpreter = _Interpreter(runner)
        interpreter.extra_traceback = False
        compute, origin = interpreter.run, lambda: interpreter.origin
    recorder = _Recorder(names, origin, fake=trial.fake is not None)
    torch.manual_seed(SEED)
    with preserve_python_state():
        seed_python(SEED)
        with swapped(runner, values), trial.mode, recorder:
            output = compute(trial.example)
    leaves = tensors_of(output)
    ends = [recorder.name(leaf) for leaf in leaves]
    return _Run(recorder.operations, recorder.origins, [*ends, *_backward(leaves, {id(t): n for t, n in names})])


class _Interpreter(fx.Interpreter):
    """Run a graph node by node; ``origin`` is (module, name) of the node at work."""

    origin = ("", "")

    def run_node(self, n: fx.Node) -> Any:
        self.origin = (scope_of(n), n.name)
        return super().run_node(n)


def _backward(outputs: list[Tensor], names: dict[int, Any]) -> list[Any]:
    """Return autograd's functions behind ``outputs``, nearest first, each with the numbers of those that follow."""
    numbers: dict[Any, int] = {}
    order: list[Any] = []

    def number(function: Any) -> int | None:
        if function is not None and function not in numbers:
            numbers[function] = len(order)
            order.append(function)
        return numbers.get(function)

    functions: list[Any] = [(number(output.grad_fn), output.requires_grad) for output in outputs]
    for function in order:  # grows meanwhile
        onward = tuple((number(following), k) for following, k in function.next_functions)
        leaf = getattr(function, "variable", None)
        functions.append((function.name(), onward, None if leaf is None else names.get(id(leaf), "constant")))
    return functions


def _compare(model: nn.Module, ours: _Run, theirs: _Run, mode: str) -> Difference | None:
    for k, (mine, other) in enumerate(zip_longest(ours.operations, theirs.operations)):
        if mine != other:
            origins = [run.origins[min(k, len(run.origins) - 1)] for run in (ours, theirs) if run.origins]
            did = [operation[0] if operation else "nothing more" for operation in (mine, other)]
            if did[0] == did[1]:
                did = [f"{name} of other values" for name in did]
            return _difference(model, origins, mode, f"the model computes {did[0]}, its graph {did[1]}")
    for mine, other in zip_longest(ours.ends, theirs.ends):
        if mine != other:
            return _difference(model, [("", "its end")], mode, f"the model gives {mine}, its graph {other}, where")
    return None


def _difference(model: nn.Module, origins: list[tuple[str, str]], mode: str, what: str) -> Difference:
    path, line = origins[0]
    return Difference(
        frozenset(path for path, _ in origins),
        f"{type(model).__name__} does not follow its own code when it is taken apart into layers: in {mode}, at module "
        f"{path or 'the model itself'!r} ({line}), {what}. Python code there that asks how it is run belongs in a "
        "submodule with a forward of its own, which then stays whole",
    )


def _does_not_run(model: nn.Module, shape: tuple[int, ...], fault: Exception) -> str:
    if "more than 1 value per channel" in str(fault):
        return (
            f"batch norm of {type(model).__name__} has one value per channel where microbatches are {shape}, and in "
            "training it needs more: let two tiles fall in each microbatch, with a --batch of at least twice "
            "--microbatches"
        )
    return f"the model does not run on tiles {shape}: {' '.join(str(fault).split())}"


def _origin(paths: dict[int, str]) -> tuple[str, str]:
    """Return (module, line of the user's code) that is at work: the innermost module that is not torch's."""
    innermost = ""
    for frame, line in user_frames():
        innermost = innermost or line
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and id(owner) in paths:
            return paths[id(owner)], innermost
    return "", innermost or "unknown"
