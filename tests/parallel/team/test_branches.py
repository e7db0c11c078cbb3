"""Branches of a model shared by the ranks of a team: loss, gradients, statistics, updates and predictions of the plain
step, and the bytes that are sent for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator, sum_bytes
from parallel.comm.objects import broadcast_object
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Microbatch
from parallel.graph.branches import find_branches
from parallel.memory.policy import ActivationPolicy
from parallel.plan.branched import traffic_of
from parallel.strategy import Strategy
from parallel.trace.trace import trace
from tests.helpers import engine_runs
from tests.helpers.branched_nets import BRANCHED_NETS, Inception, Module, steps_for, unit
from tests.helpers.engine_runs import LR, SEED, SGD, assert_equal, build, on_gpus, on_threads, run, train
from tests.helpers.plain_step import PlainRun, largest_error, plain_run
from tests.helpers.ranks import MPIRUN, run_on_ranks
from tests.helpers.small_nets import ALL_NETS, pixel_loss


@pytest.fixture(autouse=True)
def branched_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, each in BRANCHED_NETS.items():
        monkeypatch.setitem(ALL_NETS, name, each)


def shared(ways: int, groups: int = 1, m: int = 2, **policy: Any) -> Strategy:
    return Strategy("subgraph", ways * groups, 1, m, ways=ways, policy=ActivationPolicy(**policy))


def plain(name: str, sizes: list[int]) -> PlainRun:
    model, loss = engine_runs.net(name, torch.float64), ALL_NETS[name][1]
    return plain_run(model, loss, SGD, steps_for(name, sizes), seed=SEED, lr=LR)


CASES = [
    ("inception", shared(2), [4, 4]),
    ("inception", shared(3), [4, 2]),  # members of unequal samples, and some without any
    ("inception", shared(2, groups=2), [3, 2]),
    ("inception", shared(4, groups=2, m=3), [2, 4, 5]),
    ("inception", shared(2, recompute="block"), [4, 3]),
    ("inception", shared(2, recompute="stage", offload="overlap", smallest=0), [4, 3]),
    ("inception", shared(2, optimizer=True), [4, 3]),
    ("aspp", shared(2), [4, 4]),
    ("aspp", shared(4), [4, 4]),
    pytest.param("amoebanet", shared(2), [4, 4], marks=pytest.mark.long),
    pytest.param("amoebanet", shared(4), [4, 3], marks=pytest.mark.long),
    *(
        pytest.param(name, shared(ways), [4, 4], marks=pytest.mark.long)
        for name in ("googlenet", "googlenet-heads", "inception-v3")
        for ways in (2, 4)
    ),
]


@pytest.mark.parametrize(("net", "strategy", "sizes"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_shared_branches_give_the_plain_step(net: str, strategy: Strategy, sizes: list[int]) -> None:
    steps = steps_for(net, sizes)
    # Ranks trace one after the other, large networks for minutes on a busy machine.
    ranks = run_on_threads(strategy.ranks, lambda c, _: run(c, net, strategy, steps), timeout_s=400)
    assert_equal(ranks, plain(net, sizes), torch.float64)


def test_members_may_be_given_their_own_samples_alone() -> None:
    strategy, steps = shared(2), steps_for("inception", [5, 4])

    def own(communicator: Communicator, _: object) -> dict[str, Any]:
        engine = build(communicator, "inception", strategy, steps)
        losses = []
        for number, batch in enumerate(steps):
            parts = [engine.samples(len(images)) for images, _ in batch]
            mine = [
                Microbatch(images[part.start : part.stop], targets[part.start : part.stop], tuple(images.shape))
                for (images, targets), part in zip(batch, parts, strict=True)
            ]
            losses.append(engine.step(mine, number, LR).loss)
        assert [len(part) for part in parts] == ([3, 2] if communicator.rank == 0 else [2, 2])
        gradients = {key: value.clone() for key, value in engine.gradients().items()}
        images = steps[0][0][0]
        predicted = engine.predict(Microbatch(images, None, tuple(images.shape)))
        return {"losses": losses, "gradients": gradients, "state": engine.state_dict(), "predicted": predicted}

    assert_equal(run_on_threads(2, own, timeout_s=60), plain("inception", [5, 4]), torch.float64)


@pytest.mark.process
@pytest.mark.parametrize(
    "launcher", ["forked", pytest.param("mpi", marks=pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun"))]
)
def test_ranks_that_are_processes(launcher: Literal["forked", "mpi"], tmp_path: Path) -> None:
    argument = {"name": "inception", "ways": 2, "sizes": [3, 2]}
    ranks = run_on_ranks(4, "tests.helpers.branched_nets:on_rank", tmp_path, argument, launcher=launcher)
    assert_equal(ranks, plain("inception", [3, 2]), torch.float64)


@pytest.mark.parametrize("strategy", [shared(2), shared(2, groups=2), shared(2, recompute="block")], ids=str)
def test_simulated_gpus(strategy: Strategy) -> None:
    assert_equal(
        on_gpus("inception", strategy, steps_for("inception", [3, 2])), plain("inception", [3, 2]), torch.float64
    )


@pytest.mark.parametrize(("ways", "groups"), [(2, 1), (3, 1), (2, 2)])
def test_bytes_sent_are_those_of_the_formula(ways: int, groups: int) -> None:
    """Samples at forks and joins, forward and back, and gradients of what is shared and of a branch."""
    strategy, steps = shared(ways, groups), steps_for("inception", [5, 4], steps=1)

    def sent(communicator: Communicator, _: object) -> tuple[int, int, int, int]:
        engine = build(communicator, "inception", strategy, steps)
        train(engine, steps)
        (stage,), link = engine._work.stages.values(), engine._work.link
        assert link is not None
        numbers = [
            sum(p.numel() + 1 for p in stage.module.held(stage.parameters.items(), own=own)) for own in (False, True)
        ]
        return link.sent_bytes, engine.sent_in_step, *numbers

    found = run_on_threads(strategy.ranks, sent, timeout_s=60)
    graph = trace(Inception().double(), (1, 3, 12, 12), torch.float64).graph
    branches = find_branches(graph, ways)
    samples = [sum(len(images) for images, _ in [batch]) for batch in steps[0]]
    expected = sum(
        2 * traffic_of(branches, region, lambda name: graph.by_name[name].output_bytes, n).sent
        for region in branches.regions
        for n in samples
    )
    assert sum(link for link, *_ in found) == expected
    for link, everything, of_all, own in found:
        assert everything == link + sum_bytes(8 * of_all, ways * groups) + sum_bytes(8 * own, groups)


def test_a_branch_and_its_optimizer_state_are_on_one_member_alone() -> None:
    strategy, steps = shared(3), steps_for("inception", [3, 3])

    def held(communicator: Communicator, _: object) -> tuple[set[str], set[str], set[str]]:
        engine = build(communicator, "inception", strategy, steps)
        train(engine, steps)
        (stage,), optimizer = engine._work.stages.values(), engine._work.update.optimizer
        assert optimizer is not None
        names = {name for group in optimizer.param_groups for name in group["param_names"]}
        return set(stage.parameters), names, set(stage.module.of_one_member)

    found = run_on_threads(3, held, timeout_s=60)
    everything = {name for name, _ in Inception().named_parameters()}
    assert set.union(*(parameters for parameters, _, _ in found)) == everything
    owned = [own & parameters for parameters, _, own in found]
    assert all(owned)
    assert sum(map(len, owned)) == len(set.union(*owned))
    assert all(names == parameters for parameters, names, _ in found)
    assert {"first.point.0.weight", "second.wide.1.0.weight"} <= set.union(*owned)
    assert not {"stem.0.weight", "head.weight", "between.1.0.weight"} & set.union(*owned)


def test_a_checkpoint_goes_on_under_another_strategy_and_back() -> None:
    first, other = shared(2), Strategy("ddp", 2, 1, 2)
    steps = steps_for("inception", [4, 4], steps=3)

    def run(communicator: Communicator, _: object) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for number, strategy in enumerate((first, other, first)):
            engine = build(communicator, "inception", strategy, steps)
            if state:
                engine.load_state_dict(state)
            train(engine, steps[number : number + 1], number)
            state = broadcast_object(communicator, engine.state_dict())
        return state

    found = run_on_threads(2, run, timeout_s=60)[0]
    model = engine_runs.net("inception", torch.float64)
    expected = plain_run(model, pixel_loss, SGD, steps, seed=SEED, lr=LR)
    assert largest_error(expected.model, found["model"]) <= 1e-9


class Sorted(nn.Module):
    """Inception whose shared part puts the samples in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.module = unit(3, 6), Module(6)
        self.head = nn.Conv2d(self.module.channels, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.module(torch.flip(self.net(images), (0,))))
        return logits


class Chain(nn.Sequential):
    """No branches."""

    def __init__(self) -> None:
        super().__init__(unit(3, 6), unit(6, 6), nn.Conv2d(6, 3, 1))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Sorted, "flip, not known to treat each sample alone"),
        (Chain, "none, and at least 10% is asked for. Looked for in its blocks: Inception modules"),
    ],
)
def test_a_model_that_cannot_be_shared_is_refused(
    model: type[nn.Module], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_NETS, model.__name__, (model, pixel_loss))
    with pytest.raises(ValueError, match=reason):
        on_threads(model.__name__, shared(2), steps_for(model.__name__, [2, 2]))


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (dataclasses.replace(shared(2), ways=1), "2 ranks or more: give --stages 2"),
        (shared(2, recompute="optimal"), "use --recompute block"),
        (shared(2, stream=64), "leave --stream 64 out"),
        (dataclasses.replace(shared(2), compile=True), "leave compile out"),
    ],
)
def test_what_does_not_go_with_branches_is_refused_by_name(strategy: Strategy, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _ = strategy.mesh
