"""``--parallel auto``: planned once, kept, followed by every rank, and taken up again by a resumed run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from app.planning.auto import decided, follow, plan_run, plan_text, planned_speed, savings_of
from app.planning.machine import Machine
from app.settings.cli import RunError
from app.settings.run import DataSettings, ModelSettings, RunConfig
from app.settings.strategy import Parallel, StrategySettings
from parallel.memory.policy import ActivationPolicy
from parallel.plan.candidates import MemoryOptions
from parallel.plan.plan import PlanRow
from parallel.strategy import Strategy
from pipelines.tiles.index_settings import IndexSettings

CONFIG = RunConfig(
    DataSettings(Path("slides")), index=IndexSettings(tile=64, stride=64), net=ModelSettings(model="resnet18")
)


class Forked(nn.Module):
    """Its forward depends on the data, so it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean((2, 3))
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


def forked(classes: int) -> nn.Module:
    assert classes == 2
    return Forked()


def run(config: RunConfig, folder: Path) -> list[str]:
    said: list[str] = []
    plan_run(config, 2, False, folder, said.append)
    return said


def chosen(config: RunConfig, folder: Path) -> Strategy:
    return decided(config.strategy, folder, "cpu", plan_text(folder))


def test_one_rank_is_planned_without_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("app.planning.machine.load_or_calibrate")
    (said,) = run(CONFIG, tmp_path)
    assert said.startswith("plan: single, m=1")
    assert chosen(CONFIG, tmp_path) == Strategy("single", 1, 1, 1)


def test_one_rank_with_little_memory_takes_smaller_microbatches(tmp_path: Path) -> None:
    wide = replace(CONFIG, index=IndexSettings(tile=512, stride=512))
    tight = replace(wide, strategy=StrategySettings(memory="800MiB"))
    (said,) = run(tight, tmp_path)
    assert "single, m=4" in said
    with pytest.raises(
        RunError, match=r"nothing fits in 100 MiB a rank: single, m=8 \+recompute block \+offload needs least"
    ):
        run(replace(wide, strategy=StrategySettings(memory="100MiB")), tmp_path)


def test_a_resumed_run_keeps_its_plan_unless_the_problem_changed(tmp_path: Path) -> None:
    run(CONFIG, tmp_path)
    written = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(written | {"m": 4}))
    assert run(replace(CONFIG, resume=True), tmp_path) == []
    assert chosen(CONFIG, tmp_path).m == 4
    with pytest.MonkeyPatch.context() as patch:  # the same settings, on a machine with another precision
        patch.setattr("app.planning.machine.decide_precision", lambda *_: "bf16")
        assert run(replace(CONFIG, resume=True), tmp_path) != []
    assert json.loads((tmp_path / "plan.json").read_text())["problem"]["precision"] == "bf16"
    assert run(CONFIG, tmp_path) != []
    assert chosen(CONFIG, tmp_path).m == 1


def test_a_model_that_cannot_be_traced_is_not_split(tmp_path: Path) -> None:
    config = replace(CONFIG, net=ModelSettings(model="tests.app.planning.test_auto:forked"))
    (said,) = run(config, tmp_path)
    assert "cannot be planned for" in said
    assert chosen(config, tmp_path).name == "single"


def test_a_named_strategy_is_left_alone(tmp_path: Path) -> None:
    named = replace(CONFIG, strategy=StrategySettings("1f1b", ranks=2))
    assert chosen(named, tmp_path) == named.strategy.to_strategy("cpu") == Strategy("1f1b", 2, 2, 4)


def test_a_missing_plan_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="name a strategy with --parallel"):
        chosen(CONFIG, tmp_path)


def test_everything_that_a_row_decides_is_followed() -> None:
    row = PlanRow(Strategy("master", 4, 2, 8, cuts=("layer2",), zero=1).under(recompute="stage"))
    assert follow(StrategySettings(ranks=4), row, "cpu") == row.strategy
    again = Strategy("ddp", 2, 1, 8).under(
        recompute="optimal", chosen=(("a", "b"), ("d", "d")), offload="overlap", ahead=3 << 20
    )
    assert follow(StrategySettings(ranks=2), PlanRow(again), "cpu") == again
    chunks = Strategy("interleaved", 2, 2, 4, 2, ("a", "b", "c"))
    assert follow(StrategySettings(ranks=2), PlanRow(chunks), "cpu") == chunks
    assert {"auto", row.strategy.name} <= set(get_args(Parallel))


def test_what_plans_have_no_say_in_is_as_asked_for() -> None:
    asked = StrategySettings(
        offload_ahead="8MiB", offload_host="1GiB", offload_state="optimizer", norm_statistics="deferred", compile=True
    )
    strategy = follow(asked, PlanRow(Strategy("single", 1, 1, 2).under(offload="overlap", ahead=3 << 20)), "cpu")
    assert strategy.policy == ActivationPolicy(offload="overlap", ahead=8 << 20, host_bytes=1 << 30, optimizer=True)
    assert (strategy.statistics, strategy.compile, strategy.m) == ("deferred", True, 2)


def test_what_a_user_asks_to_save_is_not_searched() -> None:
    assert savings_of(StrategySettings()) == MemoryOptions()
    assert savings_of(StrategySettings(recompute="block")) == MemoryOptions(("block",), (False, True))
    assert savings_of(StrategySettings(offload="overlap")) == MemoryOptions(offload=(True,))


def test_savings_asked_for_are_in_the_plan(tmp_path: Path) -> None:
    asked = replace(CONFIG, strategy=StrategySettings(recompute="block", offload="overlap", offload_ahead="8MiB"))
    (said,) = run(asked, tmp_path)
    assert "+recompute block +offload" in said
    assert chosen(asked, tmp_path).policy == ActivationPolicy("block", offload="overlap", ahead=8 << 20)


BOXES = replace(CONFIG, index=IndexSettings(tile=1024, stride=1024), net=ModelSettings(model="resnet18", norm="frozen"))


def test_boxes_are_taken_where_nothing_else_fits(tmp_path: Path) -> None:
    tight = replace(BOXES, strategy=StrategySettings(memory="490MiB", batch=1))
    (said,) = run(tight, tmp_path)
    strategy = chosen(tight, tmp_path)
    assert f"single, m=1 +stream {strategy.policy.stream}, " in said
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["stream_px"] == strategy.policy.stream
    assert written["host_bytes"] >= 3 * 1024**2
    parameters_only = replace(tight, strategy=replace(tight.strategy, offload_state="parameters"))
    with pytest.raises(RunError, match="nothing fits in 490 MiB a rank"):
        run(parameters_only, tmp_path)


def test_the_side_of_boxes_is_chosen_by_memory(tmp_path: Path) -> None:
    sides = []
    for memory in (None, "490MiB", "700MiB"):
        asked = replace(BOXES, strategy=StrategySettings("single", memory=memory, batch=1, stream="auto"))
        run(asked, tmp_path)
        sides.append(chosen(asked, tmp_path).policy.stream)
    assert sides[0] == 512
    assert sides[1] < sides[2]
    small = replace(BOXES, strategy=StrategySettings("single", memory="300MiB", batch=1, stream="auto"))
    with pytest.raises(RunError, match="limited by parameters"):
        run(small, tmp_path)


def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.planning.machine import named_machine

    monkeypatch.setattr("app.planning.machine.this_machine", lambda ranks, **more: named_machine("v100-16gb", ranks))
    config = replace(CONFIG, strategy=StrategySettings(ranks=2, batch=4))
    said: list[str] = []
    plan_run(config, 2, False, tmp_path, said.append, epoch_tiles=4000)
    assert str(chosen(config, tmp_path)) in said[0]
    assert "plan: an epoch takes" in said[1]
    assert "4,000 tiles, 1,000 steps" in said[1]
    name = chosen(config, tmp_path).name
    assert (planned_speed(tmp_path, name) or 0) > 0
    assert planned_speed(tmp_path, "gpipe") is None
    assert torch.get_num_threads() >= 1


def test_what_a_named_strategy_computes_again_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.planning.machine import named_machine

    def machine(ranks: int, *, memory: int, **more: object) -> Machine:
        return named_machine("v100-16gb", ranks, memory=memory)

    monkeypatch.setattr("app.planning.machine.this_machine", machine)
    wide = replace(CONFIG, index=IndexSettings(tile=512, stride=512))
    named = StrategySettings("gpipe", ranks=2, recompute="optimal", memory="1140MiB", cuts="layer2")
    config = replace(wide, strategy=named)
    (said,) = run(config, tmp_path)
    assert said.startswith("plan: gpipe 1 x 2, m=4 +recompute optimal")
    strategy = chosen(config, tmp_path)
    assert (strategy.name, strategy.depth, strategy.m) == ("gpipe", 2, 4)
    assert strategy.cuts[0].startswith("layer2")
    assert strategy.policy.chosen
    with pytest.raises(RunError, match="--recompute optimal found nothing of gpipe"):
        run(replace(wide, strategy=replace(named, memory="790MiB")), tmp_path)
    plenty = replace(wide, strategy=replace(named, parallel="ddp", cuts="", memory="16GiB"))
    run(plenty, tmp_path)
    assert chosen(plenty, tmp_path).policy.chosen == ()
    forked = replace(config, net=ModelSettings(model="tests.app.planning.test_auto:forked"))
    with pytest.raises(RunError, match="--recompute optimal has to look into the model"):
        run(forked, tmp_path)
