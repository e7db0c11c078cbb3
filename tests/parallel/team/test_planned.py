"""Messages of a team: in one order, beside computing; bytes sent, bytes that live and calls are those planned."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import parallel
from app.settings.optimization import OptimizerSettings
from app.training.engines import build_engine, build_optimizer
from benchmarks.out_of_core.problem import planner
from models.losses import PixelClassLoss, TileClassLoss
from models.registry import build_model
from parallel.build import assemble
from parallel.comm.communicator import Communicator, Work
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch
from parallel.offload.live_bytes import LiveBytes, not_counted
from parallel.plan.candidates import BOXES
from parallel.space.rule import Window
from parallel.space.team import Box, SpatialMesh, TeamGrid
from parallel.strategy import Strategy
from parallel.streaming.patch import cut_of, narrowed
from parallel.streaming.read_region import read_region
from parallel.team.convolution import HaloConvolution, sharded_convolution
from parallel.team.halo_exchange import BoundExchange, patch_of
from parallel.team.region_run import RegionRun
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import BoxedParts
from parallel.trace.trace import trace_as_it_runs
from tests.helpers.engine_runs import SGD
from tests.helpers.watched_comm import WatchedCommunicator

GIB = 2**30
BATCH = 2


def segments(model: str) -> bool:
    """Return whether targets of a model are masks."""
    return model.startswith("unet")


def team_engine(model: str, px: int, strategy: Strategy, communicator: Communicator) -> Engine:
    """AdamW, one tile a microbatch, in channels-last memory; what its making left behind is collected."""
    torch.manual_seed(0)
    net = build_model(model, classes=2).to(memory_format=torch.channels_last)
    loss, optimizer = PixelClassLoss() if segments(model) else TileClassLoss(), OptimizerSettings(lr=1e-3)
    form: Any = {"batch": strategy.m, "tile": px, "seed": 0, "device": torch.device("cpu")}
    engine = build_engine(strategy, net, loss, functools.partial(build_optimizer, optimizer), communicator, **form)
    gc.collect()
    assert isinstance(engine, Engine)
    return engine


def step(model: str, px: int, strategy: Strategy, communicator: Communicator, _: Any) -> tuple[int, int]:
    """(bytes of pieces sent, most bytes that live) of one member, in its second step; in boxes, beside the tile."""
    live = LiveBytes()
    with live:
        engine = team_engine(model, px, strategy, communicator)
        link = engine._work.link
        for side in (64, px):
            shape = (1, 3, side, side)
            with not_counted() if strategy.policy.stream else contextlib.nullcontext():
                targets = torch.zeros((1, side, side) if segments(model) else (1,), dtype=torch.int64)
                image = torch.randn(shape).contiguous(memory_format=torch.channels_last)
            live.peak_bytes = live.bytes
            before = link.sent_bytes
            engine.step([Microbatch(image, targets, shape) for _ in engine.share], 0, 0.0)
    engine.close()
    return link.sent_bytes - before, live.peak_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "px", "grid", "recompute", "within"),
    [
        ("unet_w4", 128, "2x1", "block", 0.08),
        ("unet_w4", 96, "1x2", "none", 0.08),
        ("torchvision:squeezenet1_1", 128, "2x1", "none", 0.08),
        ("tests.helpers.tiny_models:top_heavy", 64, "2x1", "none", 0.02),
    ],
)
def test_bytes_are_those_planned(model: str, px: int, grid: str, recompute: str, within: float) -> None:
    team = TeamGrid.parse(grid)
    strategy = Strategy("spatial", team.members, 1, 2, grid=team).under(recompute=recompute)
    plans = planner(model, px, 2, 2 * GIB, strategy.m)
    row = plans.forecast(strategy)
    members = run_on_threads(team.members, functools.partial(step, model, px, row.strategy), [None] * team.members)
    part = plans.stages.teams.part(team)
    planned = sum(halo.all_bytes * (1 + halo.back) for layer in part.traffic for halo in layer.halos)
    assert sum(sent for sent, _ in members) == strategy.m * planned
    assert max(row.peak_bytes) == pytest.approx(max(peak for _, peak in members), rel=within)


@pytest.mark.parametrize(
    ("model", "px", "grid", "box"),
    [
        pytest.param("resnet18", 256, "1x2", 128, marks=pytest.mark.long),
        pytest.param("unet_w4", 256, "2x1", 64, marks=pytest.mark.long),
        # Every member draws the numbers of the whole map, and keeps its own.
        ("tests.helpers.tiny_models:dropping_net", 192, "2x1", None),
        ("tests.helpers.tiny_models:dropping_net", 192, "2x2", None),
    ],
)
def test_bytes_in_boxes_and_of_draws_are_those_planned(model: str, px: int, grid: str, box: int | None) -> None:
    team = TeamGrid.parse(grid)
    strategy = Strategy("spatial", team.members, 1, BATCH, grid=team)
    row = planner(model, px, team.members, 2 * GIB, BATCH).forecast(
        strategy if box is None else strategy.under(stream=box)
    )
    members = run_on_threads(team.members, functools.partial(step, model, px, row.strategy), [None] * team.members)
    assert max(row.peak_bytes) == pytest.approx(max(peak for _, peak in members), rel=0.1)


@pytest.mark.parametrize("grid", [TeamGrid(2, 1), TeamGrid(2, 2), TeamGrid(1, 3)])
def test_members_hold_as_much_of_each_map_as_on_paper(grid: TeamGrid) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, dilation=2)
    )
    traced = trace_as_it_runs(network, (1, 3, 96, 96), torch.float32)
    nodes = list(traced.training.graph.nodes)
    region = read_region(traced.model, nodes, {nodes[0].name: torch.zeros(1, 3, 96, 96)})

    def held(communicator: Communicator, _: None) -> dict[str, tuple[int, int]]:
        run = RegionRun(region, BoxedParts(16), grid, TeamComm(communicator))
        held = run._exchange.held
        assert held.keys() == run.boxes.held.keys()
        paper.update(run.boxes.held)
        return {name: (rows.size, columns.size) for name, (rows, columns) in held.items()}

    paper: dict[str, tuple[int, int]] = {}
    members = run_on_threads(grid.members, held, [None] * grid.members)
    for name, sides in paper.items():
        assert sides == tuple(max(each[name][axis] for each in members) for axis in range(2)), name


def test_a_team_is_tried_in_boxes_where_its_parts_do_not_fit() -> None:
    plans = planner("resnet18", 1024, 2, 300 * 2**20, BATCH)
    row = plans.smallest_memory("spatial", 2, BOXES)
    assert row.fits, row
    assert row.strategy.grid == TeamGrid(2, 1)
    assert row.strategy.policy.stream is not None
    assert row.step_s is None
    assert plans.with_time(row).step_s


TRANSPORT = ("comm/thread_comm.py", "comm/objects.py")
"""In the place of Gloo's, which has no Python calls."""


def block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def calls_of_a_step(communicator: Communicator, strategy: Strategy) -> Counter[tuple[str, str]]:
    """Return the calls of a rank into ``parallel`` in its second step, by (file, function)."""
    torch.manual_seed(0)
    nine_layers = *block(3, 4), *block(4, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
    form: Any = {"shape": (1, 3, 32, 32), "batch": strategy.m, "device": torch.device("cpu")}
    engine = assemble(nn.Sequential(*nine_layers), F.cross_entropy, SGD, communicator, strategy, **form)
    root, calls = f"{Path(parallel.__file__).parent}/", Counter[tuple[str, str]]()

    def count(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls[frame.f_code.co_filename.removeprefix(root), frame.f_code.co_qualname] += 1

    for step in range(2):
        given = [Microbatch(torch.randn(1, 3, 32, 32), torch.tensor([i % 2]), (1, 3, 32, 32)) for i in engine.share]
        sys.setprofile(count if step else None)
        engine.step(given, step, 0.1)
        sys.setprofile(None)
    engine.close()
    return calls


TEAM = Strategy("spatial", 2, 1, 4, grid=TeamGrid(2, 1))


@pytest.mark.parametrize(
    ("strategy", "most", "files"),
    [(TEAM, 710, 23), (TEAM.under(stream=8), 5_700, 38), (Strategy("1f1b", 2, 2, 4), 370, 14)],
    ids=str,
)
def test_calls_of_a_step(strategy: Strategy, most: int, files: int) -> None:
    for calls in run_on_threads(2, calls_of_a_step, strategy):
        assert sum(count for (file, _), count in calls.items() if file not in TRANSPORT) <= most
        assert len({file for file, _ in calls}) <= files
        assert not [name for file, name in calls if file.startswith("space/") and "exchange" in name.lower()]


SIDES = (12, 12)


def noted(communicator: Communicator, note: Callable[[Any], None]) -> TeamComm:
    """Notes (source, target) of each message, and "wait" where a member waits for one."""

    def tell(name: str, *message: Any) -> None:
        if name in ("isend", "irecv"):
            ends = communicator.rank, message[1]
            note(ends if name == "isend" else ends[::-1])

    class Noted(WatchedCommunicator):
        def irecv(self, *message: Any) -> Work:
            return NotedWork(self.__getattr__("irecv")(*message), note)

    return TeamComm(Noted(communicator, tell))


class NotedWork:
    def __init__(self, work: Work, note: Callable[[Any], None]) -> None:
        self._work, self._note = work, note

    def wait(self) -> None:
        self._note("wait")
        self._work.wait()

    def done(self) -> bool:
        return self._work.done()


def left_waiting(orders: list[list[tuple[int, int]]]) -> int:
    """Return messages that never arrive where each member does one thing after the other, and a message only when both
    of its members have come to it."""
    orders = [list(order) for order in orders]
    while True:
        met = next((o[0] for o in orders if o and all(orders[m][:1] == [o[0]] for m in o[0])), None)
        if met is None:
            return sum(map(len, orders)) // 2
        for member in met:
            orders[member].pop(0)


@pytest.mark.parametrize("grid", [TeamGrid(2, 1), TeamGrid(2, 2), TeamGrid(3, 2)], ids=str)
def test_nobody_waits_in_a_circle_even_where_messages_go_one_by_one(grid: TeamGrid) -> None:
    rule = Window(5, 1, 1, 2, 2)
    exchange = SpatialMesh(grid, SIDES).exchange((rule, rule), SIDES, SIDES)

    def rank(communicator: Communicator, _: Any) -> list[tuple[int, int]]:
        order: list[Any] = []
        link = noted(communicator, order.append)
        whole = torch.arange(144.0).reshape(1, 1, *SIDES)
        box = exchange.owned[link.member]
        own = part(whole, box)
        bound = BoundExchange(exchange, link.member, (2, 3))
        halos = link.fetch(bound, own)()
        for piece, halo in zip(exchange.recvs[link.member], halos, strict=True):
            assert torch.equal(halo, part(whole, piece.box))
        back = link.send_halo_grads(bound, halos, own)()
        for (_, sent), arrived in zip(exchange.sends[link.member], back, strict=True):
            assert torch.equal(arrived, narrowed(own, (2, 3), cut_of(sent, box)))
        link.finish()
        return [each for each in order if each != "wait"]

    orders = run_on_threads(grid.members, rank)
    assert left_waiting(orders) == 0
    turned = [[*reversed(orders[0])], *orders[1:]]
    assert left_waiting(turned) > 0, "an order of one's own would be told"


def test_halos_travel_while_a_member_computes() -> None:
    rule, sides = Window(3, 1, 1, 1, 1), (24, 16)
    exchange = SpatialMesh(TeamGrid(2, 1), sides).exchange((rule, rule), sides, sides)
    torch.manual_seed(0)
    whole, weight = torch.randn(1, 4, *sides), torch.randn(4, 4, 3, 3)

    def rank(communicator: Communicator, _: Any) -> list[Any]:
        notes: list[Any] = []
        link, member = noted(communicator, notes.append), communicator.rank
        made, own = exchange.owned[member], part(whole, exchange.owned[member]).clone().requires_grad_()
        with Convolutions(notes), torch.autograd.set_multithreading_enabled(False):
            patch = patch_of(exchange, member, None, made, sides, (2, 3))
            work = HaloConvolution(
                BoundExchange(exchange, member, (2, 3)), patch, (rule, rule), own.numel(), weight.numel()
            )
            y = sharded_convolution(link, own, work, weight, None, 1)
            y.backward(part(torch.ones(1, 4, *sides), made))
        link.finish()
        return notes

    for member, notes in enumerate(run_on_threads(2, rank)):
        forward, back = notes[: notes.index("wait") + 1], notes[notes.index("wait") + 1 :]
        assert [note for note in forward if note != "wait"][-1] == ("convolution", 12), "its rows, before it waits"
        sent = back.index((member, 1 - member))
        assert ("convolution_backward", 12) in back[sent : back.index("wait")], "gradients of its rows, meanwhile"


class Convolutions(TorchDispatchMode):
    def __init__(self, notes: list[Any]) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), given: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("convolution", "convolution_backward"):
            self._notes.append((name, arguments[0].shape[2]))
        return function(*arguments, **(given or {}))


def part(whole: Tensor, box: Box) -> Tensor:
    return whole[:, :, slice(*box[0]), slice(*box[1])]
