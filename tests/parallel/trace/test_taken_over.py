"""Ranks that are threads of one process trace once: what others take over is what tracing their model would give."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.trace import trace_alone
from parallel.trace.taken_over import is_same, taken_over
from parallel.trace.trace import Traced, _program, trace
from tests.helpers.awkward_nets import SMALL
from tests.helpers.deciding_nets import DECIDING
from tests.helpers.small_nets import ALL_NETS

SHAPES = {**dict.fromkeys((*SMALL, *DECIDING), (4, 6)), **{kind: (2, 3, 12, 12) for kind, _ in ALL_NETS.values()}}


def of_today(traced: Traced) -> object:
    programs = [_program(traced.training), _program(traced.evaluation)]
    metas = [[node.meta for node in graph.graph.nodes] for graph in (traced.training, traced.evaluation)]
    whole = (traced.graph, traced.modes, traced.updated, traced.any_side, traced.training is traced.evaluation)
    return programs, metas, traced.training.code, traced.evaluation.code, whole


@pytest.mark.parametrize("kind", SHAPES)
def test_what_is_taken_over_is_what_would_be_traced(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    other = copy.deepcopy(model)
    given = trace(model, SHAPES[kind])
    taken = taken_over(given, other)
    if taken is None:  # something is set on its modules of which nobody knows whether it is the same
        assert kind not in [kind for kind, _ in ALL_NETS.values()]
        return
    assert of_today(taken) == of_today(trace(other, SHAPES[kind]))
    assert taken.model is other
    fresh = trace(other, SHAPES[kind])
    for mine, anew in ((taken.training, fresh.training), (taken.evaluation, fresh.evaluation)):
        assert held(mine) == held(anew)


def held(graph: nn.Module) -> dict[str, int]:
    """Every tensor by its name: those of the model that was traced last, and no copies."""
    named = (*graph.named_parameters(remove_duplicate=False), *graph.named_buffers(remove_duplicate=False))
    return {name: id(tensor) for name, tensor in named}


class Switched(nn.Module):
    """Takes the path that it is told to take."""

    def __init__(self, path: object = 0) -> None:
        super().__init__()
        self.path = path
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if self.path == 0 else self.b(x)


def changed(name: str) -> nn.Module:
    model = Switched()
    match name:
        case "number":
            model.path = 1
        case "nested":
            model.path = [{"a": (0, 1)}]
        case "another attribute":
            model.more = 0
        case "mode":
            model.b.eval()
        case "kind":
            model.b = nn.Identity()  # type: ignore[assignment]
        case "width":
            model.b = nn.Linear(6, 6, bias=False)
        case "type":
            model.b.double()
        case "frozen":
            model.b.weight.requires_grad_(False)
        case "tied":
            model.b.weight = model.a.weight
        case "shared":
            model.b = model.a
        case "hook":
            model.b.register_forward_hook(lambda *_: None)
        case "forward":
            model.b.forward = lambda x: x  # type: ignore[method-assign]
        case "unknown":
            model.path = object()
        case "partial":
            model.path = functools.partial(int, base=3)
    return model


CHANGES = ("number", "nested", "another attribute", "mode", "kind", "width", "type", "frozen", "tied", "shared", "hook")
CHANGES += ("forward", "unknown", "partial")


@pytest.mark.parametrize("name", CHANGES)
def test_models_that_differ_are_told_apart(name: str) -> None:
    assert is_same(Switched(), Switched())
    assert not is_same(changed(name), Switched())
    assert not is_same(Switched(), changed(name))
    assert taken_over(trace(Switched(), (2, 6)), changed(name)) is None


@pytest.mark.parametrize(("name", "value"), [("nested", [{"a": (0, 2)}]), ("partial", functools.partial(int, base=4))])
def test_what_lies_within_an_attribute_is_compared(name: str, value: object) -> None:
    assert is_same(changed(name), changed(name))
    assert not is_same(changed(name), Switched(value))


@pytest.mark.parametrize(("same", "traces"), [(True, 1), (False, 3)])
def test_threads_with_the_same_model_trace_once(monkeypatch: pytest.MonkeyPatch, same: bool, traces: int) -> None:
    traced_models, plain = [], trace_alone.trace_as_it_runs

    def counted(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Traced:
        traced_models.append(module)
        return plain(module, shape, dtype)

    monkeypatch.setattr(trace_alone, "trace_as_it_runs", counted)

    def rank(communicator: Communicator, _: object) -> Traced:
        model = Switched(0 if same else communicator.rank)
        traced = trace_alone.trace_alone(model, (2, 6), communicator)
        assert traced.model is model
        return traced

    found = run_on_threads(3, rank, timeout_s=60)
    assert len(traced_models) == traces
    paths = [[str(node.target) for node in one.training.graph.nodes if node.op == "call_module"] for one in found]
    assert paths == ([["a"]] * 3 if same else [["a"], ["b"], ["b"]])
    assert len({id(one.training) for one in found}) == 3
    assert not trace_alone._TRACED
    run_on_threads(1, rank, timeout_s=60)  # nothing is kept of a step that is over
    assert len(traced_models) == traces + 1


def test_threads_with_other_tiles_trace_anew() -> None:
    def rank(communicator: Communicator, _: object) -> int:
        return (
            trace_alone.trace_alone(Switched(), (2 + communicator.rank, 6), communicator).graph.layers[0].output_bytes
        )

    assert run_on_threads(2, rank, timeout_s=60) == [2 * 6 * 4, 3 * 6 * 4]
