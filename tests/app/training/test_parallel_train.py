"""Training with the model split over ranks: the run of one process, whatever the strategy, reading and resume included.

Ranks are threads of this process, which share its slides.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import dataclasses
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from app.launch.place import RankPlace
from app.launch.rank_guard import Interrupt
from app.launch.watchdog import Watchdog
from app.settings.optimization import OptimizerSettings
from app.settings.run import DataSettings, ModelSettings, RunConfig, ScoreSettings, StrategySettings
from app.settings.strategy_errors import strategy_errors
from app.training import model as model_module
from app.training import resharing
from app.training import session as session_module
from app.training.dataset import Dataset, prepare
from app.training.engines import build_engine
from app.training.loop import TrainingLoop
from app.training.run_folder import RunFolder
from app.training.session import build_session
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.engine import Engine
from parallel.schedule.action import Action, Kind
from parallel.schedule.shares import read_changes
from parallel.strategy import Strategy
from pipelines.catalog.failures import FailedSlides
from pipelines.stream.augment import AugmentSettings
from pipelines.tiles.index_settings import IndexSettings
from tests.helpers import tiny_models

BATCH, M, STEPS = 5, 4, 4


@dataclass(frozen=True)
class Ran:
    """What a run on threads leaves: losses of its steps, scores, checkpoint, and the slides each rank had open."""

    losses: list[float]
    metrics: Mapping[str, float | None]
    state: dict[str, Any]
    opened: list[tuple[str, ...]]


def run_config(slides: Path, out: Path, twin_steps: int = 0, **strategy: Any) -> RunConfig:
    return RunConfig(
        DataSettings(slides),
        IndexSettings(tile=128),
        # SGD: AdamW's first updates are the signs of the gradients, which rounding flips where they are almost 0.
        optimization=OptimizerSettings(optimizer="sgd", lr=0.01),
        net=ModelSettings("tiny"),
        strategy=StrategySettings(**{"batch": BATCH, "microbatches": M, "device": "cpu"} | strategy),
        score=ScoreSettings(validation_tiles=3),
        out=out,
        steps=STEPS,
        twin_steps=twin_steps,
    )


def train_on_threads(config: RunConfig, dataset: Dataset) -> Ran:
    assert strategy_errors(config.strategy) == []

    def rank(communicator: Communicator, _: None) -> tuple[float | None, Mapping[str, float | None], tuple[str, ...]]:
        folder = RunFolder(config.out)
        mesh = RankPlace(communicator, torch.device("cpu"))
        watchdog = Watchdog(communicator.rank, stuck_s=60)
        strategy = config.strategy.to_strategy("cpu")
        session = build_session(config, strategy, dataset, mesh, FailedSlides(folder.failed_slides), watchdog)
        loop = TrainingLoop(session, folder, Interrupt())
        outcome = loop.run()
        if loop.measures_twin:
            assert (loop.measure_twin() or 0) > 0
        opened = session.pool.open_ids
        session.close()
        return outcome.loss, outcome.metrics, opened

    config.out.mkdir(exist_ok=True)
    ranks = run_on_threads(config.strategy.world, rank, timeout_s=60)
    assert len({(loss, tuple(metrics.items())) for loss, metrics, _ in ranks}) == 1
    with (config.out / "metrics.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    state: dict[str, Any] = torch.load(config.out / "checkpoints" / "last.pt", weights_only=True)
    return Ran(losses, ranks[0][1], state, [opened for _, _, opened in ranks])


@pytest.fixture(autouse=True)
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the generator that weights are drawn with, so they are drawn once."""

    def build(name: str, *, classes: int, norm: str, head: str, side: int | None) -> nn.Module:
        return copy.deepcopy(MODELS[name])

    monkeypatch.setattr(model_module, "build_model", build)


torch.manual_seed(0)
MODELS = {"tiny": tiny_models.classifier(2), "segmenter": tiny_models.segmenter(2)}
for norm in (module for net in MODELS.values() for module in net.modules() if isinstance(module, nn.BatchNorm2d)):
    # Maps of a white tile are one value, normalised to rounding errors 300 times as large: ReLU passes them by chance.
    norm.eps = 0.01
    nn.init.uniform_(norm.bias, 0.1, 0.2)


@pytest.fixture(scope="module")
def data(classify_slides: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    out = tmp_path_factory.mktemp("data")
    config = run_config(classify_slides, out)
    return classify_slides, prepare(config, RunFolder(out), lambda line: None)


Run = Callable[..., Ran]


@pytest.fixture
def run(data: tuple[Path, Dataset], tmp_path: Path) -> Run:
    """Trains with a strategy; each in a folder of its own unless it resumes."""
    numbers = itertools.count()

    def run(*, resume: Path | None = None, optimizer: Literal["sgd", "adamw"] = "sgd", **strategy: Any) -> Ran:
        config = run_config(data[0], resume or tmp_path / str(next(numbers)), **strategy)
        optimization = dataclasses.replace(config.optimization, optimizer=optimizer)
        config = dataclasses.replace(config, optimization=optimization, resume=resume is not None)
        return train_on_threads(config, data[1])

    return run


def assert_same(found: Ran, expected: Ran) -> None:
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
        pytest.param({"parallel": "master", "ranks": 4, "stages": 2}, marks=pytest.mark.long),
        {"parallel": "gpipe", "ranks": 2, "cuts": "6"},
        pytest.param({"parallel": "spatial", "ranks": 2}, marks=pytest.mark.long),
        {"parallel": "1f1b", "ranks": 4, "grid": "2x1"},
    ],
    ids=lambda strategy: "-".join(map(str, strategy.values())),
)
def test_every_strategy_trains_as_one_process(strategy: dict[str, Any], run: Run, single: Ran) -> None:
    assert_same(run(**strategy), single)


@pytest.fixture(scope="module")
def single(data: tuple[Path, Dataset], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "build_model", lambda name, **_: copy.deepcopy(MODELS[name]))
        return train_on_threads(run_config(data[0], tmp_path_factory.mktemp("single")), data[1])


def test_only_the_rank_that_feeds_the_model_opens_slides(run: Run) -> None:
    first, middle, last = run(parallel="1f1b", ranks=3).opened
    assert len(first) > 0
    assert (middle, last) == ((), ())


@pytest.mark.parametrize("order", [("gpipe", "ddp"), ("single", "bidirectional")])
def test_a_run_goes_on_under_another_strategy(order: tuple[str, str], run: Run, single: Ran, tmp_path: Path) -> None:
    ranks = {"single": 1}
    (tmp_path / "0").mkdir()
    # The rate falls with the number of steps: the run is interrupted after two of four, not planned to end there.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_finish_step", interrupted_after(2))
        run(parallel=order[0], ranks=ranks.get(order[0], 2))
    resumed = run(parallel=order[1], ranks=2, resume=tmp_path / "0")
    assert_same(resumed, single)


def test_ranks_read_their_shares_and_go_on_under_others(run: Run, single: Ran, tmp_path: Path) -> None:
    (tmp_path / "owners.csv").write_text("\n".join(["microbatch,group", *(f"{i},{int(i != 1)}" for i in range(M))]))
    assert_same(run(parallel="ddp", ranks=2, shares=str(tmp_path / "owners.csv")), single)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_finish_step", interrupted_after(2))
        run(parallel="gpipe", ranks=4, stages=2, shares=f"{M - 1},1")
    assert_same(run(parallel="ddp", ranks=2, shares=f"1,{M - 1}", resume=tmp_path / "1"), single)


@pytest.mark.long
@pytest.mark.parametrize(
    "asked", [{"parallel": "ddp", "ranks": 2}, {"parallel": "gpipe", "ranks": 4, "stages": 2}], ids=["ranks", "groups"]
)
def test_shares_follow_speeds_are_replayed_and_resumed(
    asked: dict[str, Any], run: Run, single: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is late: others take over from it after two looks, one a step. Then the same again by ``shares.csv``, bit
    for bit, and a run that stops behind the change and goes on."""
    slow_down_rank_0(monkeypatch)
    monkeypatch.setattr(resharing, "WINDOW", 1)
    followed = run(**asked, shares="auto")
    assert_same(followed, single)
    changes = read_changes((tmp_path / "0" / "shares.csv").read_text())
    assert changes == ((0, ((0, 1), (2, 3))), (2, ((0,), (1, 2, 3))))
    assert followed.state["shares"] == [[0], [1, 2, 3]]
    replayed = run(**asked, shares=str(tmp_path / "0" / "shares.csv"))
    assert all(torch.equal(replayed.state["model"][name], value) for name, value in followed.state["model"].items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_finish_step", interrupted_after(3))
        run(**asked, shares="auto")
    resumed = run(**asked, shares="auto", resume=tmp_path / "2")
    assert all(torch.equal(resumed.state["model"][name], value) for name, value in followed.state["model"].items())
    assert read_changes((tmp_path / "2" / "shares.csv").read_text()) == changes


@pytest.mark.long
def test_shares_that_change_with_the_last_step_do_not_reach_the_twin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin repeats the last batch, of the shares that it was read for; a run that goes on takes the others."""
    slow_down_rank_0(monkeypatch)
    monkeypatch.setattr(resharing, "WINDOW", STEPS // 2)
    assert run(parallel="ddp", ranks=2, shares="auto", twin_steps=1).state["shares"] == [[0], [1, 2, 3]]


def test_shares_of_other_microbatches_are_not_gone_on_with(run: Run, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_finish_step", interrupted_after(2))
        assert run(parallel="ddp", ranks=2, microbatches=None).state["shares"] == [[0], [1]]
    resumed = run(parallel="ddp", ranks=2, microbatches=None, shares="auto", resume=tmp_path / "0")
    assert resumed.state["shares"] == [[0, 1, 2], [3, 4]]
    assert len(resumed.losses) == STEPS


def slow_down_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it computes whole microbatches or stages of them."""

    computing = Engine._computing

    @contextlib.contextmanager
    def late(engine: Engine, position: int, action: Action) -> Iterator[None]:
        with computing(engine, position, action):
            time.sleep(0.4 * (engine._communicator.rank == 0 and action.kind is Kind.FORWARD))
            yield

    monkeypatch.setattr(resharing, "WARM_UP", 0)
    monkeypatch.setattr(Engine, "_computing", late)


def interrupted_after(steps: int) -> Callable[..., bool]:
    finish = TrainingLoop._finish_step

    def finish_step(self: TrainingLoop, *arguments: Any) -> bool:
        return finish(self, *arguments) or self.outcome.step == steps

    return finish_step


def test_an_interrupted_run_of_delayed_gradients_goes_on_bit_by_bit(run: Run, single: Ran, tmp_path: Path) -> None:
    """Between two steps the pipeline is empty: checkpoints and validation are as ever; the weights are others."""
    asked = {"optimizer": "adamw", "parallel": "pipedream", "ranks": 3, "recompute": "stage"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_finish_step", interrupted_after(2))
        half = run(**asked)
    resumed, undisturbed = run(resume=tmp_path / "0", **asked), run(**asked)
    assert (len(half.losses), resumed.losses) == (2, undisturbed.losses)
    assert different(resumed.state, undisturbed.state) == []
    assert undisturbed.losses[1:] != pytest.approx(single.losses[1:], rel=1e-3)
    assert undisturbed.metrics.keys() == single.metrics.keys()


OUT_OF_CORE = {"offload": "overlap", "recompute": "block", "offload_state": "parameters"}


@pytest.mark.parametrize(
    "strategy",
    [{"parallel": "single"}, pytest.param({"parallel": "gpipe", "ranks": 2}, marks=pytest.mark.long)],
    ids=["single", "gpipe"],
)
def test_an_interrupted_run_out_of_core_goes_on_bit_by_bit(
    strategy: dict[str, Any], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tensors are tiny here, and what is to be moved is moved; AdamW has the most to come back.
    def moving_all(strategy: Strategy, *more: Any, **named: Any) -> Any:
        return build_engine(strategy.under(smallest=0), *more, **named)

    monkeypatch.setattr(session_module, "build_engine", moving_all)
    asked = {"optimizer": "adamw", **strategy, **OUT_OF_CORE}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_finish_step", interrupted_after(2))
        half = run(**asked)
    resumed = run(resume=tmp_path / "0", **asked)
    undisturbed = run(**asked)
    assert (len(half.losses), resumed.losses) == (2, undisturbed.losses)
    assert different(half.state, undisturbed.state)
    assert different(resumed.state, undisturbed.state) == []


TEAM = {"parallel": "spatial", "ranks": 2, "grid": "2x1"}


@pytest.mark.long
def test_an_interrupted_team_goes_on_bit_by_bit_and_under_other_grids(run: Run, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_finish_step", interrupted_after(2))
        run(**TEAM)
    others: list[dict[str, Any]] = [TEAM | {"grid": "1x2"}, TEAM | {"parallel": "1f1b", "ranks": 4}, {}]
    for number in range(len(others)):
        shutil.copytree(tmp_path / "0", tmp_path / f"other-{number}")
    undisturbed = run(**TEAM)
    assert different(run(resume=tmp_path / "0", **TEAM).state, undisturbed.state) == []
    for number, other in enumerate(others):
        resumed = run(resume=tmp_path / f"other-{number}", **other)
        assert resumed.metrics == pytest.approx(undisturbed.metrics, rel=1e-5)
        for name, value in undisturbed.state["model"].items():
            assert (resumed.state["model"][name] - value).abs().max() <= 1e-5 * value.abs().max(), (other, name)


def different(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Tensors of model and optimizer that are not the same to the last bit."""
    ours, theirs = (
        {keystr(path): leaf for path, leaf in tree_flatten_with_path(part)[0] if isinstance(leaf, torch.Tensor)}
        for part in ((state["model"], state["optimizer"]) for state in (found, expected))
    )
    assert ours.keys() == theirs.keys()
    return [name for name, value in theirs.items() if not torch.equal(value, ours[name])]


@pytest.mark.long
@pytest.mark.parametrize("augment", ["device", "cpu"])
def test_masks_on_another_rank_are_varied_as_their_tiles(augment: Any, segment_slides: Path, tmp_path: Path) -> None:
    runs = []
    for name, strategy in (("one", {}), ("two", {"parallel": "gpipe", "ranks": 2}), ("team", TEAM)):
        config = run_config(segment_slides, tmp_path / name, **strategy)
        config = dataclasses.replace(
            config, net=ModelSettings("segmenter"), augmentation=AugmentSettings(augment), steps=2
        )
        config.out.mkdir()
        runs.append(train_on_threads(config, prepare(config, RunFolder(config.out), lambda line: None)))
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)
    assert runs[1].metrics == pytest.approx(runs[0].metrics, rel=1e-3)
    # One process is 3e-5 off the loss in float64 here, a team 1e-6: sums over its parts round less.
    assert runs[2].losses == pytest.approx(runs[0].losses, rel=1e-4)
    assert runs[2].metrics == pytest.approx(runs[0].metrics, rel=1e-3)
