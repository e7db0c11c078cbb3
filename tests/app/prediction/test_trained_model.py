"""A trained model as a prediction loads it: odd checkpoints, slides of the run, names of files, groups of ranks."""

import itertools
import unicodedata
from pathlib import Path
from unittest import mock

import pytest
import torch

from app import predict as predict_module
from app.checkpoint.file import load_checkpoint, save_checkpoint
from app.prediction import prediction_folder, share
from app.prediction.command import PredictCommand
from app.prediction.prediction_folder import PredictionFolder, file_names
from app.prediction.trained_model import TrainedModel
from app.settings.cli import RunError
from parallel.schedule.mesh import Mesh
from pipelines.catalog.handles import SlideState
from pipelines.slides.whole_files import write_text
from tests.app.conftest import rows_of
from tests.helpers.hand_made_checkpoint import CLASSIFIER, write_checkpoint

CPU = torch.device("cpu")


def without_settings(state):
    del state["settings"]


def of_another_model(state):
    state["model"] = {}


@pytest.mark.parametrize(
    ("change", "says"),
    [(without_settings, r"no checkpoint of app\.train \(KeyError: 'settings'\)"), (of_another_model, "has no weights")],
)
def test_odd_content_is_named(change, says, tmp_path):
    path = write_checkpoint(tmp_path / "best.pt", CLASSIFIER, tile=64, mpp=0.5)
    state = load_checkpoint(path)
    change(state)
    save_checkpoint(path, state)
    with pytest.raises(RunError, match=says) as fault:
        TrainedModel(path, CLASSIFIER, CPU)
    assert str(path) in str(fault.value)


def test_a_run_in_tf32_is_predicted_in_float32_without_a_gpu(tmp_path):
    path = write_checkpoint(tmp_path / "best.pt", CLASSIFIER, tile=64, mpp=0.5, precision="tf32")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        TrainedModel(path, CLASSIFIER, CPU)
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_a_missing_checkpoint_names_the_last_one_too(tmp_path):
    """A run without validation has no best.pt, which the message asked for."""
    with pytest.raises(ValueError, match=r"best\.pt: there is no such file; .* or last\.pt of a run without"):
        TrainedModel(tmp_path / "best.pt", None, CPU)


def test_each_slide_has_its_split_and_patient(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(b"a slide")
    own, new = SlideState.of(tmp_path / "a.png"), SlideState(0, 0, "new")
    known = {
        "split": {"a": "train", "p1_x": "test"},
        "patient": {"a": "p0", "p1_x": "p1"},
        "digest": {"a": own.digest, "p1_x": "1"},
    }
    asked = {"tile": 96, "mpp": 0.5, "slides": known, "patient_pattern": "^(p.)_"}
    model = TrainedModel(write_checkpoint(tmp_path / "a.pt", CLASSIFIER, **asked), CLASSIFIER, CPU)
    assert model.training_patients == ["p0"]
    folder = PredictionFolder(tmp_path / "out")
    for name, state, origin in (
        ("renamed", SlideState(0, 0, "1"), ("test", "p1")),
        ("a", own, ("train", "p0")),
        ("a", new, ("external", None)),  # the name of a slide of the run, and other content
        ("p1_new", new, ("test", "p1")),  # another slide of a patient of the run
        ("p2_new", new, ("external", "p2")),
    ):
        found = model.origin(name, state)
        assert tuple(found.values()) == origin
        folder.finish({"slide": name, **found}, state, {}, {})
    share._say_predictions(model, folder, "")
    assert "1 slide not of the run, in the split of a patient of the same name: test 1; if" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("classes", "named", "shown"),
    [
        (("cancer", "normal"), None, ["cancer"]),
        (("Normal", "cancer"), None, ["cancer"]),
        (("luad", "lusc"), None, ["luad", "lusc"]),
        (("luad", "lusc"), "luad", ["luad"]),
        (("a", "b", "normal"), None, ["a", "b", "normal"]),
    ],
)
def test_the_heat_map_is_that_of_the_positive_class(tmp_path, classes, named, shown):
    path = write_checkpoint(tmp_path / "best.pt", CLASSIFIER, tile=96, mpp=0.5, classes=classes, positive_class=named)
    assert list(TrainedModel(path, CLASSIFIER, CPU).shown.values()) == shown


@pytest.mark.parametrize(
    "classes",
    [
        ["<1%", ">1%", "=1%"],
        ["grade 1", "grade_1", "grade/1"],
        ["a", "A", "a~2", "A~2", "a_2"],
        ["x.y", "x_y"],
        ["caf\u00e9", "CAF\u00c9", "cafe\u0301"],
        ["t" * 300, "t" * 301],
        ["\u6b63\u5e38", "\u80bf\u7624", "", " ", ".."],
        ["Stra\u00dfe", "STRASSE"],
    ],
)
def test_each_class_has_a_file_of_its_own(classes):
    """Heat maps of <1% and >1% were once one file, that of the class written last."""
    parts = file_names(classes)
    assert len({unicodedata.normalize("NFKC", parts[name]).casefold() for name in classes}) == len(classes)
    assert all(len(part.encode()) < 200 and not set(part) & set('<>:"/\\|?*.%') for part in parts.values())


def test_slides_and_classes_with_dots_are_told_apart():
    folder, part = PredictionFolder(Path()), file_names(["b.c", "c"])
    assert folder.heat_map("a", part["b.c"]) != folder.heat_map("a.b", part["c"])


class Recording:
    """Records in which order a rank connects and makes groups."""

    def __init__(self, rank, world):
        self.rank, self.world, self.calls = rank, world, []

    def connect(self, pairs):
        self.calls.append(("connect", set(pairs)))

    def subgroup(self, ranks):
        self.calls.append(("subgroup", list(ranks)))
        return Recording(list(ranks).index(self.rank), len(ranks)) if self.rank in ranks else None


@pytest.mark.parametrize(("world", "stages"), [(4, 2), (6, 3)])
def test_all_ranks_make_the_links_of_all_groups(world, stages, monkeypatch):
    """Groups that made links by themselves would hand each other's ranks their tiles."""
    every_skip = dict.fromkeys(itertools.combinations(range(stages), 2), True)
    needed, calls = set(Mesh(world // stages, tuple(range(stages))).pairs(every_skip)), []
    for rank in range(world):
        whole = Recording(rank, world)

        def connect(settings, _, whole=whole):
            assert settings.join_timeout_s == 9
            return whole

        monkeypatch.setattr(share, "connect", connect)
        command = PredictCommand(Path("slides"), Path("best.pt"), ranks=world, stages=stages, join_timeout_s=9)
        group = share._spread(command, rank, CPU).communicator
        assert (group.rank, group.world) == (rank % stages, stages)
        calls.append(whole.calls)
    assert calls[0][0] == ("connect", needed)
    assert [name for name, _ in calls[0][1:]] == ["subgroup"] * (world // stages)
    assert all(own == calls[0] for own in calls)


def advice_for_lack_of_memory(batch, **given):
    command = PredictCommand(Path("slides"), Path("best.pt"), **given)
    with pytest.raises(RunError) as error, share._device_faults(command, "a", batch):
        raise torch.OutOfMemoryError("CUDA out of memory")
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "batch", "advice"),
    [
        ({}, 4, "; lower --batch (now 4) or compute in boxes (--stream 512) or keep the weights in host memory (--off"),
        ({"stream": "512", "offload": "parameters"}, 1, "; split the model (--ranks 2 --stages 2), then start again"),
        ({"stream": "512", "offload": "parameters", "ranks": 4}, 1, "; split the model (--stages 2), then start again"),
    ],
)
def test_advice_for_lack_of_memory_can_be_typed(given, batch, advice):
    """It named --stages 2 for one process, a batch of one image, and --stream 512 where it was given."""
    assert advice in advice_for_lack_of_memory(batch, **given)


@pytest.mark.parametrize(("world", "flags"), [(3, "--stages 2 on 2 ranks"), (4, "--stages 2")])
def test_ranks_of_a_launcher_are_not_asked_for_by_a_flag(world, flags, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": world}.items():
        monkeypatch.setenv(name, str(value))
    assert f" or split the model ({flags}), then start again" in advice_for_lack_of_memory(1)


@pytest.mark.parametrize(("code", "error"), [(2, ValueError), (1, RunError)])
def test_wrong_usage_that_only_a_rank_finds_is_wrong_usage(code, error, tmp_path, monkeypatch):
    server = mock.MagicMock()
    server.return_value.__enter__.return_value.launch.return_value = code
    monkeypatch.setattr(predict_module, "RankServer", server)
    command = PredictCommand(tmp_path, tmp_path / "best.pt", tmp_path / "out", ranks=2)
    with pytest.raises(error, match=f"a rank ended with exit code {code}; its message stands above"):
        predict_module.predict(command, [])


def test_the_table_has_a_slide_that_another_rank_finishes_meanwhile(tmp_path, monkeypatch):
    """Also on a disk without locks."""
    folder = PredictionFolder(tmp_path)
    finish = lambda slide: folder.finish({"slide": slide}, SlideState(0, 0, slide), {}, {})  # noqa: E731

    def write_late(path, text):
        finish("b")
        return write_text(path, text)

    monkeypatch.setattr(prediction_folder, "write_text", write_late)
    finish("a")
    folder.write_table()
    assert [row["slide"] for row in rows_of(folder.table)] == ["a", "b"]
