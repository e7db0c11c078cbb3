"""A plan explained: each kind of reason by its word and number, the stage table, equal layers, and hours."""

import dataclasses
import re
import shlex

import pytest

from app.planning.command import PlanCommand
from app.planning.explained import print_reasons, print_stages, reason, train_line
from app.planning.report import machine_of, planner_for, workload_of
from app.planning.table import best_of_each
from app.settings.cli import parse
from app.settings.run import RunConfig
from parallel.graph.partition import Partition, bytes_across
from parallel.memory.policy import ActivationPolicy
from parallel.plan.candidates import MemoryOptions
from parallel.plan.evaluate import step_shares
from parallel.plan.plan import PlanRow, best_of
from parallel.schedule.shares import consecutive
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy
from parallel.units import bytes_text, seconds_text
from tests.helpers.planned_once import planned_once

__all__ = ["planned_once"]

NAMES = ("ddp", "fsdp", "spatial", "mp-basic", "1f1b", "master")
PLAIN = MemoryOptions(("none",), (False,), stream=False)


def planner(**changed):
    command = PlanCommand(model="resnet18", tile=256, ranks=4, batch=8, device_spec="v100-16gb")
    command = dataclasses.replace(command, **changed)
    machine = machine_of(command)
    return planner_for(command, machine, workload_of(command, machine))


@pytest.fixture(scope="module")
def plans():
    return planner()


@pytest.fixture(scope="module")
def rows(plans):
    return list(plans.search(NAMES, ranks=4))


def best_named(rows, name):
    return best_of(row for row in rows if row.strategy.name == name)


def test_shares_of_a_step_add_up(plans, rows):
    for row in best_of_each(rows, None):
        shares = step_shares(plans, row)
        assert sum(shares.values()) == pytest.approx(1, abs=0.01), row.strategy
        assert min(shares.values()) > 0
    assert "halos and uneven parts" in step_shares(plans, best_named(rows, "spatial"))
    assert "gathering parameters" in step_shares(plans, best_named(rows, "fsdp"))
    alone = step_shares(plans, best_named(rows, "mp-basic"))  # one rank of a group computes at a time
    depth = best_named(rows, "mp-basic").strategy.depth
    assert alone["waiting for other stages"] + alone["messages"] > 0.8 * (1 - 1 / depth)


@pytest.mark.parametrize(("recompute", "offload"), [("block", "none"), ("none", "overlap"), ("stage", "none")])
def test_what_saves_memory_has_a_share(plans, recompute, offload):
    row = plans.forecast(Strategy("1f1b", 4, 4, 8).under(recompute=recompute, offload=offload))
    plain = plans.forecast(Strategy("1f1b", 4, 4, 8))
    shares = step_shares(plans, row)
    assert shares["copies to the host" if offload != "none" else "recomputation"] > 0.02
    assert shares.keys() - step_shares(plans, plain).keys() <= {"copies to the host", "recomputation"}
    computing_s = step_shares(plans, plain)["computing"] * plain.step_s
    assert shares["computing"] * row.step_s == pytest.approx(computing_s, rel=0.05)  # it is computed all the same


def test_each_strategy_has_a_reason_and_a_slower_one_says_by_what_factor_and_why(plans, rows, capsys):
    best, slow = best_of(rows), best_named(rows, "mp-basic")
    print_reasons(plans, rows, best)
    lines = capsys.readouterr().out.strip().splitlines()[1:]
    assert {line.split()[0] for line in lines} == set(NAMES)
    assert lines[0].split()[0] == best.strategy.name
    assert max(map(len, lines)) <= 80
    mean = step_shares(plans, best)["computing"]
    assert f"fastest that fits: {100 * mean:.0f} % computing" in lines[0]
    said = reason(plans, slow, best, step_shares(plans, best))
    assert f"{best.images_per_second / slow.images_per_second:.2f}x slower" in said
    share = step_shares(plans, slow)["waiting for other stages"]
    assert f"{100 * share:.0f} % waiting for other stages" in said
    ddp, tied, boxed = (
        PlanRow(Strategy(name, 4, 1, 8), speed) for name, speed in (("ddp", 10.0), ("fsdp", 10.05), ("spatial", 10.5))
    )
    assert "within 1 %" in reason(plans, tied, ddp, {})
    assert re.search(r"1\.05x as fast: boxes .* 11 %", reason(plans, boxed, ddp, {}))


def test_what_does_not_fit_says_by_how_much_and_what_takes_it(rows):
    small = planner(memory="1GiB", tile=512)
    (row, *_) = small.search(["ddp"], ranks=4, m=4, savings=PLAIN)
    assert not row.fits
    said = reason(small, row, None, {})
    assert f"does not fit: {bytes_text(row.over_bytes)} over; activations kept: " in said
    assert reason(small, dataclasses.replace(row, refused="why not"), None, {}) == "cannot run: why not"
    by_name = PlanRow(Strategy("subgraph", 4, 1, 4, ways=2), 10.0)
    assert reason(small, by_name, None, {}) == "fits: the plan if it is named"


def test_the_stages_of_a_split(capsys):
    plans = planner(tile=1024)
    split = plans.forecast(Strategy("1f1b", 4, 4, 8))
    print_stages(plans, [split], split)
    title, header, *lines, equal = capsys.readouterr().out.strip().splitlines()
    assert str(split.strategy) in title
    assert "the fastest split" not in title
    assert header.split() == ["stage", "from", "layers", "forward", "backward", "params", "over", "cut"]
    partition = plans.partition_of(split)
    costs = plans.stages.stage_costs(split.strategy, partition)
    slowest = max(range(len(costs)), key=lambda k: costs[k].forward_s + costs[k].backward_s)
    assert [line.endswith("<- slowest") for line in lines] == [k == slowest for k in range(len(costs))]
    assert all(seconds_text(cost.backward_s) in line for line, cost in zip(lines, costs, strict=True))
    across = bytes_across(partition.graph)
    for line, start in zip(lines, partition.starts[1:], strict=False):
        assert bytes_text(across[start]) in line
    found = re.search(r"equal numbers of layers: (\d+\.\d\d)x slower", equal)
    assert found
    assert 1.01 < float(found[1]) < 2


def test_a_plan_without_stages_shows_the_fastest_split(plans, rows, capsys):
    best = best_of(rows)
    assert best.strategy.stages == 1
    print_stages(plans, rows, best)
    assert "the fastest split" in capsys.readouterr().out
    print_stages(plans, [best], best)
    assert capsys.readouterr().out == ""


def test_equal_layers_cost_what_the_planner_forecasts(plans, rows):
    """A split by hand whose first stage has nearly all layers is far slower: the factor is one of seconds of a step."""
    split = best_named(rows, "1f1b")
    graph, _ = plans.stages.of(split.strategy)
    lopsided = split.strategy.depth * [0]
    places = plans.stages.places
    lopsided[1:] = places[-split.strategy.depth + 1 :]
    row = plans.forecast(dataclasses.replace(split.strategy, cuts=()), partition=Partition(graph, tuple(lopsided)))
    assert row.step_s > 1.2 * split.step_s


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy("ddp", 4, 1, 8, zero=2),
        Strategy("ddp", 2, 1, 8, shares=consecutive((5, 3))),
        Strategy("1f1b", 4, 2, 8, policy=ActivationPolicy("block", offload="overlap")),
        Strategy("master", 4, 4, 8, cuts=("layer1_0_conv1", "layer2", "layer3")),
        Strategy("interleaved", 2, 2, 4, 2, ("layer2", "layer3", "layer4")),
        Strategy("spatial", 4, 1, 2, grid=TeamGrid(2, 1), policy=ActivationPolicy(stream=512)),
        Strategy("1f1b", 4, 2, 8, grid=TeamGrid(2, 1), policy=ActivationPolicy("stage")),
        Strategy("subgraph", 4, 1, 4, ways=2),
        Strategy("single", 1, 1, 4, policy=ActivationPolicy("optimal", (("a", "b"),))),
    ],
    ids=str,
)
def test_the_command_that_is_printed_trains_as_planned(strategy):
    command = PlanCommand(model="smp:Unet(resnet18)", tile=256, batch=8, norm="group", memory="2GiB")
    command = dataclasses.replace(command, optimizer="sgd", precision="tf32", host_memory="64GiB")
    words = shlex.split(train_line(command, strategy).replace("\\\n", " "))
    config = parse(RunConfig, words[3:], "app.train")
    assert config.validate() == []
    assert (config.net.model, config.net.norm, config.index.tile) == (command.model, "group", 256)
    assert (config.optimization.optimizer, config.strategy.precision) == ("sgd", "tf32")
    asked, policy = config.strategy.to_strategy("cpu"), strategy.policy
    for name in ("name", "ranks", "depth", "m", "chunks", "cuts", "grid", "zero", "ways", "shares"):
        assert getattr(asked, name) == getattr(strategy, name), name
    assert (asked.policy.recompute, asked.policy.offload, asked.policy.stream) == (
        *(policy.recompute, policy.offload),
        policy.stream,
    )
    assert config.strategy.offload_host == ("64GiB" if policy.moves or policy.stream else None)
