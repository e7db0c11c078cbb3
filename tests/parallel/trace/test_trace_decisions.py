"""Models whose Python code asks what a value is: traced as they run, and refused where a trace would not hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel.graph.partition import partition_equal
from parallel.trace.trace import trace
from tests.helpers.deciding_nets import DECIDING, ByBatch, ByWidth, Gated, OfWaves, Unpacks
from tests.parallel.trace.test_cut import assert_same, in_a_row, stages_of


@pytest.mark.parametrize("kind", DECIDING)
def test_deciding_models_in_stages(kind: type[nn.Module]) -> None:
    """Also for another number of tiles than was traced."""
    torch.manual_seed(0)
    model = kind().double()
    for tiles in (1, 3) if kind is not Unpacks else (3,):
        traced = trace(model, (tiles, 6), torch.float64)
        for stages in (2, 4):
            partition = partition_equal(traced.graph, stages)
            assert_same(traced, partition, model, torch.rand(3, 6, dtype=torch.float64) - 0.5)
            if kind.__name__ != "FrozenTrunk":  # batch norm needs two
                assert_same(traced, partition, model, torch.rand(1, 6, dtype=torch.float64) - 0.5)


def test_complex_values_within_a_stage() -> None:
    torch.manual_seed(0)
    model = OfWaves().double()
    traced = trace(model, (2, 6), torch.float64)
    assert_same(traced, partition_equal(traced.graph, 1), model, torch.rand(2, 6, dtype=torch.float64))


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
    with pytest.raises(
        ValueError, match=r"Gated itself .*values of tensors. Where: forward, .*py:\d+. Move .*submodule"
    ):
        trace(Gated(wrapped=False), (2, 6))
    model = Gated(wrapped=True).double()
    traced = trace(model, (2, 6), torch.float64)
    for stages in (2, 4):
        for offset in (0, 1):
            example = torch.rand(2, 6, dtype=torch.float64) - offset
            assert_same(traced, partition_equal(traced.graph, stages), model, example)


def test_too_few_places_for_cuts_are_explained_by_what_stays_whole() -> None:
    traced = trace(nn.Sequential(Gated(wrapped=False)), (2, 6))
    with pytest.raises(
        ValueError, match=r"1 to 1 stages; got 2.* 0 \(Gated\): .*values of tensors, at forward, .*py:\d+"
    ):
        partition_equal(traced.graph, 2)
