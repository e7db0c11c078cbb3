"""ZeRO stages 1 to 3 give the plain step: every kind of holders, every transport, every way of saving memory."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from app.planning.workload import with_loss
from app.training.engines import build_engine
from models.losses import TileClassLoss
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Microbatch, NonFiniteLoss, TrainingEngine
from parallel.memory.policy import ActivationPolicy
from parallel.memory.rank_bytes import rank_bytes
from parallel.memory.stage_memory import StageMemory
from parallel.offload.live_bytes import LiveBytes
from parallel.space.team import Grid
from parallel.strategy import Strategy
from parallel.trace.trace import trace
from tests.helpers.engine_runs import CPU, LR, SEED, SGD, assert_equal, net, on_gpus, plain, steps_of, train
from tests.helpers.plain_step import Batch, largest_error, plain_run
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import NETS, batch_of

RANKS, M = 4, 8
# A large epsilon: without, Adam's first updates are signs of gradients, even of those that are rounding.
ADAM = functools.partial(torch.optim.AdamW, lr=LR, weight_decay=1e-2, eps=1e-3)
POLICIES = {
    "keep": ActivationPolicy(),
    "recompute": ActivationPolicy("block"),
    "host": ActivationPolicy(optimizer=True),
}
HOLDERS = {
    "ddp": Strategy("ddp", RANKS, 1, M),
    "1f1b": Strategy("1f1b", RANKS, 2, M),
    "master": Strategy("master", RANKS, 2, M),
    "spatial": Strategy("spatial", RANKS, 1, M, grid=Grid(2, 1)),
}


def cell(name: str, zero: int, saving: str) -> Strategy:
    return dataclasses.replace(HOLDERS[name], policy=POLICIES[saving], zero=zero)


CELLS = {
    f"{name}, zero {zero}, {how}": cell(name, zero, how) for name in HOLDERS for zero in (1, 2) for how in POLICIES
}
SHARDED = {f"fsdp, {how}": Strategy("fsdp", RANKS, 1, M, policy=policy) for how, policy in POLICIES.items()}
QUICK = (
    "ddp, zero 1, keep",
    "ddp, zero 2, host",
    "1f1b, zero 2, recompute",
    "master, zero 2, keep",
    "spatial, zero 1, keep",
)
NAMED = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in CELLS]


def built(
    communicator: Communicator, strategy: Strategy, make: Any = SGD, batch: int = 2 * M, device: torch.device = CPU
) -> TrainingEngine:
    model, loss = net("skips", torch.float64), NETS["skips"][1]
    return build_engine(strategy, model, loss, make, communicator, batch=batch, tile=12, seed=SEED, device=device)


def trained(communicator: Communicator, strategy: Strategy, steps: list[Batch]) -> dict[str, Any]:
    engine: Any = built(communicator, strategy, batch=sum(len(images) for images, _ in steps[0]))
    losses = train(engine, steps)
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    images = steps[0][0][0]
    asks = engine.predict_wants.images
    predicted = engine.predict(Microbatch(images if asks else None, None, tuple(images.shape)))
    return {"losses": losses, "gradients": gradients, "state": engine.state_dict(), "predicted": predicted}


def on_threads(strategy: Strategy, steps: list[Batch]) -> list[dict[str, Any]]:
    return run_on_threads(strategy.ranks, lambda c, _: trained(c, strategy, steps), timeout_s=60)


@pytest.mark.parametrize("name", NAMED)
def test_threads(name: str) -> None:
    assert_equal(on_threads(CELLS[name], steps_of(M)), plain("skips", M), torch.float64)


GPUS = {
    "ddp": Strategy("ddp", 2, 1, 3),
    "1f1b": Strategy("1f1b", 4, 2, 4),
    "master": Strategy("master", 2, 2, 4),
    "spatial": Strategy("spatial", 2, 1, 2, grid=Grid(2, 1)),
}
LATE = [
    pytest.param(name, zero, how, marks=() if (name, zero, how) == ("ddp", 2, "keep") else pytest.mark.long)
    for name in GPUS
    for zero in (1, 2)
    for how in POLICIES
]


@pytest.mark.parametrize(("name", "zero", "how"), LATE)
def test_simulated_gpus(name: str, zero: int, how: str) -> None:
    """As late as may be: no slice is read before its sum is there, no bucket given out again before that."""
    strategy = dataclasses.replace(GPUS[name], zero=zero, policy=POLICIES[how])
    ranks = on_gpus("skips", strategy, steps_of(strategy.m), 0)
    assert_equal(ranks, plain("skips", strategy.m), torch.float64)


# On processes, started once for all cells


def all_cells(communicator: Communicator, sharded: bool) -> dict[str, Any]:
    cells = {**CELLS, **SHARDED} if sharded else CELLS
    found: dict[str, Any] = {name: trained(communicator, each, steps_of(M)) for name, each in cells.items()}
    return found | {"passed on": passed_on(communicator)} if sharded else found


def passed_on(communicator: Communicator) -> dict[str, Any]:
    """A step under each strategy, from what the one before it left; returns the last state."""
    state: dict[str, Any] = {}
    for step, (strategy, batch) in enumerate(zip(PASSED, steps_of(M, steps=len(PASSED)), strict=True)):
        engine = built(communicator, strategy, ADAM)
        if state:
            engine.load_state_dict(copy.deepcopy(state))
        train(engine, [batch], first=step)
        state = shared(communicator, engine.state_dict())
    return state


def shared(communicator: Communicator, state: dict[str, Any]) -> dict[str, Any]:
    from parallel.comm.objects import broadcast_object

    return broadcast_object(communicator, state)  # type: ignore[no-any-return]


PASSED = (
    CELLS["ddp, zero 2, keep"],
    SHARDED["fsdp, keep"],
    CELLS["master, zero 1, host"],
    SHARDED["fsdp, host"],
    CELLS["spatial, zero 2, recompute"],
)


@pytest.fixture(scope="module", params=["forked", "mpi"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    checks, folder = "tests.parallel.engine.test_zero:all_cells", tmp_path_factory.mktemp("ranks")
    return run_on_ranks(RANKS, checks, folder, request.param == "forked", 280, launcher=request.param)


@pytest.mark.process
@pytest.mark.parametrize("name", CELLS)
def test_processes(name: str, ranks: list[dict[str, Any]]) -> None:
    assert_equal([rank[name] for rank in ranks], plain("skips", M), torch.float64)


@pytest.mark.process
@pytest.mark.parametrize("ranks", ["forked"], indirect=True)
@pytest.mark.parametrize("name", SHARDED)
def test_processes_under_fsdp(name: str, ranks: list[dict[str, Any]]) -> None:
    """Over Gloo alone: fsdp is torch's own."""
    assert_equal([rank[name] for rank in ranks], plain("skips", M), torch.float64)


@pytest.mark.process
@pytest.mark.parametrize("ranks", ["forked"], indirect=True)
def test_states_pass_between_stages_1_2_and_3(ranks: list[dict[str, Any]]) -> None:
    assert_same_state(ranks[0]["passed on"], continued(len(PASSED)))


# On threads


def continued(steps: int) -> dict[str, Any]:
    run = plain_run(net("skips", torch.float64), NETS["skips"][1], ADAM, steps_of(M, steps=steps), seed=SEED, lr=LR)
    return {"model": run.model, "optimizer": run.optimizer}


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert largest_error(expected["model"], found["model"]) <= 1e-9
    ours, theirs = found["optimizer"], expected["optimizer"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        assert ours["state"][number].keys() == values.keys()
        assert largest_error(values, ours["state"][number]) <= 1e-9


KINDS = {
    "single": Strategy("single", 1, 1, M),
    "ddp": HOLDERS["ddp"],
    **{name: CELLS[name] for name in ("ddp, zero 1, keep", "ddp, zero 2, host", "master, zero 1, keep")},
    **{name: CELLS[name] for name in ("1f1b, zero 2, keep", "spatial, zero 2, keep")},
}


@pytest.mark.parametrize(
    "first", [pytest.param(name, marks=() if "host" in name else pytest.mark.long) for name in KINDS]
)
def test_checkpoints_of_every_kind_load_into_every_other(first: str) -> None:
    """Two steps under one and one under another are three of a plain run."""
    steps = steps_of(M, steps=3)

    def part(communicator: Communicator, saved: dict[str, Any] | None, strategy: Strategy) -> dict[str, Any]:
        engine = built(communicator, strategy, ADAM)
        if saved is not None:
            engine.load_state_dict(copy.deepcopy(saved))
        train(engine, steps[2:] if saved else steps[:2], first=2 if saved else 0)
        return engine.state_dict()

    def run(strategy: Strategy, saved: dict[str, Any] | None = None) -> dict[str, Any]:
        return run_on_threads(strategy.ranks, functools.partial(part, strategy=strategy), saved, timeout_s=60)[0]

    saved = run(KINDS[first])
    assert_same_state(saved, continued(2))
    for strategy in KINDS.values():
        assert_same_state(run(strategy, saved), continued(3))


@pytest.mark.parametrize(("name", "zero"), [("ddp", 1), ("ddp", 2), ("master", 1), ("spatial", 1)])
def test_bits_are_those_of_whole_sums_where_each_rank_sums_once(name: str, zero: int) -> None:
    m = RANKS if name == "ddp" else M
    whole, divided = (on_threads(dataclasses.replace(HOLDERS[name], m=m, zero=each), steps_of(m)) for each in (0, zero))
    for one, other in zip(whole, divided, strict=True):
        assert one["losses"] == other["losses"]
        assert all(torch.equal(gradient, other["gradients"][key]) for key, gradient in one["gradients"].items())
    states = [ranks[0]["state"] for ranks in (whole, divided)]
    assert all(torch.equal(value, states[1]["model"][key]) for key, value in states[0]["model"].items())
    for one, other in zip(*(state["optimizer"]["state"].values() for state in states), strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])


@pytest.mark.parametrize("zero", [1, 2])
def test_ranks_with_fewer_microbatches_and_steps_of_other_sizes(zero: int) -> None:
    steps = [batch_of([2] * 5, 12, 1, torch.float64), batch_of([1, 2, 1, 1, 2], 12, 2, torch.float64)]
    expected = plain_run(net("skips", torch.float64), NETS["skips"][1], SGD, steps, seed=SEED, lr=LR)
    assert_equal(on_threads(Strategy("ddp", 3, 1, 5, zero=zero), steps), expected, torch.float64)


@pytest.mark.parametrize("saving", ["keep", "host"])
def test_a_step_that_is_refused_leaves_all_as_it_was(saving: str) -> None:
    steps = steps_of(M)
    steps[1][3][0][0, 0, 0, 0] = torch.nan

    def step(communicator: Communicator, _: Any) -> tuple[Any, Any]:
        engine = built(communicator, CELLS[f"ddp, zero 2, {saving}"], ADAM)
        train(engine, steps[:1])
        before = engine.state_dict()
        with pytest.raises(NonFiniteLoss):
            train(engine, steps[1:], first=1)
        after = engine.state_dict()
        train(engine, steps[:1], first=1)
        return copy.deepcopy(before), after

    before, after = run_on_threads(RANKS, step, timeout_s=60)[0]
    assert all(torch.equal(value, after["model"][key]) for key, value in before["model"].items())
    for key, values in before["optimizer"]["state"].items():
        assert all(torch.equal(value, after["optimizer"]["state"][key][name]) for name, value in values.items())


NAME, SHAPE = "resnet18", (1, 3, 64, 64)
TAKEN = {
    "ddp": Strategy("ddp", RANKS, 1, RANKS),
    "ddp, two microbatches a rank": Strategy("ddp", RANKS, 1, 2 * RANKS),
    "1f1b": Strategy("1f1b", RANKS, 2, 4),
    "master": Strategy("master", RANKS, 2, M),
}


def taken(communicator: Communicator, strategy: Strategy) -> tuple[int, int]:
    """Return the bytes of this rank between two steps, and at most in a step."""
    torch.manual_seed(0)
    engine = build_engine(
        strategy,
        build_model(NAME, classes=3),
        TileClassLoss(),
        functools.partial(torch.optim.AdamW, lr=0.01),
        communicator,
        batch=strategy.m,
        tile=SHAPE[-1],
        seed=0,
        device=CPU,
    )

    def tiles() -> Iterator[Microbatch]:
        for i in engine.share:
            wants = engine.wants(i)
            images = torch.ones(SHAPE) if wants.images else None  # made when asked for: it counts then
            yield Microbatch(images, torch.zeros(1, dtype=torch.int64) if wants.targets else None, SHAPE)

    engine.step(tiles(), 0, 0.01)
    watch = LiveBytes()
    watch.add(engine.on_device())
    between = watch.bytes
    with watch:
        engine.step(tiles(), 1, 0.01)
    return between, watch.peak_bytes


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("name", TAKEN)
def test_bytes_of_a_rank_are_those_of_the_formulas(name: str, zero: int) -> None:
    """P + 3 P / N between two steps where N ranks hold a stage: slices of gradients and of the two moments of AdamW."""
    graph = with_loss(trace(build_model(NAME, classes=3), SHAPE).graph, 3, None)
    strategy = dataclasses.replace(TAKEN[name], zero=zero)
    partition = strategy.partition(graph)
    stages, mesh = StageMemory(graph).kept(partition), strategy.mesh
    told = rank_bytes(stages, mesh, strategy.schedule(partition.links), slots=2, zero=zero)
    found = run_on_threads(RANKS, lambda c, _: taken(c, strategy), timeout_s=120)
    for rank, (between, peak) in enumerate(found):
        held = {stage for stage, _ in mesh.held_by(rank)}
        sizes = {stage: stages[stage].parameters for stage in held}
        holders = {stage: len(mesh.ranks_with(stage)) if zero else 1 for stage in held}
        assert between == pytest.approx(sum(size + 3 * size / holders[s] for s, size in sizes.items()), rel=0.03)
        # Buckets end at borders of parameters, and are up to a parameter smaller than told; so are slices of them.
        slack = 1.5 * max(stages[stage].largest_parameter for stage in held)
        assert told[rank].total / 1.03 - bool(zero) * slack <= peak <= 1.03 * told[rank].total, (peak, told[rank])
