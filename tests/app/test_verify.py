"""``app.verify``: what it computes, finds and writes; faults that are put into an engine."""

import contextlib
import functools
import json

import pytest
import torch

from app.settings.strategy import StrategySettings
from app.training import plain_training
from app.verify import VerifyCommand, main, verify
from parallel.engine.engine import Engine
from parallel.engine.optimizer_step import OptimizerStep
from parallel.offload.copies import Copies
from parallel.schedule.registry import SCHEDULES
from parallel.stage.batchnorm import RunningStatistics, untouched
from parallel.stage.stage import Stage
from parallel.strategy import STALE
from parallel.team.team_comm import TeamComm
from tests.app.conftest import CLASSIFIER
from tests.helpers.forked import launched_here
from tests.helpers.in_process import call

TINY = ("--model", CLASSIFIER, "--tile", "96", "--batch", "6")
COMMAND = {"model", "norm", "head", "tile", "steps", "dtype", "communicator"}


def verified(parallel, ranks=1, **asked):
    """The result of a verification, settings by name."""
    command = {"model": CLASSIFIER, "tile": 96} | {key: asked.pop(key) for key in COMMAND & asked.keys()}
    return verify(
        VerifyCommand(StrategySettings(**{"parallel": parallel, "ranks": ranks, "batch": 6} | asked), **command)
    )


def assert_exact(result):
    assert result["passed"], result
    assert 0 <= result["max_relative_error"] <= 1e-10
    return result


@pytest.mark.parametrize("strategy", ["single", "ddp", *SCHEDULES, *STALE])
def test_every_strategy_is_exact(strategy):
    result = assert_exact(verified(strategy, ranks := 1 if strategy == "single" else 2, steps=2))
    assert (result["communicator"], result["ranks"]) == ("threads", ranks)
    assert result["errors"].keys() == {"0", "1", "3", "4", "9"}


@pytest.mark.parametrize(
    ("strategy", "ranks", "stages", "groups"), [("ddp", 3, None, [1, 0, 2, 0, 0, 1, 0, 0]), ("master", 4, 2, "1,3")]
)
def test_unequal_shares_are_exact(strategy, ranks, stages, groups, tmp_path):
    if not isinstance(groups, str):
        lines = ["microbatch,group", *(f"{i},{group}" for i, group in enumerate(groups))]
        (tmp_path / "owners.csv").write_text("\n".join(lines))
        groups = str(tmp_path / "owners.csv")
    asked = StrategySettings(strategy, ranks=ranks, stages=stages, batch=9, shares=groups)
    assert assert_exact(verified(strategy, ranks, stages=stages, batch=9, shares=groups))["microbatches"] == asked.m
    assert asked.m == sum(map(len, asked.asked_shares[0][1])) > asked.groups


def test_the_sum_of_unequal_shares_in_float32_is_a_rounding():
    """Sums are taken in another order than the plain step's, which ``passed`` allows for."""
    assert verified("ddp", 3, batch=9, shares="5,2,1", dtype="float32")["passed"]


CHANGING = "step,microbatch,group\n0,0,0\n0,1,1\n0,2,1\n40,0,1\n40,1,0\n40,2,0\n80,0,1\n80,1,1\n80,2,0\n"


@pytest.mark.parametrize(("ranks", "shares", "counts"), [(3, "auto", [1, 1, 1, 1, 7, 7]), (2, "file", [1, 1, 2, 2])])
def test_shares_that_change_between_steps_are_exact(ranks, shares, counts, tmp_path, monkeypatch):
    (tmp_path / "shares.csv").write_text(CHANGING)
    taken, reshare = [], Engine.reshare

    def noted(engine, shares):
        reshare(engine, shares)
        taken.append(engine.share)

    monkeypatch.setattr(Engine, "reshare", noted)
    shares = str(tmp_path / "shares.csv") if shares == "file" else shares
    assert assert_exact(verified("ddp", ranks, batch=9, shares=shares, communicator="threads"))["steps"] == 3
    assert sorted(map(len, taken)) == counts


@pytest.mark.parametrize(
    ("parallel", "ranks", "more"),
    [("gpipe", 6, {"stages": 2}), ("master", 4, {"stages": 2, "recompute": "stage"}), ("spatial", 4, {"grid": "2x1"})],
)
def test_shares_of_groups_that_change_between_steps_are_exact(parallel, ranks, more):
    result = assert_exact(verified(parallel, ranks, batch=12, shares="auto", communicator="threads", **more))
    assert (result["steps"], result["microbatches"]) == (3, 12)


def test_named_runs_of_layers_are_computed_again():
    assert_exact(verified("gpipe", 2, recompute="optimal", recompute_runs="_3:_5", steps=2))


@pytest.mark.parametrize(
    ("ranks", "norm", "head"), [(2, "frozen", "attention"), (1, "batch", "gem"), (2, "batch", "average")]
)
def test_tiles_in_boxes_are_exact(ranks, norm, head):
    parallel = "single" if ranks == 1 else "ddp"
    assert verified(parallel, ranks, batch=4, stream="40", norm=norm, head=head, tile=97, steps=2)["passed"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("parallel", "ranks", "more"),
    [
        ("1f1b", 2, ("--batch", "8", "--communicator", "gloo")),
        ("fsdp", 2, ("--dtype", "float32", "--microbatches", "3")),
        # Over torch's own replica, which sums gradients with whatever backward pass is a rank's last.
        ("ddp", 3, ("--shares", "auto", "--communicator", "gloo", "--device", "cpu")),
    ],
)
def test_ranks_that_are_processes(parallel, ranks, more, tmp_path):
    words = (*TINY, "--ranks", str(ranks), "--parallel", parallel, *more, "--out", tmp_path / "out")
    with launched_here(tmp_path):  # README's own line starts them one by one
        call("app.verify", *words, code=0)
    written = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert (written["communicator"], written["passed"]) == ("gloo", True)
    assert parallel == "fsdp" or 0 <= written["max_relative_error"] <= 1e-10


def test_what_it_writes(tmp_path, capsys):
    assert main([*TINY, "--parallel", "gpipe", "--ranks", "4", "--stages", "2", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "verify.json").read_text())
    assert written.keys() >= {"model", "communicator", "max_relative_error"}
    assert (written["strategy"], written["ranks"], written["stages"], written["passed"]) == ("gpipe", 4, 2, True)
    said = capsys.readouterr().out
    assert said.splitlines()[0].split() == ["module", "gradients", "parameters", "statistics", "optimizer"]
    assert f"passed: {CLASSIFIER} under gpipe on 4 ranks" in said
    assert main([*TINY, "--parallel", "gpipe", "--ranks", "2", "--norm-statistics=deferred"]) == 0
    assert "1       " in capsys.readouterr().out  # deferred statistics are left out


def test_a_wrong_gradient_is_found(monkeypatch, tmp_path, capsys):
    right, plain = plain_training.RandomProjectionLoss.value, plain_training.PlainTraining.step

    def step_right(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain_training.RandomProjectionLoss, "value", right)
            return plain(*arguments)

    monkeypatch.setattr(plain_training.RandomProjectionLoss, "value", lambda *given: 1.001 * right(*given))
    monkeypatch.setattr(plain_training.PlainTraining, "step", step_right)
    assert main([*TINY, "--parallel", "single", "--steps", "1", "--out", str(tmp_path)]) == 1
    assert "FAILED: " in capsys.readouterr().out
    written = json.loads((tmp_path / "verify.json").read_text())
    assert not written["passed"]
    assert written["max_relative_error"] == pytest.approx(1e-3, rel=0.1)
    assert min(group["gradients"] for group in written["errors"].values()) > 5e-4


def before_update(change):
    """A fault that does ``change`` before parameters are updated."""

    def fault(patch):
        right = OptimizerStep.apply

        def apply(update, *given, **more):
            change(update)
            right(update, *given, **more)

        patch.setattr(OptimizerStep, "apply", apply)

    return fault


def weighted(factor):
    """A fault in the weight of a microbatch's gradients."""

    def fault(patch):
        right = Stage.backward

        def backward(stage, i, gradients, weight, whole):
            return right(stage, i, gradients, weight * factor(stage, i), whole=whole)

        patch.setattr(Stage, "backward", backward)

    return fault


def double_bias(update):
    if (bias := update.owned.get("9.bias")) is not None:
        bias.grad *= 2


def set_momentum(update):
    for group in update.optimizer.param_groups:
        group["momentum"] = 0.89


def skipped_statistic(patch):
    """Batch norm does not count the second microbatch."""
    right = RunningStatistics.microbatch

    @contextlib.contextmanager
    def microbatch(statistics, i):
        with untouched(statistics._active if i == 1 else []), right(statistics, i):
            yield
        if i == 1 and i in statistics._records:  # for other ranks, or for later
            statistics._records[i].zero_()

    patch.setattr(RunningStatistics, "microbatch", microbatch)


def detached_halo(patch):
    """Gradients of rows and columns that came from another rank are lost."""
    right = TeamComm.send_halo_grads
    patch.setattr(
        TeamComm,
        "send_halo_grads",
        lambda link, exchange, gradients, *more: right(link, exchange, [gradient * 0 for gradient in gradients], *more),
    )


def lost_copies(patch):
    """Bring back zeros for what was moved to the host."""
    right = Copies.to_device

    def to_device(self, source):
        tensor, mark = right(self, source)
        return torch.zeros_like(tensor), mark

    patch.setattr(Copies, "to_device", to_device)


def drift(patch):
    """The second rank's copy of the model drifts; it is in no checkpoint, and only its next step shows it."""
    right = Engine.step

    def step(engine, *given):
        result = right(engine, *given)
        if engine._communicator.rank:
            with torch.no_grad():
                next(engine._work.stages[0].module.parameters()).mul_(1 + 1e-6)
        return result

    patch.setattr(Engine, "step", step)


lost_microbatch = weighted(lambda stage, i: i != 1)
lost_momentum = before_update(lambda update: update.optimizer.state.clear())
FAULTS = {
    "a lost microbatch": (lost_microbatch, "master", {}, "(gradients)"),
    "a doubled bias": (before_update(double_bias), "master", {}, "9.bias (gradients)"),
    "a skipped statistic": (skipped_statistic, "master", {}, "(statistics)"),
    "a wrong momentum": (before_update(set_momentum), "master", {}, "(parameters)"),
    "a momentum that is lost between steps": (lost_momentum, "master", {}, "(parameters)"),
    "a detached halo": (detached_halo, "spatial", {"grid": "2x1"}, "0.weight (gradients)"),
    "lost copies": (lost_copies, "ddp", {"offload": "overlap"}, ""),
    "a copy that drifts": (drift, "ddp", {}, ""),
}
TWO = {"tile": 64, "batch": 4, "steps": 2}


@functools.cache
def passes(parallel, **asked):
    return verified(parallel, 2, **TWO | asked)["passed"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, monkeypatch):
    put, parallel, asked, named = FAULTS[fault]
    assert passes(parallel, **asked)
    put(monkeypatch)
    result = verified(parallel, 2, **TWO, **asked)
    assert not result["passed"]
    assert any(named in tensor for tensor in result["exceeded"])
    assert fault != "a doubled bias" or result["exceeded"][0].startswith("9.bias")
    assert put is not drift or verified(parallel, 2, **TWO | {"steps": 1}, **asked)["passed"]


@pytest.mark.parametrize(
    ("put", "parallel", "more"), [(lost_microbatch, "1f1b", {}), (detached_halo, "spatial", {"grid": "2x1"})]
)
def test_a_fault_in_float32_is_not_called_rounding(put, parallel, more, monkeypatch):
    put(monkeypatch)
    result = verified(parallel, 2, dtype="float32", **TWO, **more)
    assert not result["passed"]
    assert result["float64_error"] > 1e-3


def test_rounding_in_float32_is_called_so(capsys, monkeypatch):
    """Add a share of each gradient that float64 does not have, as if one rounding had decided otherwise."""
    weighted(lambda stage, i: 1 + 1e-4 * (next(stage.module.parameters()).dtype == torch.float32))(monkeypatch)
    given = ("--model", CLASSIFIER, "--tile", "64", "--batch", "4", "--parallel", "1f1b", "--ranks", "2")
    assert main([*given, "--dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert "passed" in said
    assert "rounding" in said


def test_a_loss_that_is_not_finite_is_never_rounding(monkeypatch):
    right = OptimizerStep.apply

    def apply(update, *given, **more):
        right(update, *given, **more)
        for parameter in update.owned.values():
            if parameter.dtype == torch.float32:
                parameter.data.fill_(torch.inf)

    monkeypatch.setattr(OptimizerStep, "apply", apply)
    assert not verified("1f1b", 2, dtype="float32", **TWO | {"steps": 1})["passed"]
