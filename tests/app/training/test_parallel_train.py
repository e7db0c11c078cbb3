"""Training with the model split over ranks: the run of one process, whatever the strategy, reading and resume included.

Ranks are threads of this process, which share its slides.
"""

import contextlib
import copy
import itertools
import shutil
import time

import numpy as np
import pytest
import torch

from app.checkpoint.file import save_checkpoint
from app.prediction.trained_model import TrainedModel
from app.training import resharing
from app.training import session as session_module
from app.training.engines import build_engine
from parallel.engine.engine import Engine
from parallel.schedule.action import Kind
from parallel.schedule.shares import read_changes
from tests.app.conftest import QUICK, summary_of
from tests.app.training.conftest import (
    BATCH,
    MODELS,
    STEPS,
    M,
    config_of,
    different,
    interrupted_after,
    prepared,
    train_on_threads,
)

TEAM = {"parallel": "spatial", "ranks": 2, "grid": "2x1"}
LONG = pytest.mark.long


@pytest.fixture
def run(classify_slides, data, tmp_path):
    """Trains with a strategy; each in a folder of its own unless it resumes."""
    numbers = itertools.count()

    def run(*, resume=None, **values):
        out = resume or tmp_path / str(next(numbers))
        return train_on_threads(config_of(classify_slides, out, resume=resume is not None, **values), data)

    return run


@pytest.fixture(scope="module")
def single(classify_slides, data, tmp_path_factory):
    return train_on_threads(config_of(classify_slides, tmp_path_factory.mktemp("single")), data)


def assert_same(found, expected):
    """Up to float32 rounding, grown over a few steps."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-3)
    assert found.state["model"].keys() == expected.state["model"].keys()
    for name, value in expected.state["model"].items():
        assert (found.state["model"][name] - value).abs().max() <= 1e-3 * max(1, value.abs().max()), name
    assert found.state["images"] == expected.state["images"] == BATCH * STEPS
    assert found.state["stream"] == expected.state["stream"]


@pytest.mark.parametrize(
    "strategy",
    [
        {"parallel": "ddp", "ranks": 3},
        {"parallel": "1f1b", "ranks": 2, "recompute": "stage"},
        {"parallel": "interleaved", "ranks": 2},
        {"parallel": "master", "ranks": 2, "zero": 1},
        {"parallel": "gpipe", "ranks": 2, "cuts": "6"},
        {"parallel": "1f1b", "ranks": 4, "grid": "2x1"},
    ],
    ids=lambda strategy: "-".join(map(str, strategy.values())),
)
def test_every_strategy_trains_as_one_process(strategy, run, single):
    assert_same(run(**strategy), single)


def test_only_the_rank_that_feeds_the_model_opens_slides(run):
    first, middle, last = run(parallel="1f1b", ranks=3).opened
    assert len(first) > 0
    assert (middle, last) == ((), ())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"parallel": "gpipe", "ranks": 2}, {"parallel": "ddp", "ranks": 2}),
        ({}, {"parallel": "bidirectional", "ranks": 2}),
        (
            {"parallel": "gpipe", "ranks": 4, "stages": 2, "shares": f"{M - 1},1"},
            {"parallel": "ddp", "ranks": 2, "shares": f"1,{M - 1}"},
        ),
    ],
    ids=["gpipe-ddp", "single-bidirectional", "unequal shares"],
)
def test_a_run_goes_on_under_another_strategy(before, after, run, single, tmp_path):
    with interrupted_after(2):
        run(**before)
    assert_same(run(resume=tmp_path / "0", **after), single)


def test_ranks_read_their_shares(run, single, tmp_path):
    (tmp_path / "owners.csv").write_text("\n".join(["microbatch,group", *(f"{i},{int(i != 1)}" for i in range(M))]))
    assert_same(run(parallel="ddp", ranks=2, shares=str(tmp_path / "owners.csv")), single)


@pytest.fixture
def slow_rank_0(monkeypatch):
    """Slow rank 0 down, which computes whole microbatches or stages of them."""
    computing = Engine._computing

    @contextlib.contextmanager
    def late(engine, position, action):
        with computing(engine, position, action):
            time.sleep(0.4 * (engine._communicator.rank == 0 and action.kind is Kind.FORWARD))
            yield

    monkeypatch.setattr(resharing, "WARM_UP", 0)
    monkeypatch.setattr(Engine, "_computing", late)


@LONG
@pytest.mark.usefixtures("slow_rank_0")
@pytest.mark.parametrize(
    "asked", [{"parallel": "ddp", "ranks": 2}, {"parallel": "gpipe", "ranks": 4, "stages": 2}], ids=["ranks", "groups"]
)
def test_shares_follow_speeds_are_replayed_and_resumed(asked, run, single, tmp_path, monkeypatch):
    """Rank 0 is late: others take over from it after two looks, one a step. Then the same again by ``shares.csv``, bit
    for bit, and a run that stops behind the change and goes on."""
    monkeypatch.setattr(resharing, "WINDOW", 1)
    followed = run(**asked, shares="auto")
    assert_same(followed, single)
    changes = read_changes((tmp_path / "0" / "shares.csv").read_text())
    assert changes == ((0, ((0, 1), (2, 3))), (2, ((0,), (1, 2, 3))))
    assert followed.state["shares"] == [[0], [1, 2, 3]]
    replayed = run(**asked, shares=str(tmp_path / "0" / "shares.csv"))
    with interrupted_after(3):
        run(**asked, shares="auto")
    resumed = run(**asked, shares="auto", resume=tmp_path / "2")
    for other in (replayed, resumed):
        assert all(torch.equal(other.state["model"][name], value) for name, value in followed.state["model"].items())
    assert read_changes((tmp_path / "2" / "shares.csv").read_text()) == changes


@LONG
@pytest.mark.usefixtures("slow_rank_0")
def test_shares_that_change_with_the_last_step_do_not_reach_the_twin(run, monkeypatch):
    """The twin repeats the last batch, of the shares that it was read for; a run that goes on takes the others."""
    monkeypatch.setattr(resharing, "WINDOW", STEPS // 2)
    assert run(parallel="ddp", ranks=2, shares="auto", twin_steps=1).state["shares"] == [[0], [1, 2, 3]]


def test_shares_of_other_microbatches_are_not_gone_on_with(run, tmp_path):
    with interrupted_after(2):
        assert run(parallel="ddp", ranks=2, microbatches=None).state["shares"] == [[0], [1]]
    resumed = run(parallel="ddp", ranks=2, microbatches=None, shares="auto", resume=tmp_path / "0")
    assert resumed.state["shares"] == [[0, 1, 2], [3, 4]]
    assert len(resumed.losses) == STEPS


OUT_OF_CORE = {"optimizer": "adamw", "offload": "overlap", "recompute": "block", "offload_state": "parameters"}
AVERAGED = {
    "lr": 0.05,
    "ema": 0.9,
    "layer_decay": 0.5,
    "freeze": ("0", "1"),
    "validation_tiles": 1,
    "validate_every": 1,
}


@pytest.mark.parametrize(
    "asked",
    [
        {"optimizer": "adamw", "parallel": "pipedream", "ranks": 3, "recompute": "stage"},
        OUT_OF_CORE | {"parallel": "single"},  # AdamW has the most to come back
        AVERAGED,
    ],
    ids=["delayed gradients", "out of core", "averages"],
)
def test_an_interrupted_run_goes_on_bit_by_bit(asked, run, single, tmp_path, monkeypatch):
    """Delayed gradients leave the pipeline empty between two steps."""

    def moving_all(strategy, *more, **named):  # tensors are tiny here, and what is to be moved is moved
        return build_engine(strategy.under(smallest=0), *more, **named)

    if "offload" in asked:
        monkeypatch.setattr(session_module, "build_engine", moving_all)
    with interrupted_after(2):
        half = run(**asked)
    resumed, undisturbed = run(resume=tmp_path / "0", **asked), run(**asked)
    assert (len(half.losses), resumed.losses) == (2, undisturbed.losses)
    assert resumed.metrics == undisturbed.metrics
    assert different(half.state, undisturbed.state)
    assert different(resumed.state, undisturbed.state) == []
    if asked.get("parallel") == "pipedream":  # other weights than the plain step's
        assert undisturbed.losses[1:] != pytest.approx(single.losses[1:], rel=1e-3)
        assert undisturbed.metrics.keys() == single.metrics.keys()
    if asked is AVERAGED:
        average, model = undisturbed.state["average"], undisturbed.state["model"]
        assert average.keys() == {"3.weight", "4.weight", "4.bias", "9.weight", "9.bias"}
        assert all(not torch.equal(average[name], model[name]) for name in average)
        for name in ("0.weight", "1.weight", "1.running_mean", "1.num_batches_tracked"):
            assert torch.equal(model[name], MODELS["tiny"].state_dict()[name])


@LONG
def test_an_interrupted_team_goes_on_bit_by_bit_and_under_other_grids(run, tmp_path):
    with interrupted_after(2):
        run(**TEAM)
    others = [TEAM | {"grid": "1x2"}, TEAM | {"parallel": "1f1b", "ranks": 4}, {}]
    for number in range(len(others)):
        shutil.copytree(tmp_path / "0", tmp_path / f"other-{number}")
    undisturbed = run(**TEAM)
    assert different(run(resume=tmp_path / "0", **TEAM).state, undisturbed.state) == []
    for number, other in enumerate(others):
        resumed = run(resume=tmp_path / f"other-{number}", **other)
        assert resumed.metrics == pytest.approx(undisturbed.metrics, rel=1e-5)
        for name, value in undisturbed.state["model"].items():
            assert (resumed.state["model"][name] - value).abs().max() <= 1e-5 * value.abs().max(), (other, name)


@LONG
def test_masks_on_another_rank_are_varied_as_their_tiles(segment_slides, tmp_path):
    runs = []
    for name, strategy in (("one", {}), ("two", {"parallel": "gpipe", "ranks": 2}), ("team", TEAM)):
        config = config_of(segment_slides, tmp_path / name, model="segmenter", steps=2, **strategy)
        config.out.mkdir()
        runs.append(train_on_threads(config, prepared(config)))
    # One process is 3e-5 off the loss in float64 here, a team 1e-6: sums over its parts round less.
    for found, tolerance in zip(runs[1:], (1e-5, 1e-4), strict=True):
        assert found.losses == pytest.approx(runs[0].losses, rel=tolerance)
        assert found.metrics == pytest.approx(runs[0].metrics, rel=1e-3)


def test_predictions_are_those_of_the_averages(run, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tests.helpers:tiny", MODELS["tiny"])
    monkeypatch.setattr("app.prediction.trained_model.build_model", lambda name, **_: copy.deepcopy(MODELS[name]))
    state = run(model="tests.helpers:tiny", **AVERAGED).state
    state.pop("format")
    raw = {key: value for key, value in state.items() if key != "average"}
    states = {"kept": state, "raw": raw, "in place": raw | {"model": state["model"] | state["average"]}}
    images = np.random.default_rng(0).integers(0, 255, (2, 128, 128, 3), dtype=np.uint8)
    found = {}
    for name, each in states.items():
        save_checkpoint(tmp_path / f"{name}.pt", each)
        model = TrainedModel(tmp_path / f"{name}.pt", "tests.helpers:tiny", torch.device("cpu"))
        assert model.averaged == (name == "kept")
        found[name] = model.probabilities(images, (2, 3, 128, 128))
    assert np.array_equal(found["kept"], found["in place"])
    assert not np.allclose(found["kept"], found["raw"], atol=1e-4)


def test_a_run_that_gets_no_better_ends_on_all_ranks(run, tmp_path):
    """Weights that hardly move: the first validation stays the best, also where an interruption lies between."""
    asked = AVERAGED | {"lr": 1e-30, "patience": 2, "parallel": "gpipe", "ranks": 2, "steps": 8}
    with interrupted_after(3):
        state = run(**asked).state
    assert (state["step"], state["stale"], state["best"]["step"]) == (3, 1, 1)
    state = run(resume=tmp_path / "0", **asked).state
    assert (state["step"], state["stale"], state["best"]["step"]) == (3, 2, 1)


def test_the_summary_says_why_a_run_ended_early(classify_slides, tmp_path, train):
    out = tmp_path / "run"
    arguments = ("--slides", classify_slides, *QUICK, "--lr", "1e-30", "--freeze", "0", "--steps", "9", "--out", out)
    arguments += ("--validate-every=1", "--patience")
    said = " ".join(train(*arguments, "1").stdout.split())
    early = summary_of(out)["stopped_early"]
    assert (summary_of(out)["status"], summary_of(out)["steps"]) == ("completed", 2)
    assert (early["step"], early["validations"], early["best_step"]) == (2, 1, 1)
    assert f"stopped early at step 2: 1 validations in a row without a better score than {early['best_metric']}" in said
    assert "--freeze 0: 626 of 1,226 numbers are trained; without --weights the rest stays as" in said
    assert "--freeze 0: 626 of" in (out / "run.log").read_text()
    assert "was stopped early at step 2; ask for more --patience" in train(*arguments, "1", "--resume").stdout
    train(*arguments, "3", "--resume")
    assert (summary_of(out)["steps"], summary_of(out)["stopped_early"]["validations"]) == (4, 3)
