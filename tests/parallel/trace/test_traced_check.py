"""What is traced wrongly, or decides by what a value is, is found, named, and kept whole or refused."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, fx, nn

from parallel.comm.thread_comm import LocalCommunicator
from parallel.graph.partition import partition_equal
from parallel.trace.trace import Traced, trace, trace_exclusively
from parallel.trace.traced_check import first_difference
from tests.helpers.awkward_nets import SMALL, Linears
from tests.helpers.deciding_nets import DECIDING, ByBatch, ByWidth, Gated, OfWaves, Unpacks
from tests.parallel.trace.test_cut import assert_same, in_a_row, stages_of


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


@pytest.mark.parametrize("kind", [*SMALL, *DECIDING])
def test_small_models_agree_with_their_graphs(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    state, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert first_difference(trace(model, (4, 6)), (4, 6), torch.float32) is None
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


class TwoNames(Linears):
    """What it adds in place shows under another name; the same sum as a new tensor would not."""

    layers = "ab"

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


@pytest.mark.parametrize(("kind", "stages"), [(TwoNames, 2), (UnderTwoNames, 2), (OfWaves, 1)])
def test_what_shows_under_two_names_and_complex_values_are_traced_as_such(kind: type[nn.Module], stages: int) -> None:
    torch.manual_seed(0)
    model = kind().double()
    state = copy.deepcopy(model.state_dict())
    plain = trace(model, (3, 6), torch.float64)
    assert (first_difference(plain, (3, 6), torch.float64) is None) == (kind is not TwoNames)
    traced = trace_exclusively(model, (3, 6), LocalCommunicator())
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert_same(traced, partition_equal(traced.graph, stages), model, torch.rand(3, 6, dtype=torch.float64))


@pytest.mark.parametrize("kind", DECIDING)
def test_deciding_models_in_stages(kind: type[nn.Module]) -> None:
    """Also for another number of tiles than was traced."""
    torch.manual_seed(0)
    model = kind().double()
    for tiles in (1, 3) if kind is not Unpacks else (3,):
        traced = trace(model, (tiles, 6), torch.float64)
        partition = partition_equal(traced.graph, 4)
        for run in (1, 3) if kind.__name__ != "FrozenTrunk" else (3,):  # batch norm needs two
            assert_same(traced, partition, model, torch.rand(run, 6, dtype=torch.float64) - 0.5)


def test_what_is_decided_by_the_number_of_tiles_stays_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), ByBatch(), nn.Linear(6, 6)).double()
    traced = trace(model, (2, 6), torch.float64)
    assert [layer.kind for layer in traced.graph.layers] == ["input", "Linear", "ByBatch", "Linear", "output"]
    for tiles in (1, 2, 3):
        example = torch.rand(tiles, 6, dtype=torch.float64) - 0.5
        assert_same(traced, partition_equal(traced.graph, 2), model, example)
    with pytest.raises(ValueError, match=r"ByBatch itself .* number of tiles in a microbatch.*deciding_nets.py:\d+"):
        trace(ByBatch(), (2, 6))


def test_tiles_for_which_another_path_would_be_taken_are_refused() -> None:
    model = ByWidth()
    traced = trace(model, (2, 3, 8))
    stages = stages_of(traced, partition_equal(traced.graph, 2))
    with torch.no_grad():
        for shape in ((2, 3, 8), (1, 3, 8), (2, 3, 9)):
            example = torch.rand(shape)
            assert torch.equal(in_a_row(stages, example), model(example))
        with pytest.raises(ValueError, match=r"decides by the shape .*deciding_nets.py:\d+, .*is False; got True"):
            in_a_row(stages, torch.rand(2, 3, 16))


def test_a_decision_by_data_is_refused_and_wrapping_it_as_advised_works() -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"Gated itself .*values of tensors. Where: forward, .*py:\d+.*submodule"):
        trace(Gated(wrapped=False), (2, 6))
    model = Gated(wrapped=True).double()
    traced = trace(model, (2, 6), torch.float64)
    for stages in (2, 4):
        for offset in (0, 1):
            example = torch.rand(2, 6, dtype=torch.float64) - offset
            assert_same(traced, partition_equal(traced.graph, stages), model, example)
    traced = trace(nn.Sequential(Gated(wrapped=False)), (2, 6))
    with pytest.raises(
        ValueError, match=r"1 to 1 stages; got 2.* 0 \(Gated\): .*values of tensors, at forward, .*py:\d+"
    ):
        partition_equal(traced.graph, 2)
