"""Transparency: every strategy gives the plain step over every transport, however it saves memory or shares a tile.

``test_engine.py`` has every schedule with every net. On simulated GPUs there is no race either, whether kernels and
messages run at once, as late as their order allows, or in between.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.training.engines import build_engine
from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.offload.copies import CudaCopies
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy
from tests.helpers.branched_nets import BRANCHED_NETS, steps_for
from tests.helpers.engine_runs import (
    CPU,
    SEED,
    SGD,
    assert_equal,
    assert_plain,
    net,
    on_gpus,
    on_threads,
    plain,
    plain_of,
    run,
    steps_of,
    strategy_for,
    train,
)
from tests.helpers.lanes import long_where
from tests.helpers.pairs import covering
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import ALL_NETS, NETS, pixel_loss

RANKS, M = 4, 8
STRIPS, COLUMNS, QUARTERS = TeamGrid(2, 1), TeamGrid(1, 2), TeamGrid(2, 2)
KEEP, BLOCK, BOXES = ActivationPolicy(), ActivationPolicy("block"), ActivationPolicy(stream=4)
POLICIES = {"keep": KEEP, "recompute": BLOCK, "host": ActivationPolicy(optimizer=True)}
OF_RANKS = POLICIES | {"parameters": ActivationPolicy(parameters=True)}
"""Those of ranks that are no team."""
HOLDERS = {
    "ddp": Strategy("ddp", RANKS, 1, M),
    "1f1b": Strategy("1f1b", RANKS, 2, M),
    "master": Strategy("master", RANKS, 2, M),
    "spatial": Strategy("spatial", RANKS, 1, M, grid=STRIPS),
}
CELLS = {
    f"{name}, zero {zero}, {how}": dataclasses.replace(strategy, zero=zero, policy=policy)
    for name, strategy in HOLDERS.items()
    for zero in (1, 2)
    for how, policy in (POLICIES if strategy.grid else OF_RANKS).items()
}


def pairwise(cells: dict[str, Strategy]) -> list[str]:
    """Return names of ``cells`` with every pair of strategy, stage and policy: no code depends on all three."""
    names = [*cells]
    return [names[k] for k in covering([tuple(name.split(", ")) for name in names])]


SHARDED = {f"fsdp, {how}": Strategy("fsdp", RANKS, 1, M, policy=POLICIES[how]) for how in ("keep", "host")}


def of_teams(
    schedule: str, grid: TeamGrid, depth: int = 2, groups: int = 1, m: int = 3, policy: ActivationPolicy = KEEP
) -> Strategy:
    depth = 1 if schedule == "spatial" else depth
    chunks = 2 if schedule == "interleaved" else 1
    return Strategy(schedule, groups * depth * grid.members, depth, m, chunks, grid=grid, policy=policy)


SPATIAL, PIPELINE = of_teams("spatial", STRIPS), of_teams("1f1b", STRIPS, policy=BOXES)
TEAMS = [
    ("skips", SPATIAL),
    ("skips", of_teams("spatial", QUARTERS)),
    ("skips", of_teams("1f1b", STRIPS)),
    ("skips", of_teams("interleaved", STRIPS)),
    ("skips", of_teams("master", COLUMNS)),
    ("skips", of_teams("bidirectional", STRIPS, 3)),
    ("skips", of_teams("spatial", STRIPS, policy=BLOCK)),
    ("skips", of_teams("1f1b", STRIPS, policy=ActivationPolicy("block", offload="overlap", smallest=0))),
    ("two-outputs", of_teams("mp-basic", STRIPS)),
    ("skips", PIPELINE),
    ("skips", of_teams("1f1b", COLUMNS, groups=2, policy=ActivationPolicy(stream=4, optimizer=True))),
]
MORE_TEAMS = [
    ("skips", of_teams("spatial", COLUMNS, groups=2)),
    ("skips", of_teams("bidirectional", STRIPS, 3, policy=BOXES)),
    ("two-outputs", of_teams("mp-basic", STRIPS, policy=BOXES)),
    ("skips", of_teams("gpipe", QUARTERS)),
    ("skips", of_teams("1f1b", COLUMNS, policy=ActivationPolicy("stage"))),
    ("two-outputs", SPATIAL),
    ("two-outputs", of_teams("mast", QUARTERS, m=2)),
    *(("skips", of_teams(name, grid, policy=BOXES)) for name, grid in (
        ("gpipe", QUARTERS), ("interleaved", STRIPS), ("master", COLUMNS))),
    ("skips", of_teams("spatial", COLUMNS, groups=2, policy=BOXES)),
    ("two-outputs", of_teams("mast", QUARTERS, m=2, policy=BOXES)),
]  # fmt: skip
ZERO = (
    *("ddp, zero 1, keep", "ddp, zero 2, host", "ddp, zero 2, parameters"),
    *("1f1b, zero 2, recompute", "master, zero 2, keep"),
)
QUICK = [*TEAMS, *(("skips", CELLS[name]) for name in (*ZERO, "spatial, zero 1, keep"))]
THREADS = [*QUICK, *MORE_TEAMS, *(("skips", CELLS[name]) for name in pairwise(CELLS))]
THREADS = [case for number, case in enumerate(THREADS) if case not in THREADS[:number]]


@pytest.mark.parametrize(("net", "strategy"), long_where(THREADS, *THREADS[len(QUICK) :]), ids=str)
def test_threads(net: str, strategy: Strategy) -> None:
    assert_plain(net, strategy)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (of_teams("zero-bubble", STRIPS), "splits the backward pass"),
        (Strategy("spatial", 2, 1, 2), "say how"),
        (dataclasses.replace(of_teams("1f1b", STRIPS), schedule_csv=""), "schedule file is of single ranks"),
    ],
)
def test_what_teams_cannot_do_is_refused_by_name(strategy: Strategy, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _ = strategy.mesh


OTHERS = {
    "teams in boxes": ("skips", PIPELINE),
    "spatial in boxes": ("skips", of_teams("spatial", QUARTERS, policy=BOXES)),
    "branches": ("inception", Strategy("subgraph", RANKS, 1, 2, ways=2)),
}


def steps_of_other(name: str) -> list[Any]:
    net, strategy = OTHERS[name]
    ALL_NETS.update(BRANCHED_NETS) if net in BRANCHED_NETS else None
    return steps_for(net, [3, 2]) if net in BRANCHED_NETS else steps_of(strategy.m)


PROCESSES = {name: cell for name, cell in CELLS.items() if cell.policy is KEEP}
PROCESSES |= {name: CELLS[name] for name in ("ddp, zero 2, host", "1f1b, zero 1, host", "master, zero 1, parameters")}
PROCESSES |= {"ddp, zero 2, parameters": CELLS["ddp, zero 2, parameters"]}
PROCESSES |= {name: dataclasses.replace(HOLDERS[name], gradient_bytes=1 << 10) for name in ("ddp", "1f1b")}
"""What is recomputed or updated on the host changes no message."""


def all_cells(communicator: Communicator, sharded: bool) -> dict[str, Any]:
    """Every cell in one start of the ranks, because importing torch is what a start costs."""
    cells = {**PROCESSES, **SHARDED} if sharded else PROCESSES
    found: dict[str, Any] = {name: trained(communicator, each) for name, each in cells.items()}
    for name in OTHERS:
        found[name] = run(communicator, OTHERS[name][0], OTHERS[name][1], steps_of_other(name))
    return found


def trained(communicator: Communicator, strategy: Strategy) -> dict[str, Any]:
    """As ``run``, of every engine that a command may build."""
    model, loss = net("skips", torch.float64), NETS["skips"][1]
    form = {"batch": 2 * M, "tile": 12, "seed": SEED, "device": CPU}
    engine: Any = build_engine(strategy, model, loss, SGD, communicator, **form)
    losses, images = train(engine, steps_of(M)), steps_of(M)[0][0][0]
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    predicted = engine.predict(Microbatch(images if engine.predict_wants.images else None, None, tuple(images.shape)))
    return {"losses": losses, "gradients": gradients, "state": engine.state_dict(), "predicted": predicted}


@pytest.fixture(scope="module", params=["forked", "mpi"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, launcher = tmp_path_factory.mktemp("ranks"), request.param
    return run_on_ranks(RANKS, f"{__name__}:all_cells", folder, launcher == "forked", 280, launcher=launcher)


@pytest.mark.process
@pytest.mark.parametrize("name", [*PROCESSES, *OTHERS])
def test_processes(name: str, ranks: list[dict[str, Any]]) -> None:
    expected = plain_of(OTHERS[name][0], steps_of_other(name)) if name in OTHERS else plain("skips", M)
    assert_equal([rank[name] for rank in ranks], expected, torch.float64)


@pytest.mark.process
@pytest.mark.parametrize("ranks", ["forked"], indirect=True)
@pytest.mark.parametrize("name", SHARDED)
def test_processes_under_fsdp(name: str, ranks: list[dict[str, Any]]) -> None:
    """Over Gloo alone: fsdp is torch's own. ``test_fully_sharded.py`` has recomputation."""
    assert_equal([rank[name] for rank in ranks], plain("skips", M), torch.float64)


OFFLOAD, STREAM = ActivationPolicy(offload="overlap", smallest=0), ActivationPolicy(stream=8)
RESIDENT = ActivationPolicy(optimizer=True, parameters=True)
GPUS = {
    **{name: strategy_for(name, 2, m=3) for name in ("gpipe", "interleaved", "zero-bubble", "mast", "master")},
    "1f1b": strategy_for("1f1b", 3, m=3),
    "bidirectional": strategy_for("bidirectional", 2, m=4),
    "hybrid": strategy_for("1f1b", 2, groups=2, m=2),
    "hybrid of eight": strategy_for("bidirectional", 4, groups=2, m=2),
    "ddp": Strategy("ddp", 2, 1, 3),
    "spatial": of_teams("spatial", STRIPS, m=2),
    "teams in 1f1b": of_teams("1f1b", STRIPS, m=2),
    "teams in 1f1b of four stages": of_teams("1f1b", STRIPS, 4, m=4),
    "teams in master": of_teams("master", STRIPS, m=3),
    "zero 1, replicas": strategy_for("master", 2, m=2, zero=1),
    "offload": strategy_for("1f1b", 2, m=3, policy=OFFLOAD),
    "offload, ahead": strategy_for("gpipe", 2, m=3, policy=ActivationPolicy("none", (), "overlap", 20_000, 512)),
    "recompute blocks": strategy_for("gpipe", 2, m=3, policy=BLOCK),
    "recompute stages, offload": strategy_for("1f1b", 2, m=3, policy=ActivationPolicy("stage", (), "overlap", 0, 0)),
    "recompute blocks, offload": strategy_for("1f1b", 2, m=3, policy=ActivationPolicy("block", (), "overlap", 0, 0)),
    "all on the host": strategy_for(
        "bidirectional", 2, m=4, policy=ActivationPolicy("block", offload="overlap", smallest=0, parameters=True)
    ),
    "optimizer on the host": strategy_for("1f1b", 2, m=3, policy=POLICIES["host"]),
    "parameters on the host": strategy_for("1f1b", 2, m=3, policy=RESIDENT),
    "ddp, parameters on the host": Strategy("ddp", 2, 1, 3, policy=RESIDENT),
    "ddp, offload": Strategy("ddp", 2, 1, 3, policy=OFFLOAD),
    "ddp, streamed": Strategy("ddp", 2, 1, 2, policy=STREAM),
    "spatial, streamed": of_teams("spatial", STRIPS, m=2, policy=STREAM),
    "1f1b, streamed": Strategy("1f1b", 2, 2, 2, policy=STREAM),
    "spatial, streamed, maps on the device": of_teams(
        "spatial", STRIPS, m=2, policy=ActivationPolicy(stream=8, map_bytes=1 << 20)
    ),
}
SMALL = {"ddp": GPUS["ddp"], "1f1b": Strategy("1f1b", 4, 2, 4), "master": Strategy("master", 2, 2, 4)}
DIVIDED = {
    f"{name}, zero {zero}, {how}": dataclasses.replace(strategy, zero=zero, policy=policy)
    for name, strategy in (SMALL | {"spatial": GPUS["spatial"]}).items()
    for zero in (1, 2)
    for how, policy in (POLICIES if strategy.grid else OF_RANKS).items()
    if policy is not BLOCK
}
LATE = (
    *("1f1b", "zero-bubble", "master", "bidirectional", "ddp", "teams in 1f1b", "ddp, zero 2, keep"),
    *("ddp, zero 2, parameters", "zero 1, replicas", "recompute stages, offload", "parameters on the host"),
    *("offload, ahead", "all on the host"),
)
"""Most is found where all is as late as may be, and where each mechanism is once: the quick lane has little else."""
SOON = [*((name, 0) for name in LATE), ("1f1b", None), ("ddp", 1)]
ON_GPUS = [*SOON, *((name, int(name in LATE)) for name in GPUS), *((name, 0) for name in pairwise(DIVIDED))]
ON_GPUS += [(name, None) for name in ("zero-bubble", "teams in 1f1b", "offload, ahead", "spatial, streamed")]


@pytest.mark.parametrize(
    ("name", "late"), long_where(dict.fromkeys(ON_GPUS), *(case for case in ON_GPUS if case not in SOON))
)
def test_simulated_gpus(name: str, late: int | None) -> None:
    """The net draws in two stages. No slice is read before its sum is there, no bucket given out again before that."""
    strategy = (GPUS | DIVIDED)[name]
    ranks = on_gpus("skips", strategy, steps_of(strategy.m), late)
    assert_equal(ranks, plain("skips", strategy.m), torch.float64, tolerance=1e-12 if name in GPUS else None)


@pytest.mark.parametrize("late", long_where([0, None], None))
def test_complex_values_on_simulated_gpus(late: int | None) -> None:
    strategy = strategy_for("1f1b", 2, m=3)
    assert_equal(on_gpus("fourier", strategy, steps_of(3), late), plain("fourier", 3), torch.float64, tolerance=1e-12)


def sharing_a_norm() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.ReLU(), nn.Conv2d(4, 4, 1), norm, nn.Conv2d(4, 3, 1))


def test_a_norm_with_two_names_has_one_set_of_statistics_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those by its second name stayed as they were."""
    monkeypatch.setitem(ALL_NETS, "sharing a norm", (sharing_a_norm, pixel_loss))
    ranks = on_gpus("sharing a norm", strategy_for("gpipe", 2, m=2), steps_of(2))
    assert_equal(ranks, plain_of("sharing a norm", steps_of(2)), torch.float64)


def test_updates_after_every_microbatch_race_with_nothing() -> None:
    """As late as may be, the numbers are those of the CPU."""
    strategy = strategy_for("pipedream", 2, m=3)
    runs = on_gpus("skips", strategy, steps_of(3), 0), on_threads("skips", strategy, steps_of(3))
    found, expected = ([(r["losses"], r["gradients"], r["state"].get("model")) for r in ranks] for ranks in runs)
    torch.testing.assert_close(found, expected)


@pytest.mark.long
def test_maps_of_boxes_stay_on_the_device_while_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline, of which one rank has several microbatches under way."""
    moved, copied = [0], CudaCopies._copied

    def counted(copies: CudaCopies, direction: Any, source: Tensor, target: Tensor) -> Any:
        moved[-1] += source.nbytes
        return copied(copies, direction, source, target)

    monkeypatch.setattr(CudaCopies, "_copied", counted)
    for most in (0, 40_000, 1 << 20):  # those of one microbatch of two
        strategy = Strategy("1f1b", 2, 2, 2, policy=ActivationPolicy(stream=8, map_bytes=most))
        assert_equal(on_gpus("skips", strategy, steps_of(2), 0), plain("skips", 2), torch.float64, tolerance=1e-12)
        moved.append(0)
    all_moved, some, none, _ = moved
    assert all_moved > some > none == 0


SHARP = ("interleaved", "master", "bidirectional")
"""Whose receives and sums most easily come before what they depend on."""


MESSAGES = [
    name for name in GPUS if GPUS[name].policy == KEEP or name in ("recompute stages, offload", "1f1b, streamed")
]
"""What else is saved, and where, changes no message."""


@pytest.mark.parametrize("name", long_where(MESSAGES, *(name for name in MESSAGES if name not in SHARP)))
def test_any_rank_may_wait_for_its_device_at_any_time(name: str) -> None:
    """As where memory has to be freed: no receive and no sum that holds a device depends on what comes after it."""
    strategy = GPUS[name]
    ranks = on_gpus("skips", strategy, steps_of(strategy.m), sync_every=3)
    assert_equal(ranks, plain("skips", strategy.m), torch.float64, tolerance=1e-12)
