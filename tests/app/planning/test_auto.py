"""``--parallel auto``: planned once, kept, followed by every rank, and taken up again by a resumed run."""

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import pytest
from torch import nn

from app.planning.auto import (
    check_largest,
    decided,
    follow,
    machine_of,
    names_for,
    plan_run,
    plan_text,
    planned_speed,
    savings_of,
)
from app.planning.machine import named_machine, this_machine
from app.settings.cli import RunError
from app.settings.fields import with_values
from app.settings.run import DataSettings, RunConfig
from app.settings.strategy import Parallel, StrategySettings
from app.train import _plan
from app.training.run_folder import RunFolder
from parallel.memory.policy import ActivationPolicy
from parallel.plan.candidates import MemoryOptions
from parallel.plan.plan import PlanRow
from parallel.strategy import Strategy
from tests.helpers.planned_once import planned_once

__all__ = ["planned_once"]

FORKED = {"model": "tests.app.planning.test_auto:forked"}


class Forked(nn.Module):
    """A forward that depends on the data, so it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        x = x.mean((2, 3))
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


def forked(classes):
    assert classes == 2
    return Forked()


@pytest.fixture
def run(tmp_path):
    """Plans a run with settings by name: what it says, and the strategy."""

    def run(epoch_tiles=None, tile=64, **values):
        config = with_values(RunConfig(DataSettings(Path("slides"))), {"model": "resnet18", **values})
        config = with_values(config, {"tile": tile, "stride": tile})
        said = []
        plan_run(config, 2, False, tmp_path, said.append, **({"tiles": epoch_tiles} if epoch_tiles else {}))
        return said, decided(config.strategy, tmp_path, "cpu", plan_text(tmp_path))

    return run


@pytest.fixture
def v100s(monkeypatch):
    def machine(ranks, memory=None, **_):
        return named_machine("v100-16gb", ranks, memory=memory)

    monkeypatch.setattr("app.planning.machine.this_machine", machine)


def test_one_rank_is_planned_without_calibration(run, monkeypatch):
    monkeypatch.delattr("app.planning.machine.load_or_calibrate")
    (said,), strategy = run()
    assert said.startswith("plan: single, m=1")
    assert strategy == Strategy("single", 1, 1, 1)
    (said,), _ = run(recompute="block", offload="overlap")  # as asked, so there is nothing to choose
    assert "single, m=1 +recompute block +offload" in said


@pytest.mark.parametrize(("copy_s", "taken"), [(1e-3, "+offload,"), (10.0, "+recompute optimal,")])
def test_one_rank_that_has_to_save_memory_chooses_by_time(run, monkeypatch, copy_s, taken):
    """One tile fits if parts of the model are recomputed, or if what is kept is moved at ``copy_s`` seconds a GiB."""

    def machine(ranks, memory=None, timed=True, **_):
        if not timed:
            return this_machine(ranks, memory=memory, device="cpu", timed=False)
        named = named_machine("v100-16gb", ranks, memory=memory)
        cluster = dataclasses.replace(named.cluster, kind="cpu", copy_bandwidth=(1 << 30) / copy_s)
        return dataclasses.replace(named, cluster=cluster)

    monkeypatch.setattr("app.planning.machine.this_machine", machine)
    (said,), _ = run(tile=512, batch=1, memory="510MiB")
    assert f"single, m=1 {taken}" in said


def test_one_rank_with_little_memory_takes_smaller_microbatches(run):
    (said,), _ = run(tile=512, memory="800MiB")
    assert "single, m=4" in said
    with pytest.raises(RunError, match=r"nothing fits in 100 MiB a rank: single, m=8 \+recompute block \+offload"):
        run(tile=512, memory="100MiB")


def test_a_resumed_run_keeps_its_plan_unless_the_problem_changed(run, tmp_path):
    run()
    written = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(written | {"m": 4}))
    said, strategy = run(resume=True)
    assert (said, strategy.m) == ([], 4)
    assert run(resume=True, microbatches=4)[0] == []
    assert run(resume=True, microbatches=8)[1].m == 8
    (tmp_path / "plan.json").write_text(json.dumps(written | {"m": 4}))
    with pytest.MonkeyPatch.context() as patch:  # the same settings, on a machine with another precision
        patch.setattr("app.planning.machine.decide_precision", lambda *_: "bf16")
        assert run(resume=True)[0] != []
    assert json.loads((tmp_path / "plan.json").read_text())["problem"]["precision"] == "bf16"
    said, strategy = run()
    assert said != []
    assert strategy.m == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.launch.place.device_kind", lambda _: "cuda")
        for name in ("A100", "A30"):
            patch.setattr("parallel.profile.gpu.gpu_at", lambda _, name=name: SimpleNamespace(name=name))
            assert run(resume=True)[0] != []
        assert run(resume=True)[0] == []


def test_plans_are_for_the_host_memory_that_is_asked_for(run, monkeypatch):
    given = []

    def machine(ranks, host_memory=None, **_):
        given.append(host_memory)
        return named_machine("v100-16gb", ranks, host_memory=host_memory)

    monkeypatch.setattr("app.planning.machine.this_machine", machine)
    asked = {"offload": "overlap", "offload_host": "64GiB"}
    run(**asked)
    assert run(**asked, resume=True)[0] == []
    assert run(**asked | {"offload_host": "32GiB"}, resume=True)[0] != []
    boxes = with_values(RunConfig(DataSettings(Path("slides"))), {"stream": "512", "offload_host": "1GiB"})
    machine_of(boxes, timed=False)  # what does not fit there is written to files
    assert given == [64 << 30, 32 << 30, None]


def test_a_model_that_cannot_be_traced_is_not_split(run):
    (said,), strategy = run(**FORKED)
    assert "cannot be planned for" in said
    assert strategy.name == "single"


def test_a_wrong_model_is_refused_before_the_machine_is_measured(run, monkeypatch):
    monkeypatch.delattr("app.planning.machine.this_machine")
    with pytest.raises(ValueError, match="unknown model 'resnet19x'"):
        run(model="resnet19x")


def test_a_named_strategy_is_left_alone_and_a_missing_plan_says_what_to_do(tmp_path):
    named = StrategySettings("1f1b", ranks=2)
    assert decided(named, tmp_path, "cpu", plan_text(tmp_path)) == named.to_strategy("cpu") == Strategy("1f1b", 2, 2, 4)
    with pytest.raises(RunError, match="name a strategy with --parallel"):
        decided(StrategySettings(), tmp_path, "cpu", plan_text(tmp_path))


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy("master", 4, 2, 8, cuts=("layer2",), zero=1).under(recompute="stage"),
        Strategy("ddp", 2, 1, 8).under(
            recompute="optimal", chosen=(("a", "b"), ("d", "d")), offload="overlap", ahead=3 << 20
        ),
        Strategy("interleaved", 2, 2, 4, 2, ("a", "b", "c")),
    ],
)
def test_everything_that_a_row_decides_is_followed(strategy):
    assert follow(StrategySettings(ranks=strategy.ranks), PlanRow(strategy), "cpu") == strategy
    assert {"auto", strategy.name} <= set(get_args(Parallel))


def test_what_plans_have_no_say_in_is_as_asked_for():
    sizes = {"offload_ahead": "8MiB", "offload_host": "1GiB", "offload_state": "optimizer"}
    asked = StrategySettings(**sizes, norm_statistics="deferred", compile=True)
    strategy = follow(asked, PlanRow(Strategy("single", 1, 1, 2).under(offload="overlap", ahead=3 << 20)), "cpu")
    assert strategy.policy == ActivationPolicy(offload="overlap", ahead=8 << 20, host_bytes=1 << 30, optimizer=True)
    assert (strategy.statistics, strategy.compile, strategy.m) == ("deferred", True, 2)


def test_what_a_user_asks_to_save_is_not_searched_and_in_the_plan(run):
    assert savings_of(StrategySettings()) == MemoryOptions()
    assert savings_of(StrategySettings(recompute="block")) == MemoryOptions(("block",), (False, True))
    assert savings_of(StrategySettings(offload="overlap")) == MemoryOptions(offload=(True,))
    assert savings_of(StrategySettings(norm_statistics="deferred")) == MemoryOptions(stream=False)
    assert savings_of(StrategySettings(gradient_buckets="0")) == MemoryOptions(zero=(0, 1))
    (said,), strategy = run(recompute="block", offload="overlap", offload_ahead="8MiB")
    assert "+recompute block +offload" in said
    assert strategy.policy == ActivationPolicy("block", offload="overlap", ahead=8 << 20)


@pytest.mark.parametrize(
    ("values", "bag", "left_out"),
    [
        ({"offload_state": "parameters"}, 0, {"spatial", "zero-bubble", "fsdp"}),
        ({"norm_statistics": "deferred"}, 0, {"spatial"}),
        ({}, 32, {"fsdp"}),
    ],
)
def test_what_the_settings_refuse_by_name_is_not_searched(values, bag, left_out):
    every, searched = names_for(StrategySettings(ranks=2)), names_for(StrategySettings(ranks=2, **values), bag)
    assert {*every} - {*searched} == left_out


@pytest.mark.usefixtures("v100s")
@pytest.mark.parametrize(
    "changed",
    [{"grid": "2x2"}, {"zero": 1}, {"chunks": 3}, {"offload_state": "optimizer"}, {"gradient_buckets": "0"}],
    ids=str,
)
def test_a_resumed_run_with_another_mesh_or_state_is_planned_anew(run, changed):
    named = {"parallel": "spatial", "grid": "4x1", "recompute": "optimal", "ranks": 4, "tile": 256}
    run(**named)
    assert run(**named, resume=True)[0] == []
    said, strategy = run(**named | changed, resume=True)
    assert said != []
    assert str(strategy.grid) == (named | changed)["grid"]


def test_a_machine_that_cannot_be_measured_says_how_to_do_without(run, monkeypatch):
    monkeypatch.setattr("app.planning.machine.load_or_calibrate", mock.Mock(side_effect=RuntimeError("too slow")))
    with pytest.raises(RunError, match="too slow; name a strategy with --parallel"):
        run(ranks=2)
    with pytest.raises(RunError, match="too slow; leave out --recompute optimal"):
        run(parallel="single", recompute="optimal")


BOXES = {"tile": 1024, "norm": "frozen", "batch": 1}


def test_boxes_are_taken_where_nothing_else_fits(run, tmp_path):
    (said,), strategy = run(**BOXES, memory="490MiB")
    assert f"single, m=1 +stream {strategy.policy.stream}, " in said
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["stream_px"] == strategy.policy.stream
    assert written["host_bytes"] >= 3 * 1024**2
    with pytest.raises(RunError, match="nothing fits in 490 MiB a rank"):
        run(**BOXES, memory="490MiB", offload_state="parameters")


def test_the_side_of_boxes_is_chosen_by_memory(run):
    asked = {**BOXES, "parallel": "single", "stream": "auto"}
    whole, small, larger = (run(**asked, memory=memory)[1].policy.stream for memory in (None, "490MiB", "700MiB"))
    assert whole == 512
    assert small < larger
    with pytest.raises(RunError, match="limited by parameters"):
        run(**asked, memory="300MiB")
    with pytest.raises(RunError, match="tiles of 128 px are one box: leave --stream out"):
        run(**asked | {"tile": 128}, memory="4GiB")


@pytest.mark.usefixtures("v100s")
def test_two_ranks(run, tmp_path):
    said, strategy = run(ranks=2, batch=4, epoch_tiles=4000)
    assert str(strategy) in said[0]
    assert "plan: an epoch takes" in said[1]
    assert "4,000 tiles, 1,000 steps" in said[1]
    assert planned_speed(tmp_path, strategy.name) > 0
    assert planned_speed(tmp_path, "gpipe") is None


@pytest.mark.usefixtures("v100s")
def test_a_plan_of_bags_claims_no_speed(run, tmp_path):
    """A step of bags has one more forward pass of each tile, which plans leave out."""
    (said,), strategy = run(ranks=2, batch=4, bag=2, epoch_tiles=4000)
    assert "images/s" not in said
    assert planned_speed(tmp_path, strategy.name) is None


@pytest.mark.parametrize("changed", [{}, {"freeze": ("layer1",)}, {"offload_state": "optimizer"}], ids=str)
def test_whole_slides_are_refused_only_where_the_plan_counts_what_the_run_takes(changed):
    """Plans count frozen layers as trained, and state on the host as on the device."""
    asked = {"model": "resnet18", "tile": "slide", "parallel": "single", "batch": 1, "memory": "100MiB"}
    config = with_values(RunConfig(DataSettings(Path("slides"))), asked | changed)
    refused = contextlib.nullcontext() if changed else pytest.raises(RunError, match="--tile slide takes")
    with refused:
        check_largest(config, (512, 512), 2, False)


def test_a_run_that_plans_nothing_leaves_no_plan_of_an_earlier_start(tmp_path):
    """Its page showed that plan as the forecast of this run."""
    (tmp_path / "plan.json").touch()
    config = with_values(RunConfig(DataSettings(Path("slides"))), {"parallel": "single"})
    tiles = SimpleNamespace(sides=None)
    dataset = SimpleNamespace(classes=("a", "b"), task="classify", tiles=tiles, rows=lambda split: [0])
    _plan(config, RunFolder(tmp_path), dataset)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.usefixtures("v100s")
def test_what_a_named_strategy_computes_again_is_planned(run):
    named = {
        "tile": 512,
        "parallel": "gpipe",
        "ranks": 2,
        "recompute": "optimal",
        "memory": "1140MiB",
        "cuts": "layer2",
    }
    (said,), strategy = run(**named)
    assert said.startswith("plan: gpipe 1 x 2, m=4 +recompute optimal")
    assert (strategy.name, strategy.depth, strategy.m) == ("gpipe", 2, 4)
    assert strategy.cuts[0].startswith("layer2")
    assert strategy.policy.chosen
    with pytest.raises(RunError, match="--recompute optimal found nothing of gpipe"):
        run(**named | {"memory": "790MiB"})
    assert run(**named | {"parallel": "ddp", "cuts": "", "memory": "16GiB"})[1].policy.chosen == ()
    with pytest.raises(RunError, match="--recompute optimal has to look into the model"):
        run(**named | FORKED)
    with pytest.raises(RunError, match=r"^the cuts \['layer9'\] do not split the model"):
        run(**named | {"cuts": "layer9"})
