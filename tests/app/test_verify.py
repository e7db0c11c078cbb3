"""``app.verify``: what it computes, finds and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.settings.strategy import StrategySettings
from app.training import exactness
from app.verify import VerifyCommand, main, verify
from parallel.engine.engine import Engine
from parallel.offload.copies import Copies
from parallel.schedule.registry import SCHEDULES
from parallel.strategy import STALE
from tests.helpers.forked import launched_here
from tests.helpers.in_process import call, put_back

TINY = ("--model", "tests.helpers.tiny_models:classifier", "--tile", "96", "--batch", "6")
FIELDS = {"model", "strategy", "ranks", "communicator", "max_relative_error", "passed"}


@pytest.mark.parametrize("strategy", ["single", "ddp", *SCHEDULES, *STALE])
def test_every_strategy_is_exact(strategy: Any) -> None:
    asked = StrategySettings(parallel=strategy, ranks=1 if strategy == "single" else 2, batch=6)
    result = verify(VerifyCommand(asked, model="tests.helpers.tiny_models:classifier", tile=96, steps=2))
    assert result is not None
    assert result.passed, result
    assert (result.communicator, result.ranks) == ("threads", asked.ranks)
    assert 0 <= result.max_relative_error <= 1e-10
    assert result.errors.keys() == {"0", "1", "3", "4", "9"}


@pytest.mark.parametrize(
    ("strategy", "ranks", "stages", "groups", "dtype"),
    [
        ("ddp", 2, None, "3,1", "float64"),
        ("ddp", 3, None, [1, 0, 2, 0, 0, 1, 0, 0], "float64"),
        ("gpipe", 4, 2, [1, 0, 1, 1], "float64"),
        ("master", 4, 2, "1,3", "float64"),
        ("ddp", 3, None, "5,2,1", "float32"),
    ],
)
def test_unequal_shares_are_exact(
    strategy: Any, ranks: int, stages: int | None, groups: Any, dtype: Any, tmp_path: Path
) -> None:
    if not isinstance(groups, str):
        lines = ["microbatch,group", *(f"{i},{group}" for i, group in enumerate(groups))]
        (tmp_path / "owners.csv").write_text("\n".join(lines))
        groups = str(tmp_path / "owners.csv")
    asked = StrategySettings(parallel=strategy, ranks=ranks, stages=stages, batch=9, shares=groups)
    result = verify(VerifyCommand(asked, model="tests.helpers.tiny_models:classifier", tile=96, dtype=dtype))
    assert result is not None
    assert result.passed, result
    assert result.microbatches == asked.m > asked.groups
    assert asked.m == sum(map(len, asked.asked_shares[0][1]))
    # In float32 the sum over ranks in another order than the plain step's is a rounding, which ``passed`` allows for.
    assert dtype == "float32" or 0 <= result.max_relative_error <= 1e-10


CHANGING = "step,microbatch,group\n0,0,0\n0,1,1\n0,2,1\n40,0,1\n40,1,0\n40,2,0\n80,0,1\n80,1,1\n80,2,0\n"


@pytest.mark.parametrize("ways", [("threads", 3, "auto"), ("threads", 2, "file")])
def test_shares_that_change_between_steps_are_exact(ways: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    communicator, ranks, shares = ways
    (tmp_path / "shares.csv").write_text(CHANGING)
    taken, reshare = [], Engine.reshare

    def noted(engine: Engine, shares: Any) -> None:
        reshare(engine, shares)
        taken.append(engine.share)

    monkeypatch.setattr(Engine, "reshare", noted)
    shares = str(tmp_path / "shares.csv") if shares == "file" else shares
    asked = StrategySettings(parallel="ddp", ranks=ranks, batch=9, shares=shares)
    model = "tests.helpers.tiny_models:classifier"
    result = verify(VerifyCommand(asked, model=model, tile=96, communicator=communicator))
    assert result is not None
    assert result.passed, result
    assert 0 <= result.max_relative_error <= 1e-10
    assert result.steps == 3
    assert sorted(map(len, taken)) == ([1, 1, 1, 1, 7, 7] if shares == "auto" else [1, 1, 2, 2])


@pytest.mark.parametrize(
    ("parallel", "ranks", "stages", "more"),
    [
        ("gpipe", 6, 2, {}),
        ("master", 4, 2, {"recompute": "stage"}),
        ("1f1b", 4, 2, {"offload": "activations"}),
        ("interleaved", 4, 2, {"chunks": 2}),
        ("spatial", 4, None, {"grid": "2x1"}),
    ],
)
def test_shares_of_groups_that_change_between_steps_are_exact(
    parallel: Any, ranks: int, stages: int | None, more: dict[str, Any]
) -> None:
    asked = StrategySettings(parallel=parallel, ranks=ranks, stages=stages, batch=12, shares="auto", **more)
    result = verify(VerifyCommand(asked, model="tests.helpers.tiny_models:classifier", tile=96, communicator="threads"))
    assert result is not None
    assert result.passed, result
    assert (result.steps, result.microbatches) == (3, 12)
    assert 0 <= result.max_relative_error <= 1e-10


@pytest.mark.process
def test_shares_that_change_between_steps_are_exact_over_gloo(tmp_path: Path) -> None:
    """Over torch's own replica, which sums gradients with whatever backward pass is a rank's last."""
    words = (
        *TINY,
        "--ranks",
        "3",
        "--parallel",
        "ddp",
        "--shares",
        "auto",
        "--communicator",
        "gloo",
        "--device",
        "cpu",
    )
    with put_back(), launched_here(tmp_path):
        code = main([*words, "--out", str(tmp_path / "out")])
    written = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert (code, written["communicator"], written["passed"], written["steps"]) == (0, "gloo", True, 3)
    assert 0 <= written["max_relative_error"] <= 1e-10


def test_named_runs_of_layers_are_computed_again() -> None:
    asked = StrategySettings(parallel="gpipe", ranks=2, batch=6, recompute="optimal", recompute_runs="_3:_5")
    result = verify(VerifyCommand(asked, model="tests.helpers.tiny_models:classifier", tile=96, steps=2))
    assert result is not None
    assert result.passed, result


@pytest.mark.parametrize(
    ("ranks", "norm", "head"),
    [(1, "frozen", "average"), (2, "frozen", "attention"), (1, "batch", "gem"), (2, "batch", "average")],
)
def test_tiles_in_boxes_are_exact(ranks: int, norm: Any, head: Any) -> None:
    asked = StrategySettings(parallel="single" if ranks == 1 else "ddp", ranks=ranks, batch=4, stream="40")
    model = "tests.helpers.tiny_models:classifier"
    result = verify(VerifyCommand(asked, model=model, norm=norm, head=head, tile=97, steps=2))
    assert result is not None
    assert result.passed, result


def test_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--parallel", "gpipe", "--ranks", "4", "--stages", "2", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "verify.json").read_text())
    assert written.keys() >= FIELDS
    assert (written["strategy"], written["ranks"], written["stages"], written["passed"]) == ("gpipe", 4, 2, True)
    said = capsys.readouterr().out
    assert said.splitlines()[0].split() == ["module", "gradients", "parameters", "statistics", "optimizer"]
    assert "passed: tests.helpers.tiny_models:classifier under gpipe on 4 ranks" in said


def test_a_wrong_gradient_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def biased(loss: exactness.ProjectedError, sums: Tensor, pixels: int) -> Tensor:
        return 1.001 * right(loss, sums, pixels)

    right, plain = exactness.ProjectedError.value, exactness.PlainTraining.step

    def step_right(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exactness.ProjectedError, "value", right)
            return plain(*arguments)

    monkeypatch.setattr(exactness.ProjectedError, "value", biased)
    monkeypatch.setattr(exactness.PlainTraining, "step", step_right)
    assert main([*TINY, "--parallel", "single", "--steps", "1", "--out", str(tmp_path)]) == 1
    assert "FAILED: " in capsys.readouterr().out
    written = json.loads((tmp_path / "verify.json").read_text())
    assert not written["passed"]
    assert written["max_relative_error"] == pytest.approx(1e-3, rel=0.1)
    assert torch.tensor([group["gradients"] for group in written["errors"].values()]).min() > 5e-4


def test_a_tensor_that_comes_back_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def to_device(self: Copies, source: Tensor) -> tuple[Tensor, Any]:
        tensor, mark = right(self, source)
        return torch.zeros_like(tensor), mark

    right = Copies.to_device
    assert main([*TINY, "--parallel", "ddp", "--ranks", "2", "--offload", "overlap"]) == 0
    monkeypatch.setattr(Copies, "to_device", to_device)
    assert main([*TINY, "--parallel", "ddp", "--ranks", "2", "--offload", "overlap"]) == 1
    assert "FAILED: " in capsys.readouterr().out


@pytest.mark.process
def test_ranks_that_are_processes(tmp_path: Path) -> None:
    for more in (
        ("1f1b", "--batch", "8", "--communicator", "gloo"),
        ("fsdp", "--dtype", "float32", "--microbatches", "3"),
    ):
        ranks = tmp_path / more[0]
        ranks.mkdir()
        with launched_here(ranks):  # README's own line starts them one by one
            done = call("app.verify", *TINY, "--ranks", "2", "--out", tmp_path, "--parallel", *more)
        assert done.returncode == 0, done.stdout + done.stderr
        written = json.loads((tmp_path / "verify.json").read_text())
        assert (written["communicator"], written["passed"]) == ("gloo", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--communicator", "mpi"), "--communicator mpi does not fit ranks started by nothing"),
        (("--precision", "bf16", "--steps", "0"), "--steps must be at least 1; got 0"),
        (("--precision", "tf32"), "--precision tf32 rounds far more than strategies differ"),
        (("--parallel", "gpipe", "--ranks", "2", "--cuts=nowhere"), "nowhere"),
        (("--ranks", "2"), "name the strategy to verify"),
        (("--parallel", "fsdp", "--ranks", "2", "--communicator", "threads"), "fsdp talks over torch.distributed"),
        (
            ("--recompute", "optimal"),
            "--recompute optimal is planned for a memory, by app.train or by app.plan --out; got",
        ),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_deferred_statistics_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--parallel", "gpipe", "--ranks", "2", "--norm-statistics=deferred"]) == 0
    assert "1       " in capsys.readouterr().out
