from __future__ import annotations

import functools

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from models.amoebanet import AmoebaNet, FactorizedReduction, NormalCell, ReductionCell
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Microbatch
from parallel.graph.partition import partition_at
from parallel.strategy import Strategy
from parallel.trace.trace import trace
from tests.helpers.models import parameter_count
from tests.helpers.plain_step import TOLERANCE, largest_error, plain_run
from tests.helpers.small_nets import drawn_once


@pytest.mark.parametrize(
    ("normal_cells", "filters", "published"),
    [(18, 208, "81.5M"), (18, 416, "319.0M"), pytest.param(36, 544, "1.06B", marks=pytest.mark.long)],
)
def test_parameter_counts_are_those_of_torchgpipes_memory_benchmark(
    normal_cells: int, filters: int, published: str
) -> None:
    with torch.device("meta"):
        count = parameter_count(AmoebaNet(normal_cells, filters, classes=1000))
    assert published == (f"{count / 1e6:.1f}M" if count < 1e9 else f"{count / 1e9:.2f}B")


@pytest.mark.parametrize("normal_cells", [3, 9])
def test_a_third_of_the_normal_cells_stands_at_each_resolution(normal_cells: int) -> None:
    letters = "".join(type(cell).__name__[0] for cell in AmoebaNet(normal_cells, 8, classes=2).cells)
    third = "N" * (normal_cells // 3)
    assert letters == f"RR{third}R{third}R{third}"


def test_each_cell_is_given_what_the_last_two_gave() -> None:
    model, given = AmoebaNet(3, 8, classes=2).eval(), []
    for cell in model.cells:
        cell.register_forward_hook(lambda _, inputs, output: given.append((*inputs, output)))
    model(torch.rand(1, 3, 32, 32))
    (stem, also_stem, _), *_ = given
    assert stem is also_stem
    made = [stem, stem, *(output for _, _, output in given)]
    assert all(last is made[k + 1] and before is made[k] for k, (last, before, _) in enumerate(given))


def test_every_parameter_of_a_small_one_gets_a_gradient() -> None:
    torch.manual_seed(0)
    model = AmoebaNet(3, 16, classes=3)
    F.cross_entropy(model(torch.rand(2, 3, 64, 64)), torch.tensor([0, 2])).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.count_nonzero()]
    assert without == []


def test_steps_on_one_batch_lower_its_loss() -> None:
    torch.manual_seed(0)
    model, images, labels = AmoebaNet(3, 16, classes=2), torch.rand(4, 3, 64, 64), torch.tensor([0, 1, 1, 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("size", [(1, 1), (33, 47), (64, 100), (129, 65)])
def test_any_tile_size_gives_one_row_of_logits_per_tile(size: tuple[int, int]) -> None:
    assert AmoebaNet(3, 8, classes=3).eval()(torch.rand(2, 3, *size)).shape == (2, 3)


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 2)])
def test_reduction_halves_and_rounds_up_and_the_next_cell_fits_its_second_input(size: tuple[int, int]) -> None:
    half = tuple(-(-side // 2) for side in size)
    x = torch.rand(2, 6, *size)
    reduced = ReductionCell(6, 6, 8, False, "batch").eval()(x, x)
    assert reduced.shape == (2, 24, *half)
    assert NormalCell(24, 6, 8, True, "batch").eval()(reduced, x).shape == (2, 32, *half)


def test_factorized_reduction_looks_at_both_diagonal_neighbours() -> None:
    reduction = FactorizedReduction(1, 2, "batch")
    reduction.norm = nn.Identity()
    nn.init.ones_(reduction.even.weight)
    nn.init.ones_(reduction.odd.weight)
    x = torch.arange(1.0, 16.0).reshape(1, 1, 3, 5)
    even, odd = reduction(x)[0]
    assert even.tolist() == [[1, 3, 5], [11, 13, 15]]
    assert odd.tolist() == [[7, 9, 0], [0, 0, 0]]


def test_between_any_two_cells_two_values_pass() -> None:
    with torch.device("meta"):
        model = AmoebaNet(3, 8, classes=2)
    graph = trace(model, (1, 3, 64, 64)).graph
    cuts = [f"cells.{k}" for k in range(1, len(model.cells))]
    crossing = [len(partition_at(graph, [cut]).edges) for cut in cuts]
    assert crossing == [2] * len(cuts)


SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def small() -> nn.Module:
    return drawn_once("amoebanet", 3, lambda: AmoebaNet(3, 16, classes=3).double())


def two_stages(communicator: Communicator, batch: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    engine = assemble(
        small(),
        F.cross_entropy,
        SGD,
        communicator,
        Strategy("1f1b", 2, 2, len(batch)),
        shape=tuple(batch[0][0].shape),
        batch=sum(len(images) for images, _ in batch),
        device=torch.device("cpu"),
        seed=11,
    )
    engine.step([Microbatch(images, labels, tuple(images.shape)) for images, labels in batch], 0, 0.05)
    return engine.gradients()


@pytest.mark.long
def test_two_stages_give_the_gradients_of_the_plain_step() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 2, 3, 65, 64, generator=generator, dtype=torch.float64)
    batch = list(zip(images, torch.randint(3, (3, 2), generator=generator), strict=True))
    plain = plain_run(small(), F.cross_entropy, SGD, [batch], seed=11, lr=0.05)
    first, second = run_on_threads(2, lambda communicator, _: two_stages(communicator, batch), timeout_s=60)
    assert first.keys() & second.keys() == set()
    assert largest_error(plain.gradients, first | second) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize(("normal_cells", "filters"), [(0, 64), (4, 64), (6, 7)])
def test_sizes_that_cannot_be_built_are_refused(normal_cells: int, filters: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 3.*got L {normal_cells}, D {filters}: use L [36], D"):
        AmoebaNet(normal_cells, filters, classes=2)
