"""Runs whose ranks are threads of this process, which share its slides."""

import contextlib
import copy
import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from app.launch.place import RankPlacement
from app.launch.watchdog import Interrupt, Watchdog
from app.settings.cli import RunError
from app.settings.fields import with_values
from app.settings.run import DataSettings, RunConfig
from app.settings.strategy_errors import strategy_errors
from app.training import model as model_module
from app.training.dataset import prepare
from app.training.loop import TrainingLoop
from app.training.run_folder import RunFolder
from app.training.session import Session
from app.training.summary import RunSummary
from parallel.comm.thread_comm import run_on_threads
from pipelines.catalog.table import FailedSlides
from tests.app.conftest import losses_of
from tests.helpers import tiny_models

torch.manual_seed(0)
MODELS = {"tiny": tiny_models.classifier(2), "segmenter": tiny_models.segmenter(2)}
for norm in (module for net in MODELS.values() for module in net.modules() if isinstance(module, nn.BatchNorm2d)):
    # Maps of a white tile are one value, normalised to rounding errors 300 times as large: ReLU passes them by chance.
    norm.eps = 0.01
    nn.init.uniform_(norm.bias, 0.1, 0.2)

BATCH, M, STEPS = 5, 4, 4
# SGD: AdamW's first updates are the signs of the gradients, which rounding flips where they are almost 0.
VALUES = {"tile": 128, "model": "tiny", "batch": BATCH, "microbatches": M, "device": "cpu", "steps": STEPS}
VALUES |= {"optimizer": "sgd", "lr": 0.01, "validation_tiles": 3, "twin_steps": 0}


@pytest.fixture(scope="module", autouse=True)
def one_model():
    """Threads share the generator that weights are drawn with, so they are drawn once."""
    build = model_module.build_model
    with pytest.MonkeyPatch.context() as patch:
        drawn_once = lambda name, **more: copy.deepcopy(MODELS[name]) if name in MODELS else build(name, **more)  # noqa: E731
        patch.setattr(model_module, "build_model", drawn_once)
        yield


@dataclass(frozen=True)
class Ran:
    """What a run leaves: losses of its steps, scores, checkpoint, its folder, and the slides each rank had open."""

    losses: list
    metrics: dict
    state: dict
    folder: RunFolder
    opened: list

    @property
    def summary(self):
        return json.loads(self.folder.summary.read_text())


def config_of(slides, out, **values):
    """The settings of a run, by name."""
    return with_values(RunConfig(DataSettings(slides), out=out), VALUES | values)


def prepared(config):
    return prepare(config, RunFolder(config.out), lambda line: None)


@pytest.fixture(scope="module")
def data(classify_slides, tmp_path_factory):
    return prepared(config_of(classify_slides, tmp_path_factory.mktemp("data")))


def train_on_threads(config, dataset):
    """A run, which ends as ``app.train`` ends it."""
    assert strategy_errors(config.strategy) == []
    folder = RunFolder(config.out)
    config.out.mkdir(exist_ok=True)
    (config.out / "config.yaml").write_text("{}")

    def rank(communicator, _):
        place, watchdog = RankPlacement(communicator, torch.device("cpu")), Watchdog(communicator.rank, stuck_s=60)
        strategy = config.strategy.to_strategy("cpu")
        session = Session(config, strategy, dataset, place, FailedSlides(folder.failed_slides), watchdog)
        loop = TrainingLoop(session, folder, Interrupt())
        summary = RunSummary(session, folder, loop, 0)
        try:
            outcome = loop.run()
            if loop.measures_twin:
                assert (loop.measure_twin() or 0) > 0
        except RunError as fault:
            summary.failed(str(fault), 0)
            raise
        finally:
            opened = tuple(session.pool._handles)
            session.close()
        if communicator.rank == 0:  # what finished() would write; its sums over ranks are not what is tested
            summary._write(loop.outcome.status, [[0], [0], [0], *([size] for size in summary._peaks(0)[3:]), []], None)
        return outcome.loss, outcome.metrics, opened

    ranks = run_on_threads(config.strategy.world, rank, timeout_s=60)
    assert len({(loss, tuple(metrics.items())) for loss, metrics, _ in ranks}) == 1
    state = torch.load(folder.last, weights_only=True)
    return Ran(losses_of(config.out), ranks[0][1], state, folder, [opened for _, _, opened in ranks])


@contextlib.contextmanager
def interrupted_after(steps):
    """Runs end after ``steps`` steps, of as many as were asked for: their rates fall as in the whole run."""
    finish = TrainingLoop._finish_step

    def finish_step(self, *arguments):
        return finish(self, *arguments) or self.outcome.step == steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_finish_step", finish_step)
        yield


def different(found, expected):
    """Tensors of model and optimizer that are not the same to the last bit."""
    ours, theirs = (
        {keystr(path): leaf for path, leaf in tree_flatten_with_path(part)[0] if isinstance(leaf, torch.Tensor)}
        for part in ((state["model"], state["optimizer"]) for state in (found, expected))
    )
    assert ours.keys() == theirs.keys()
    return [name for name, value in theirs.items() if not torch.equal(value, ours[name])]
