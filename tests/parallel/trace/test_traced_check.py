"""What is traced wrongly, or decides by what a value is, is found, named, and kept whole or refused."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.exactness.odd import flow, values
from parallel.comm.thread_comm import LocalCommunicator
from parallel.graph.partition import partition_equal
from parallel.trace.trace import Traced, trace, trace_exclusively
from parallel.trace.traced_check import first_difference
from tests.helpers.small_nets import Made
from tests.parallel.trace.test_cut import ODD, ODD_SHAPE, assert_same, in_a_row, stages_of


class AsksHowItIsRun(nn.Module):
    """Computes something else while it is traced, as code does that knows of fx; or of the type of its values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        asked = {
            "type": type(x) is Tensor or "Fake" in type(x).__name__,
            "fx": not torch.fx._symbolic_trace.is_fx_tracing(),
        }
        if asked[self.how]:
            x = torch.tanh(self.b(x))
        return self.a(x)


@pytest.mark.parametrize("how", ["type", "fx"])
def test_a_module_that_is_traced_wrongly_stays_whole(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), AsksHowItIsRun(how), nn.Linear(6, 6))
    state = copy.deepcopy(model.state_dict())
    difference = first_difference(trace(model, (2, 6)), (2, 6), torch.float32)
    assert "1" in difference.paths
    assert "in training, at module '1'" in difference.text
    assert "test_traced_check.py:" in difference.text
    traced = trace_exclusively(model, (2, 6), LocalCommunicator())
    assert [layer.kind for layer in traced.graph.layers] == ["input", "Linear", "AsksHowItIsRun", "Linear", "output"]
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"AsksHowItIsRun does not follow .* in training.*test_traced_check.py:\d+"):
        trace_exclusively(AsksHowItIsRun(how), (2, 6), LocalCommunicator())


class ComputedAgain(nn.Module):
    """As its author asks for: a checkpoint in the model's own forward."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, classes, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=False)
        return self.c(torch.tanh(y))


@pytest.mark.parametrize("make", [*ODD, ComputedAgain])
def test_odd_models_agree_with_their_graphs(make: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make(3)
    state, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert first_difference(trace(model, ODD_SHAPE), ODD_SHAPE, torch.float32) is None
    assert model.training
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


def test_a_norm_that_counts_its_batches_agrees_with_its_graph() -> None:
    """It looks at its data: the model was run first, and its graph after it, on the same counter."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=None))
    assert first_difference(trace(model, (2, 3, 8, 8)), (2, 3, 8, 8), torch.float32) is None
    assert model[1].num_batches_tracked == 0


def test_models_of_large_tiles_agree_with_their_graphs_without_memory() -> None:
    """A batch of these tiles takes 24 GiB, and a map of its first layer 128."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2))
    shape = (8, 3, 16384, 16384)
    assert first_difference(trace(model, shape), shape, torch.float32) is None


def changed(traced: Traced, name: str, change: str) -> Traced:
    """``traced``, whose layer ``name`` in training takes another value, is left out, or lets nothing flow back."""
    graph = copy.deepcopy(traced.training.graph)
    node = next(node for node in graph.nodes if node.name == name)
    if change == "left out":
        node.replace_all_uses_with(node.args[0])
    elif change == "other argument":
        node.args = (node.args[0].args[0], *node.args[1:])
    else:
        with graph.inserting_after(node):
            detached = graph.call_method("detach", (node,))
        node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
    return dataclasses.replace(traced, training=fx.GraphModule(traced.model, graph))


@pytest.mark.parametrize("change", ["left out", "detached", "other argument"])
def test_what_a_graph_computes_differently_is_found(change: str) -> None:
    traced = trace(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), (2, 6))
    assert first_difference(changed(traced, "_2", change), (2, 6), torch.float32) is not None


def test_one_tile_where_batch_norm_needs_two_is_refused_by_name() -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))
    assert trace(model, (1, 3, 8, 8)).graph.by_name["_1"].output_bytes == 3 * 4  # a plan scales one tile
    trace_exclusively(model, (2, 3, 8, 8), LocalCommunicator())
    with pytest.raises(ValueError, match=r"one value per channel.*let two tiles fall in each microbatch"):
        trace_exclusively(model, (1, 3, 8, 8), LocalCommunicator())


class TwoNames(nn.Module):
    """What it adds in place shows under another name; the same sum as a new tensor would not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        before = y = self.a(x)
        y += x
        return self.b(torch.tanh(y)) + before


class UnderTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.second = nn.Sequential(nn.Linear(6, 6), self.first[1], nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


@pytest.mark.parametrize(
    ("make", "shape"), [(TwoNames, (3, 6)), (UnderTwoNames, (3, 6)), (lambda: values.Fourier(3), ODD_SHAPE)]
)
def test_what_shows_under_two_names_and_complex_values_are_traced_as_such(make: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make().double()
    state = copy.deepcopy(model.state_dict())
    plain = trace(model, shape, torch.float64)
    assert (first_difference(plain, shape, torch.float64) is None) == (make is not TwoNames)
    traced = trace_exclusively(model, shape, LocalCommunicator())
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert_same(traced, partition_equal(traced.graph, 2), model, torch.rand(shape, dtype=torch.float64))


@pytest.mark.parametrize("make", [*ODD, ComputedAgain])
def test_odd_models_in_stages_for_another_number_of_tiles(make: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make(3).double()
    for tiles in (1, 3):
        traced = trace(model, (tiles, *ODD_SHAPE[1:]), torch.float64)
        partition = partition_equal(traced.graph, 3)
        assert_same(traced, partition, model, torch.rand(4 - tiles, *ODD_SHAPE[1:], dtype=torch.float64) - 0.5)


class ByBatch(nn.Linear):
    """Decides by the number of tiles."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[0] > 1 else torch.relu(super().forward(x))


class ByWidth(nn.Module):
    """Decides by the width of its tiles, and would run on any."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(3, 3, 1), nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.shape[-1] > 10:
            x = x[..., ::2]
        return self.b(x)


def test_what_is_decided_by_the_number_of_tiles_stays_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), ByBatch(6, 6), nn.Linear(6, 6)).double()
    traced = trace(model, (2, 6), torch.float64)
    assert [layer.kind for layer in traced.graph.layers] == ["input", "Linear", "ByBatch", "Linear", "output"]
    for tiles in (1, 2, 3):
        example = torch.rand(tiles, 6, dtype=torch.float64) - 0.5
        assert_same(traced, partition_equal(traced.graph, 2), model, example)
    with pytest.raises(
        ValueError, match=r"ByBatch itself .* number of tiles in a microbatch.*test_traced_check.py:\d+"
    ):
        trace(ByBatch(6, 6), (2, 6))


def test_tiles_for_which_another_path_would_be_taken_are_refused() -> None:
    model = ByWidth()
    traced = trace(model, (2, 3, 8))
    stages = stages_of(traced, partition_equal(traced.graph, 2))
    with torch.no_grad():
        for shape in ((2, 3, 8), (1, 3, 8), (2, 3, 9)):
            example = torch.rand(shape)
            assert torch.equal(in_a_row(stages, example), model(example))
        with pytest.raises(ValueError, match=r"decides by the shape, .*test_traced_check.py:\d+, .*is False; got True"):
            in_a_row(stages, torch.rand(2, 3, 16))


def test_tiles_of_another_layout_are_refused_with_advice_for_it() -> None:
    model = Made(lambda module, x: module.a(x) if x.is_contiguous() else module.a(x.contiguous()), a=nn.Linear(6, 6))
    traced = trace(model, (4, 6))
    with pytest.raises(ValueError, match=r"shape, type or device .*py:\d+, .*is True; got False: put what decides"):
        traced.training(torch.rand(6, 4).T)


def test_a_decision_by_data_is_refused_and_wrapping_it_as_advised_works() -> None:
    torch.manual_seed(0)
    bare = flow.BranchesOnData(3)
    with pytest.raises(
        ValueError, match=r"BranchesOnData itself .*values of tensors. Where: forward, .*py:\d+.*submodule"
    ):
        trace(bare, ODD_SHAPE)
    model = flow.branch_inside(3).double()
    traced = trace(model, ODD_SHAPE, torch.float64)
    for stages in (2, 4):
        for offset in (0, 1):
            example = torch.rand(ODD_SHAPE, dtype=torch.float64) - offset
            assert_same(traced, partition_equal(traced.graph, stages), model, example)
    traced = trace(nn.Sequential(bare), ODD_SHAPE)
    with pytest.raises(
        ValueError, match=r"1 to 1 stages; got 2.* 0 \(BranchesOnData\): .*values of tensors, at forward, .*py:\d+"
    ):
        partition_equal(traced.graph, 2)
