"""Options of ``app.train``: stains, pretrained weights, twin steps, gradient buckets, mixed devices."""

import functools
import importlib
import json
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from app.prediction.trained_model import TrainedModel
from app.settings.optimization import ModelSettings, OptimizerSettings
from app.settings.run import DataSettings, RunConfig
from app.settings.strategy import StrategySettings
from app.train import main
from app.training.engines import build_engine, build_optimizer
from app.training.loop import TrainingLoop
from app.training.model import build_run_model
from models.registry import CENTRED, build_model
from models.weights import IMAGENET
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import NonFiniteLoss
from pipelines.catalog.catalog import find_slides
from pipelines.tiles.stain import StainFit
from tests.app.conftest import CLASSIFIER, QUICK, checkpoint_of, losses_of, same_weights, summary_of
from tests.helpers.forked import run_ranks
from tests.helpers.in_process import call
from tests.helpers.local_hub import random_timm, use_local_hub
from tests.helpers.small_nets import drawn_once

PROCESS = pytest.mark.process
TARGET = "slide_0002"
STAINED = (*QUICK, "--steps", "2", "--stain", "macenko", f"--stain-target={TARGET}")


@pytest.fixture(scope="module")
def stained(classify_slides, tmp_path_factory, train):
    out = tmp_path_factory.mktemp("stain") / "run"
    done = train("--slides", classify_slides, *STAINED, "--out", out)
    assert "stains of 6 slides are looked at (macenko)" in done.stdout
    return out


@PROCESS
def test_ranks_and_boxes_compute_the_same_from_normalised_tiles(stained, classify_slides, tmp_path, train_ranks):
    split = ("--ranks", "2", "--parallel", "1f1b", "--stream", "64")
    train_ranks("--slides", classify_slides, *STAINED, *split, "--out", tmp_path)
    assert losses_of(tmp_path) == pytest.approx(losses_of(stained), rel=1e-4)


@PROCESS
def test_a_resumed_run_uses_the_stains_that_were_found_and_others_are_refused(stained, classify_slides, train):
    asked = ("--slides", classify_slides, *STAINED, "--out", stained)
    before = (stained / "stains.json").read_bytes()
    assert "are looked at" not in train(*asked, "--steps", "3", "--resume", "--extend").stdout
    assert (stained / "stains.json").read_bytes() == before
    for words, message in (
        (("--steps", "3", "--stain", "reinhard", "--resume"), "stain: the run has 'macenko', asked is 'reinhard'"),
        (("--out", stained.parent / "new", "--stain-target=nobody"), "stain-target nobody cannot be the target"),
        (("--augment", "cpu"), "--augment cpu varies colours before tiles reach the device"),
    ):
        assert message in train(*asked, *words, code=2).stderr


@PROCESS
def test_prediction_follows_the_stains_of_the_checkpoint(stained, classify_slides, tmp_path, monkeypatch):
    asked, begin = set(), TrainedModel.begin

    def told(model, images, shape, stain=None):
        asked.add(stain)
        with_it, without = (begin(model, images, shape, fit) for fit in (stain, None))
        assert np.abs(with_it() - without()).max() > 1e-4, "it was not normalised"
        return with_it

    monkeypatch.setattr(TrainedModel, "begin", told)
    (tmp_path / "slides").mkdir()
    spec, checkpoint = find_slides(classify_slides)[0], stained / "checkpoints" / "last.pt"
    (tmp_path / "slides" / spec.path.name).symlink_to(spec.path)
    words = ("--slides", tmp_path / "slides", "--checkpoint", checkpoint, "--model", CLASSIFIER)
    call("app.predict", *words, "--out", tmp_path / "out", env={"OMP_NUM_THREADS": "1"}, code=0)
    stored = json.loads((stained / "stains.json").read_text())["slides"]
    fits = {slide: StainFit("macenko", tuple(stored[slide]["numbers"])) for slide in (spec.slide_id, TARGET)}
    assert asked == {fits[spec.slide_id]}
    assert TrainedModel(checkpoint, CLASSIFIER, torch.device("cpu")).stain_target == fits[TARGET]


def test_a_name_with_a_tag_trains_from_its_weights_and_predicts_with_their_normalisation(
    classify_slides, train, tmp_path, monkeypatch
):
    theirs = random_timm("test_resnet", use_local_hub(tmp_path, monkeypatch))
    run = tmp_path / "run"
    frozen = ("--model", "timm:test_resnet.r160_in1k", "--freeze", "trunk", "--steps", "1", "--out", run)
    train("--slides", classify_slides, *QUICK, *frozen)
    log = (run / "run.log").read_text()
    assert "--weights timm test_resnet.r160_in1k: " in log
    assert "mean 0.5, 0.5, 0.5; standard deviation 0.5, 0.5, 0.5" in log
    assert torch.equal(checkpoint_of(run)["model"]["conv1.0.weight"], theirs.get_parameter("conv1.0.weight"))
    model = TrainedModel(run / "checkpoints" / "last.pt", None, torch.device("cpu"))
    white = model.computation._input(np.full((1, 8, 8, 3), 255, np.uint8), None)
    assert torch.equal(white, torch.ones(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("name", "normalisation", "whose"),
    [
        ("timm:test_resnet", CENTRED, "timm's weights of timm:test_resnet"),
        ("unet:test_resnet", CENTRED, "timm's weights of unet:test_resnet"),
        ("resnet18", IMAGENET, "most weights of ImageNet"),
    ],
)
def test_a_file_without_a_normalisation_has_that_of_its_model(name, normalisation, whose, tmp_path):
    """All files were taken for those of ImageNet, also where the model's own weights are not."""
    torch.save(build_model(name, classes=2).state_dict(), tmp_path / "w.pt")
    config = RunConfig(DataSettings(tmp_path), net=ModelSettings(name, weights=str(tmp_path / "w.pt")))
    _, model = build_run_model(config, 2, (1, 3, 64, 64))
    assert model.normalisation == normalisation
    (note,) = (note for note in model.notes if note.startswith("images are normalised"))
    assert f"as {whose} expect ({tmp_path / 'w.pt'} does not say): mean {normalisation[0][0]:g}, " in note


def test_frozen_norms_without_weights_are_warned_of(classify_slides, train, tmp_path):
    train("--slides", classify_slides, *QUICK, "--norm", "frozen", "--steps", "1", "--out", tmp_path / "run")
    assert "the running statistics were never measured" in (tmp_path / "run" / "run.log").read_text()


STEPS = 2
TWIN = (*QUICK, "--steps", str(STEPS), "--twin-steps=1")


def fails_after_the_run(patch):
    compute = TrainingLoop._step

    def step(loop, batch, number):
        if number >= STEPS:
            raise NonFiniteLoss((0,), (float("nan"),))
        return compute(loop, batch, number)

    patch.setattr(TrainingLoop, "_step", step)


def test_a_fault_in_twin_steps_leaves_a_completed_run(classify_slides, train, tmp_path, monkeypatch):
    good, bad = tmp_path / "good", tmp_path / "bad"
    done = train("--slides", classify_slides, *TWIN, "--out", good)
    assert "fed from memory: " in done.stdout
    assert summary_of(good)["images_per_second_no_data"] > 0
    fails_after_the_run(monkeypatch)
    done = train("--slides", classify_slides, *TWIN, "--out", bad)
    assert "warning: --twin-steps: these steps failed" in done.stderr
    summary = summary_of(bad)
    assert (summary["status"], summary["error"], summary["images_per_second_no_data"]) == ("completed", None, None)
    assert same_weights(bad, good)
    assert (bad / "report.html").exists()


def train_with_a_fault_on_rank_1(*words):
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            fails_after_the_run(patch)
        return importlib.import_module("app.train").main(list(words))


@PROCESS
def test_a_fault_in_twin_steps_of_one_rank_leaves_a_completed_run(classify_slides, tmp_path):
    words = ("--slides", str(classify_slides), *TWIN, "--parallel", "ddp", "--out", str(tmp_path / "run"))
    codes, printed = run_ranks(2, f"{__name__}:train_with_a_fault_on_rank_1", words, tmp_path)
    assert codes == [0, 0], printed
    assert summary_of(tmp_path / "run")["status"] == "completed"


@pytest.mark.parametrize(("asked", "ddp", "master"), [(None, 1, 1), ("0", 1, 1), ("64KiB", 4, 2)])
def test_the_size_of_gradient_buckets_reaches_the_engine(asked, ddp, master):
    """Three layers of 64 KiB behind a small one; the second stage has the last two."""

    def net():
        layers = [torch.nn.Conv2d(width, 128, 1, bias=False) for width in (3, 128, 128, 128)]
        return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    def made(communicator, parallel):
        cuts = "2" * (parallel != "ddp")
        settings = StrategySettings(parallel, ranks=2, batch=4, gradient_buckets=asked, cuts=cuts)
        model, make = drawn_once(("gradient buckets",), 3, net), functools.partial(build_optimizer, OptimizerSettings())
        more = {"batch": 4, "tile": 8, "seed": 0, "device": torch.device("cpu")}
        return build_engine(settings.to_strategy("cpu"), model, F.cross_entropy, make, communicator, **more)

    for whole in run_on_threads(2, made, "ddp"):
        assert len(whole._work.reducers[0].buckets) == ddp
    for staged in run_on_threads(2, made, "master"):
        assert len(staged._work.reducers[1].buckets) == master
        sums = [str(action).endswith("REDUCE") for action in staged.schedule[1]]
        assert sums[-2:] == [asked == "0", True]


@PROCESS
def test_a_run_with_buckets_and_microbatches_made_ahead_gives_the_same_losses(
    classify_slides, train_ranks, tmp_path, monkeypatch
):
    words = ("--model", "tests.helpers.tiny_models:telling", "--steps", "3", "--parallel", "ddp", "--ranks", "2")
    for name, more in (("plain", ()), ("knobs", ("--gradient-buckets=0", "--device-prefetch=1"))):
        (told := tmp_path / f"told-{name}").mkdir()
        monkeypatch.setenv("TOLD", str(told))
        train_ranks("--slides", classify_slides, *QUICK, *words, *more, "--out", tmp_path / name)
        threads = [file.read_text() for file in told.iterdir()]
        assert ["microbatch-maker" in names for names in threads] == [bool(more)] * 2
    assert len(losses_of(tmp_path / "plain")) == 3
    assert losses_of(tmp_path / "plain") == losses_of(tmp_path / "knobs")


# Of a model that draws nothing.
ASKED = [*QUICK, "--model", "resnet11_v2", "--tile", "128", "--optimizer", "sgd", "--steps", "3", "--microbatches", "4"]
MIXED = ["--parallel", "ddp", "--device", "mixed", "--cpu-ranks", "1"]


def as_if_on_gpus(*arguments):
    """``app.train`` on a rank that, unless it is one of the last, says it is on a GPU of its own and computes on the
    CPU. Nothing else is another than on a machine with GPUs."""
    from app.launch import place
    from parallel.comm import torch_comm
    from parallel.comm.kinds import RankKind

    def own_kind(_):
        return RankKind("here", "cpu") if place._on_cpu(place.find_launch(), 1) else RankKind("here", "cuda", "GPU-0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_comm, "own_kind", own_kind)
        patch.setattr(place, "choose_device", lambda *_: torch.device("cpu"))
        return main(list(arguments))


@PROCESS
def test_a_mixed_run_is_that_of_one_process(classify_slides, train, tmp_path):
    plain_run = tmp_path / "plain"
    train("--slides", classify_slides, *ASKED, "--parallel", "single", "--device", "cpu", "--out", plain_run)
    more = ("--shares", "3,1", "--mixed-sums=host", "--out", str(tmp_path / "mixed"))
    words = ["--slides", str(classify_slides), *ASKED, *MIXED, *more]
    codes, printed = run_ranks(2, f"{__name__}:as_if_on_gpus", words, tmp_path)
    assert codes == [0, 0], printed
    assert losses_of(tmp_path / "mixed") == pytest.approx(losses_of(plain_run), rel=1e-5)
    ours, theirs = (checkpoint_of(run)["model"] for run in (tmp_path / "mixed", plain_run))
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= 1e-4 * max(1, value.abs().max()), name
    assert summary_of(tmp_path / "mixed")["ranks"] == 2


@PROCESS
def test_a_mixed_run_without_a_gpu_is_refused_before_anything_is_trained(classify_slides, tmp_path):
    words = ["--slides", str(classify_slides), *QUICK, *MIXED, "--steps", "1", "--out", str(tmp_path / "run")]
    codes, printed = run_ranks(2, "app.train", words, tmp_path, 100)
    assert 2 in codes, printed
    assert "--device mixed: no usable GPU was found" in printed
    assert not (tmp_path / "run" / "metrics.csv").exists()
