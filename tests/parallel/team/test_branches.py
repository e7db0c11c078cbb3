"""Branches of a model shared by the ranks of a team: loss, gradients, statistics, updates and predictions of the plain
step, and the bytes that are sent for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from models.blocks import FrozenBatchNorm2d
from parallel.comm.communicator import Communicator, sum_bytes
from parallel.comm.objects import broadcast_object
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import EngineFault, Microbatch
from parallel.graph.branches import find_branches
from parallel.memory.policy import ActivationPolicy
from parallel.plan.added_costs import traffic_of
from parallel.schedule.registry import build_schedule
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import LinkCost, StageCost
from parallel.strategy import Strategy
from parallel.team.samplewise import normalise, samplewise_fault
from parallel.trace.trace import trace
from tests.helpers.branched_nets import BRANCHED_NETS, Inception, Module, of_tiles, steps_for, unit
from tests.helpers.engine_runs import LR, assert_equal, build, on_gpus, on_threads, plain_of, run, train
from tests.helpers.plain_step import PlainRun, largest_error
from tests.helpers.small_nets import ALL_NETS, Made, pixel_loss


@pytest.fixture(autouse=True)
def branched_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, each in BRANCHED_NETS.items():
        monkeypatch.setitem(ALL_NETS, name, each)


def shared(ways: int, groups: int = 1, m: int = 2, **policy: Any) -> Strategy:
    return Strategy("subgraph", ways * groups, 1, m, ways=ways, policy=ActivationPolicy(**policy))


def plain(name: str, sizes: list[int]) -> PlainRun:
    return plain_of(name, steps_for(name, sizes))


DEEP = [("amoebanet", shared(4), [4, 3]), ("googlenet", shared(2), [4, 4])]
DEEP += [("googlenet-heads", shared(4), [4, 4]), ("inception-v3", shared(2), [4, 4])]
DEEP += [("inception", shared(4, groups=2, m=3), [2, 4, 5]), ("inception", shared(2, optimizer=True), [4, 3])]
DEEP += [("inception", shared(2, recompute="block"), [4, 3]), ("aspp", shared(4), [4, 4])]
CASES = [
    ("inception", shared(2), [4, 4]),
    ("inception", shared(3), [4, 2]),  # members of unequal samples, and some without any
    ("flattened", shared(2), [1, 1]),  # torch does not say what -1 in a shape stands for where there are no samples
    ("inception", shared(2, groups=2), [3, 2]),
    ("inception", shared(2, recompute="stage", offload="overlap", smallest=0), [4, 3]),
    *(pytest.param(*case, marks=pytest.mark.long) for case in DEEP),
]


@pytest.mark.parametrize(("net", "strategy", "sizes"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_shared_branches_give_the_plain_step(net: str, strategy: Strategy, sizes: list[int]) -> None:
    steps = steps_for(net, sizes)
    # Ranks trace one after the other, large networks for minutes on a busy machine.
    ranks = run_on_threads(strategy.ranks, lambda c, _: run(c, net, strategy, steps), timeout_s=400)
    assert_equal(ranks, plain(net, sizes), torch.float64)


@pytest.mark.parametrize(
    "strategy", [shared(2, groups=2), pytest.param(shared(2, recompute="block"), marks=pytest.mark.long)], ids=str
)
def test_simulated_gpus(strategy: Strategy) -> None:
    ranks = on_gpus("inception", strategy, steps_for("inception", [3, 2]))
    assert_equal(ranks, plain("inception", [3, 2]), torch.float64)


@pytest.mark.parametrize(("ways", "groups"), [(3, 1), (2, 2)])
def test_bytes_sent_are_those_of_the_formula(ways: int, groups: int) -> None:
    """Samples at forks and joins, forward and back, and gradients of what is shared and of a branch."""
    strategy, steps = shared(ways, groups), steps_for("inception", [5, 4], steps=1)

    def sent(communicator: Communicator, _: object) -> tuple[int, int, int, int]:
        engine = build(communicator, "inception", strategy, steps)
        train(engine, steps)
        (stage,), link = engine._work.stages.values(), engine._work.link
        numbers = [
            sum(p.numel() + 1 for p in stage.module.held(stage.parameters.items(), own=own)) for own in (False, True)
        ]
        return link.sent_bytes, engine.sent_in_step, *numbers

    found = run_on_threads(strategy.ranks, sent, timeout_s=60)
    graph = trace(Inception().double(), (1, 3, 12, 12), torch.float64).graph
    branches = find_branches(graph, ways)
    samples = [sum(len(images) for images, _ in [batch]) for batch in steps[0]]
    expected = sum(2 * traffic_of(branches, region, n)[1] for region in branches.regions for n in samples)
    assert sum(link for link, *_ in found) == expected
    for link, everything, of_all, own in found:
        assert everything == link + sum_bytes(8 * of_all, ways * groups) + sum_bytes(8 * own, groups)


def test_a_branch_and_its_optimizer_state_are_on_one_member_alone() -> None:
    strategy, steps = shared(3), steps_for("inception", [3, 3])

    def held(communicator: Communicator, _: object) -> tuple[set[str], set[str], set[str]]:
        engine = build(communicator, "inception", strategy, steps)
        train(engine, steps)
        (stage,), optimizer = engine._work.stages.values(), engine._work.update.optimizer
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


def test_a_checkpoint_goes_on_under_another_strategy_and_back_and_members_may_have_their_own_samples_alone() -> None:
    first, other = shared(2), Strategy("ddp", 2, 1, 2)
    steps = steps_for("inception", [5, 4], steps=3)

    def run(communicator: Communicator, _: object) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for number, strategy in enumerate((first, other, first)):
            engine = build(communicator, "inception", strategy, steps)
            if state:
                engine.load_state_dict(state)
            if strategy is first:
                parts = [engine.samples(len(images)) for images, _ in steps[number]]
                assert [len(part) for part in parts] == ([3, 2] if communicator.rank == 0 else [2, 2])
                mine = [
                    Microbatch(images[part.start : part.stop], targets[part.start : part.stop], tuple(images.shape))
                    for (images, targets), part in zip(steps[number], parts, strict=True)
                ]
                engine.step(mine, number, LR)
            else:
                train(engine, steps[number : number + 1], number)
            state = broadcast_object(communicator, engine.state_dict())
        return state

    found = run_on_threads(2, run, timeout_s=60)[0]
    assert largest_error(plain_of("inception", steps).model, found["model"]) <= 1e-9


def reordered() -> nn.Module:
    """Inception whose shared part puts the samples in another order."""
    module = Module(6)
    parts = {"net": unit(3, 6), "module": module, "head": nn.Conv2d(module.channels, 3, 1)}
    return Made(lambda m, x: m.head(m.module(torch.flip(m.net(x), (0,)))), **parts)


@pytest.mark.parametrize(
    ("change", "known"),
    [
        (lambda x: torch.permute(x, dims=(0, 2, 1)), True),
        (lambda x: torch.permute(x, dims=(1, 0, 2)), False),
        (lambda x: torch.reshape(x, shape=(x.shape[0], -1)), True),
    ],
)
def test_arguments_by_name(change: Callable[[torch.Tensor], torch.Tensor], known: bool) -> None:
    graph = trace(Made(lambda m, x: change(m.net(x)), net=nn.Linear(4, 4)), (2, 3, 4)).training
    assert any(samplewise_fault(graph, node) for node in graph.graph.nodes) is not known


def test_frozen_norms_treat_each_sample_alone() -> None:
    graph = trace(nn.Sequential(FrozenBatchNorm2d(3)), (2, 3, 4, 4)).training
    assert not any(samplewise_fault(graph, node) for node in graph.graph.nodes)


def test_a_norm_takes_the_gradient_of_one_sample_whatever_its_strides() -> None:
    """Transposed, it has a stride of 4 between samples, and torch takes it for one of another layout."""
    x = torch.randn(1, 4, 6, 5, dtype=torch.float64, requires_grad=True)
    factor, norm = torch.randn(1, 30, 4, dtype=torch.float64), nn.BatchNorm2d(4, dtype=torch.float64)
    plain = (x - x.mean((2, 3), keepdim=True)) * (x.var((2, 3), correction=0, keepdim=True) + norm.eps).rsqrt()
    alone: Any = SimpleNamespace(all_gather=lambda mine: [mine], all_reduce_async=lambda sums: lambda: [sums])
    context: Any = SimpleNamespace(rows=(range(1),), samples=1)
    found, expected = (
        torch.autograd.grad((y.flatten(2).permute(0, 2, 1) * factor).sum(), x)[0]
        for y in (normalise(alone, norm, x, context), plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def unbranched() -> nn.Module:
    return nn.Sequential(unit(3, 6), unit(6, 6), nn.Conv2d(6, 3, 1))


@pytest.mark.parametrize(
    ("model", "strategy", "reason"),
    [
        (reordered, shared(2), "flip, not known to treat each sample alone"),
        (unbranched, shared(2), "none, and at least 10% is asked for"),
        (Inception, dataclasses.replace(shared(2), ways=1), "2 ranks or more: give --stages 2"),
        (Inception, shared(2, recompute="optimal"), "use --recompute block"),
        (Inception, shared(2, stream=64), "leave --stream 64 out"),
        (Inception, dataclasses.replace(shared(2), compile=True), "leave compile out"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    model: Callable[[], nn.Module], strategy: Strategy, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_NETS, model.__name__, (model, pixel_loss))
    with pytest.raises(ValueError, match=reason):
        on_threads(model.__name__, strategy, steps_for(model.__name__, [2, 2]))


def normed() -> nn.Module:
    return Made(lambda m, x: m.norm(m.net(x).mean((2, 3))), net=Inception(), norm=nn.BatchNorm1d(3))


def test_one_value_per_channel_is_refused_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It divided by zero."""
    monkeypatch.setitem(ALL_NETS, "normed", (normed, of_tiles))
    with pytest.raises(EngineFault, match="Expected more than 1 value per channel when training, got input size"):
        on_threads("normed", shared(2), steps_for("normed", [2, 1]))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_of_different_branches_compute_at_the_same_time(schedule: str) -> None:
    """Two branches of a block are stages without an edge between them; the fourth stage joins them."""
    strategy = Strategy(schedule, 4, 4, 2, cuts=("first.before", "first.point", "first.wide"))
    steps = steps_for("inception", [3, 2])
    partition = strategy.partition(trace(Inception(), tuple(steps[0][0][0].shape)).graph)
    assert (1, 2) not in partition.links
    costs, links = [StageCost(1.0, 2.0, 1.0, 1.0, 0)] * 4, dict.fromkeys(partition.links, LinkCost(0.0, 0.0))
    timeline = simulate(build_schedule(schedule, strategy.mesh, 2), strategy.mesh, costs, links)
    assert timeline.compute(1)[0].start_s == timeline.compute(2)[0].start_s
    assert_equal(on_threads("inception", strategy, steps), plain_of("inception", steps), torch.float64)
