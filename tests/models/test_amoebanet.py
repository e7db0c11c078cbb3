"""AmoebaNet-D: its cells, what each is given, what passes between two of them."""

import pytest
import torch
import torch.fx
from torch import nn
from torch.nn import functional as F

from models.amoebanet import AmoebaNet, FactorizedReduction, NormalCell, ReductionCell
from parallel.graph.partition import partition_at
from parallel.trace.trace import trace


@pytest.mark.parametrize("normal_cells", [3, 9])
def test_a_third_of_the_normal_cells_stands_at_each_resolution(normal_cells):
    letters = "".join(type(cell).__name__[0] for cell in AmoebaNet(normal_cells, 8, classes=2).cells)
    third = "N" * (normal_cells // 3)
    assert letters == f"RR{third}R{third}R{third}"


def test_each_cell_is_given_what_the_last_two_gave():
    model, given = AmoebaNet(3, 8, classes=2).eval(), []
    for cell in model.cells:
        cell.register_forward_hook(lambda _, inputs, output: given.append((*inputs, output)))
    model(torch.rand(1, 3, 32, 32))
    (stem, also_stem, _), *_ = given
    assert stem is also_stem
    made = [stem, stem, *(output for _, _, output in given)]
    assert all(last is made[k + 1] and before is made[k] for k, (last, before, _) in enumerate(given))


def test_every_parameter_of_a_small_one_gets_a_gradient():
    torch.manual_seed(0)
    model = AmoebaNet(3, 16, classes=3)
    F.cross_entropy(model(torch.rand(2, 3, 64, 64)), torch.tensor([0, 2])).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.count_nonzero()]
    assert without == []


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 2)])
def test_reduction_halves_and_rounds_up_and_the_next_cell_fits_its_second_input(size):
    half = tuple(-(-side // 2) for side in size)
    x = torch.rand(2, 6, *size)
    reduced = ReductionCell(6, 6, 8, False, "batch").eval()(x, x)
    assert reduced.shape == (2, 24, *half)
    assert NormalCell(24, 6, 8, True, "batch").eval()(reduced, x).shape == (2, 32, *half)


def test_factorized_reduction_looks_at_both_diagonal_neighbours():
    reduction = FactorizedReduction(1, 2, "batch")
    reduction.norm = nn.Identity()
    nn.init.ones_(reduction.even.weight)
    nn.init.ones_(reduction.odd.weight)
    x = torch.arange(1.0, 16.0).reshape(1, 1, 3, 5)
    even, odd = reduction(x)[0]
    assert even.tolist() == [[1, 3, 5], [11, 13, 15]]
    assert odd.tolist() == [[7, 9, 0], [0, 0, 0]]


def test_between_any_two_cells_two_values_pass():
    with torch.device("meta"):
        model = AmoebaNet(3, 8, classes=2)
    graph = trace(model, (1, 3, 64, 64)).graph
    cuts = [f"cells.{k}" for k in range(1, len(model.cells))]
    crossing = [len(partition_at(graph, [cut]).edges) for cut in cuts]
    assert crossing == [2] * len(cuts)
