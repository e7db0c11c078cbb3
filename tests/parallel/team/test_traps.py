"""Traps of dividing a tile that others fell into. Each is tried twice: as it is, exact; and with the fault put in,
which the same comparison has to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.offload.rng import DRAWING
from parallel.space.cuts import Span
from parallel.space.rule import SAME, Step, Window
from parallel.space.team import Exchange, SpatialMesh, TeamGrid
from parallel.streaming import local_ops, read_region, read_window
from parallel.streaming.patch import Patch
from parallel.team import node_compiler, program
from parallel.team.convolution import HaloConvolution, sharded_convolution
from parallel.team.halo_exchange import BoundExchange, patch_of
from parallel.team.team_comm import TeamComm, Wait
from tests.helpers.team_error import team_error
from tests.helpers.team_operations import OPERATIONS, Call, Network, Together

EXACT, WRONG = 1e-12, 1e-7
SHAPE, GRID = (2, 2, 37, 29), TeamGrid(2, 1)
Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _plans_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges are kept for the process."""
    for name in ("exchange", "gathered"):
        monkeypatch.setattr(SpatialMesh, name, getattr(SpatialMesh, name).__wrapped__)


def error(network: nn.Module, grid: TeamGrid = GRID) -> float:
    """Of one pass; infinite where it cannot even be computed."""
    torch.manual_seed(0)
    for parameter in network.parameters():
        nn.init.normal_(parameter, 0.1, 0.5)
    try:
        return team_error(network.double(), SHAPE, grid, patience_s=1.0).largest
    except Exception:
        return float("inf")


def replaced(owner: Any, name: str, value: Any) -> Fault:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


def with_halos_of_sums(*values: Any, **named: Any) -> Step:
    return Step(*values, **named, **({"rules": (Window(3, 1, 1, 1, 1),) * 2} if named.get("sums") else {}))


def half_merged(parts: Sequence[Tensor]) -> Tensor:
    count, mean, variance = torch.stack(tuple(parts), 1)
    return torch.stack([count.sum(0), mean.mean(0), variance.mean(0)])


def without_far_owners(self: SpatialMesh, needs: Any, sides: Any, whole: Any = SpatialMesh.needed) -> Exchange:
    exchange = whole(self, needs, sides)
    near = (tuple(p for p in ps if abs(p.owner - m) <= 1) for m, ps in enumerate(exchange.pieces))
    return Exchange(exchange.needs, exchange.boxes, tuple(near), exchange.owned)


def without_corners(self: SpatialMesh, needs: Any, sides: Any, whole: Any = SpatialMesh.needed) -> Exchange:
    exchange = whole(self, needs, sides)
    columns = self.grid.columns

    def beside(one: int, other: int) -> bool:
        return one // columns == other // columns or one % columns == other % columns

    kept = (tuple(p for p in ps if beside(p.owner, m)) for m, ps in enumerate(exchange.pieces))
    return Exchange(exchange.needs, exchange.boxes, tuple(kept), exchange.owned)


def kept_gradients(own: TeamComm, exchange: BoundExchange, gradients: Any, like: Tensor) -> Wait:
    return lambda: [torch.zeros_like(like[part]) for _, part, _ in exchange.sends]


def naive_patch(exchange: Exchange, member: int, value: Any, made: Any, sides: Any, dims: Any) -> Patch:
    """Pads by how far what is needed leaves what there is."""
    return Patch(value, exchange.needs[member], exchange.boxes[member], made, sides, dims)


def around_the_part(self: Window, rows: Span, side: int) -> Span:
    """A halo of half the kernel around the part."""
    return Span(rows.start * self.stride - self.kernel // 2, rows.stop * self.stride + self.kernel // 2)


def padded_by_ones(
    work: HaloConvolution, x: Tensor, pads: Any, *operands: Any, whole: Any = HaloConvolution.forward
) -> Tensor:
    before, (rows, columns) = pads
    padded = F.pad(x, before or (columns, columns, rows, rows), value=1.0)
    y: Tensor = whole(work, padded, (None, (0, 0)), *operands)
    return y


TRAPS: dict[str, tuple[Callable[[], nn.Module], Fault, TeamGrid]] = {
    # MPI4DL detaches halos: what its neighbours made of a row never reaches who computed it.
    "gradients of halos are handed back": (
        OPERATIONS["convolution 3x3"].make, replaced(TeamComm, "send_halo_grads", kept_gradients), GRID),
    # MPI4DL's fused halos pad once: rows outside the image become norm and ReLU of something.
    "rows outside the image are zero at every layer": (
        Together, replaced(HaloConvolution, "forward", padded_by_ones), GRID),
    # Rows that were fetched are counted by their owner.
    "statistics are of owned rows": (
        OPERATIONS["group norm"].make, replaced(read_region, "Step", with_halos_of_sums), GRID),
    # MPI4DL's batch norm is of each part; torch's SyncBatchNorm weighed ranks alike.
    "statistics weigh uneven parts by their px": (
        OPERATIONS["batch norm"].make, replaced(node_compiler, "merged", half_merged), GRID),
    "the backward pass of a norm takes sums of all members": (
        OPERATIONS["batch norm"].make,
        replaced(TeamComm, "all_reduce_async", lambda _, value: lambda: [value]), GRID),
    "gradients of a gate are summed": (
        OPERATIONS["deviation over the image"].make,
        replaced(node_compiler, "all_reduce_sum", lambda comm, value: value), GRID),
    "gradients of moments are summed": (
        OPERATIONS["group norm"].make,
        replaced(node_compiler, "identity_fwd_all_reduce_bwd", lambda comm, value: value), GRID),
    # MPI4DL pads maxima by 0, which is the largest where all is negative.
    "maxima are padded by minus infinity": (
        lambda: Call(lambda x: F.max_pool2d(-x.abs() - 1, 3, 2, 1)),
        replaced(Patch, "padded", lambda self, fill=0.0, whole=Patch.padded: whole(self)), GRID),
    "means divide by the px that count": (
        OPERATIONS["mean pool, ceil, pads do not count"].make,
        replaced(local_ops, "_counting_rows", lambda rule, side, pads: Span(-rule.kernel, side + rule.kernel)), GRID),
    # PhysicsNeMo: 4 + 4 rows where there are 7.
    "the first needed row follows the stride": (
        OPERATIONS["convolution 3x3, stride 2, no pad"].make,
        replaced(Window, "need", around_the_part), GRID),
    "needed rows may lie wholly outside": (
        lambda: nn.Conv2d(4, 4, 1, padding=40), replaced(node_compiler, "patch_of", naive_patch), TeamGrid(3, 1)),
    "even 'same' kernels pad at the end": (
        OPERATIONS["convolution 4x4, 'same'"].make,
        replaced(read_window, "same_pads", lambda k, d: ((d * (k - 1) + 1) // 2, d * (k - 1) // 2)), GRID),
    # XLA's halos ended at the neighbour.
    "halos reach beyond the neighbour": (
        OPERATIONS["convolution, dilation 12"].make,
        replaced(SpatialMesh, "needed", without_far_owners), TeamGrid(4, 1)),
    # DistConv loses them where backward overlaps.
    "corners are fetched": (
        OPERATIONS["convolution 3x3"].make, replaced(SpatialMesh, "needed", without_corners), TeamGrid(2, 2)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("trap", TRAPS)
def test_exact_and_the_fault_is_seen(trap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, fault, grid = TRAPS[trap]
    assert error(Network(make(), 4), grid) <= EXACT
    fault(monkeypatch)
    assert error(Network(make(), 4), grid) > WRONG


def sums_of_squares(x: Tensor, over: tuple[int, ...]) -> Tensor:
    count = torch.tensor(float(x.numel() // x.mean(over).numel()))
    mean, squares = x.mean(over, keepdim=True), x.square().mean(over, keepdim=True)
    return torch.stack([count.expand(mean.shape), mean, squares - mean.square()]).double()


@pytest.mark.parametrize(("fault", "exact"), [(None, True), (sums_of_squares, False)])
def test_moments_do_not_cancel(fault: Any, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sums of squares in float32, at a mean of 1,000 deviations, the variance is left to chance."""
    if fault is not None:
        monkeypatch.setattr(node_compiler, "moments", fault)
    network = nn.Sequential(Call(lambda x: 1000 + x), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1))
    errors = team_error(network, SHAPE, GRID)
    assert (errors.statistics < 1e-4) == exact, errors


@pytest.mark.parametrize("held", [False, True])
def test_draws_under_way_do_not_wait_for_halos(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads share torch's generator: a lock held over a whole pass, halos among it, never ends."""
    run = program.NodeRun.run

    def locked(*arguments: Any) -> Any:
        with DRAWING:
            return run(*arguments)

    if held:
        monkeypatch.setattr(program.NodeRun, "run", locked)
    layers = nn.Sequential(nn.Dropout2d(0.3), nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.3))
    assert (error(Network(layers, 4)) <= EXACT) is not held


EDGE = SpatialMesh(GRID, (6, 2)).exchange((Window(3, 1, 1, 1, 1), SAME), (6, 2), (6, 2))
"""Of 6 x 2 px over two members: a row of halo each."""


def test_members_are_numbered_in_their_team() -> None:
    """TensorRT-LLM spoke to the rank of the group as if it were one of the world."""

    def rank(communicator: Communicator, _: None) -> list[float]:
        team = communicator.subgroup([3, 1])
        if team is None:
            return []
        own = torch.full((1, 1, 3, 2), float(communicator.rank))
        (halo,) = TeamComm(team).fetch(BoundExchange(EDGE, team.rank, (2, 3)), own)()
        return [float(halo.mean()), *map(float, halo.shape)]

    assert run_on_threads(4, rank, timeout_s=5) == [[], [3.0, 1, 1, 1, 2], [], [1.0, 1, 1, 1, 2]]


def test_what_is_sent_may_be_overwritten_at_once() -> None:
    """A ReLU in place, while its input is still on the way."""

    def rank(communicator: Communicator, _: None) -> float:
        own, member = torch.full((1, 1, 3, 2), 1.0 + communicator.rank), TeamComm(communicator)
        if communicator.rank:
            communicator.barrier()
        halos = member.fetch(BoundExchange(EDGE, member.member, (2, 3)), own)
        own.fill_(float("nan"))
        if not communicator.rank:
            communicator.barrier()
        return float(halos()[0].mean())

    assert run_on_threads(2, rank, timeout_s=5) == [2.0, 1.0]


def test_no_padded_copy_is_kept() -> None:
    """The backward pass of a convolution keeps this member's part and what it fetched: a padded copy doubled maps."""
    window = Window(3, 1, 1, 1, 1)
    exchange = SpatialMesh(TeamGrid(2, 1), (16, 8)).exchange((window, window), (16, 8), (16, 8))

    def rank(communicator: Communicator, _: None) -> int:
        member = TeamComm(communicator)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own, weight = torch.randn(1, 4, 8, 8, requires_grad=True), torch.randn(4, 4, 3, 3, requires_grad=True)
        made = exchange.owned[member.member]
        patch = patch_of(exchange, member.member, None, made, (16, 8), (2, 3))
        work = HaloConvolution(
            BoundExchange(exchange, member.member, (2, 3)), patch, (window, window), own.numel(), weight.numel()
        )
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            sharded_convolution(member, own, work, weight, None, 1)
        return sum(kept.values())

    own, halo, weight = 4 * 4 * 8 * 8, 4 * 4 * 8, 4 * 4 * 4 * 9
    assert run_on_threads(2, rank, timeout_s=5) == [own + halo + weight] * 2
