"""A run writes its folder, its environment and its steps, and tells MLflow."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
import yaml

from app.settings.fields import with_values
from app.settings.optimization import ModelSettings
from app.settings.run import DataSettings, RunConfig
from app.training import metrics_log
from app.training.metrics_log import MlflowLog
from app.training.run_folder import CsvLog, RunFolder
from app.training.run_info import describe_environment, describe_launcher
from app.training.summary import write_step
from parallel.comm.launch import STARTED_BY_US
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.recorded import gather_timeline
from parallel.schedule.text import from_csv
from parallel.strategy import Strategy
from tests.app.conftest import QUICK, ROOT, losses_of
from tests.helpers.engine_runs import build, train
from tests.helpers.small_nets import batch_of

CONFIG = RunConfig(DataSettings(Path("slides")))
RESUMED = replace(CONFIG, resume=True)


def started(path, config=CONFIG):
    folder = RunFolder(path)
    folder.open(config)
    folder.last.parent.mkdir()
    folder.last.write_bytes(b"checkpoint")
    return folder


@pytest.fixture
def run(tmp_path):
    return started(tmp_path / "run")


def test_a_run_is_not_overwritten_and_resumed_with_the_same_settings_alone(run):
    with pytest.raises(ValueError, match="continue it with --resume, or name another --out"):
        run.open(CONFIG)
    run.open(RESUMED)
    run.open(replace(RESUMED, epochs=10.0))  # the default
    other = replace(RESUMED, seed=3, net=ModelSettings(model="unet"))
    with pytest.raises(ValueError, match="model: the run has 'resnet50', asked is 'unet'") as caught:
        run.open(other)
    assert "seed: the run has 0, asked is 3" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": "ddp", "ranks": 2, "shares": "auto", "gradient_buckets": "4MiB"},
        {"parallel": "spatial", "ranks": 2, "grid": "2x1"},
        {"parallel": "gpipe", "ranks": 2, "stages": 2, "cuts": "layer2", "compile": True},
        {"stream": "512", "offload_host": "1GiB"},
        {"staleness": 2, "push_rate": "staleness"},
        {"recompute": "optimal", "recompute_runs": "conv1:add"},
        {"offload": "overlap", "offload_ahead": "1MiB", "offload_state": "optimizer"},
        {"device": "mixed", "parallel": "ddp", "ranks": 2, "cpu_ranks": 1, "mixed_sums": "host"},
        {"channels_last": False, "memory": "16GiB"},
        {"precision": "bf16"},
        {"microbatches": 2},
        {"slides": "moved", "labels": "moved.csv", "annotations": "moved", "mpp_table": "moved.csv"},
        {"patience": 3, "validate_every": 5, "checkpoint_every": 7, "twin_steps": 1, "read_threads": 2},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_where_and_how_a_run_computes_may_change(changes, run):
    resumed, before = with_values(RESUMED, changes), run.config.read_bytes()
    run.open(resumed)
    assert run.config.read_bytes() == before
    run.keep_settings(resumed)  # as its first checkpoint is written
    assert run.settings().items() >= (changes | {"resume": False}).items()


def test_the_file_of_the_weights_may_move_and_keeps_its_name(tmp_path):
    run = started(tmp_path, with_values(CONFIG, {"weights": "scratch/encoder.pt"}))
    run.open(with_values(RESUMED, {"weights": "project/encoder.pt"}))
    for other in ("project/other.pt", None):
        with pytest.raises(ValueError, match=f"weights: the run has 'scratch/encoder.pt', asked is {other!r}"):
            run.open(with_values(RESUMED, {"weights": other}))


@pytest.mark.parametrize(
    "changes",
    [
        *({"batch": 4}, {"seed": 1}, {"norm": "group"}, {"norm_statistics": "deferred"}, {"lr": 1.0}, {"warmup": 5}),
        *({"decay_all": True}, {"weight_decay": 0.1}, {"ema": 0.9}, {"validation": 0.3}, {"class_weights": "balanced"}),
        *({"sample": "class"}, {"tile": 256}, {"steps": 5}, {"epochs": 11.0}, {"epochs": 1.0}),
    ],
    ids=str,
)
def test_what_a_run_computes_may_not(changes, run):
    before = run.config.read_bytes()
    with pytest.raises(ValueError, match=next(iter(changes))):
        run.open(with_values(RESUMED, changes))
    assert run.config.read_bytes() == before


def test_a_run_gets_longer_only_with_extend(tmp_path):
    folder = started(tmp_path / "run", replace(CONFIG, steps=10))
    folder.open(replace(RESUMED, steps=10))
    with pytest.raises(ValueError, match=r"ends after 10 steps, asked is 20 steps.*--extend"):
        folder.open(replace(RESUMED, steps=20))
    longer = replace(RESUMED, steps=20, extend=True)
    folder.open(longer)
    folder.keep_settings(longer)
    folder.open(replace(RESUMED, steps=20))  # the length of the run from now on
    with pytest.raises(ValueError, match="longer, not shorter"):
        folder.open(replace(RESUMED, steps=10, extend=True))
    folder.open(replace(RESUMED, epochs=3.0, extend=True))
    assert any("--resume" in fault for fault in replace(CONFIG, extend=True).validate())


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        *(({name: 1}, True) for name in ("lr", "steps", "batch")),
        *(({name: 1}, False) for name in ("test", "validation", "seed", "folds", "fold", "split_by", "splits")),
        ({"patient_pattern": "^(.)"}, False),
    ],
    ids=str,
)
def test_a_run_without_a_checkpoint_is_split_anew_if_another_split_is_asked_for(changes, kept, tmp_path):
    """A start that came to no checkpoint once decided, in silence, who is trained on in the next."""
    folder = RunFolder(tmp_path)
    folder.splits.touch()
    folder.open(CONFIG)
    assert folder.splits.exists(), "app.bench puts it there, and no settings"
    folder.open(with_values(CONFIG, changes))
    assert folder.splits.exists() == kept


def test_a_start_forgets_the_faults_of_those_before(run):
    for name in ("fault.txt", "fault-2.deaths"):
        (run.path / name).touch()
    run.open(RESUMED)
    assert not [*run.path.glob("fault*")]


def test_a_run_from_before_a_setting_existed_has_its_default(run):
    new = ("decay_all", "focal_gamma", "layer_decay")
    old = {key: value for key, value in yaml.safe_load(run.config.read_text()).items() if key not in new}
    run.config.write_text(yaml.safe_dump(old))
    run.open(RESUMED)
    with pytest.raises(ValueError, match="decay_all: the run has False, asked is True"):
        run.open(with_values(RESUMED, {"decay_all": True}))


def test_json_is_whole_or_not_there(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_json("summary.json", {"steps": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        folder.write_json("summary.json", {"loss": float("nan")})
    assert json.loads(folder.summary.read_text()) == {"steps": 1}


def test_csv_log_is_cut_back_to_a_checkpoint_and_continued(tmp_path):
    path = tmp_path / "metrics.csv"
    log = CsvLog(path, ("step", "loss"))
    for step in range(1, 5):
        log.add({"step": step, "loss": None if step == 2 else step / 10})
    with path.open("a") as file:
        file.write("5")  # a crash in the middle of a row
    log = CsvLog(path, ("step", "loss"))
    log.cut_after(2)
    log.add({"step": 3, "loss": 0.5})
    assert path.read_text().split() == ["step,loss", "1,0.1", "2,", "3,0.5"]


def test_environment_is_json_and_tells_versions_and_nothing_of_the_user():
    told = describe_environment()
    text = json.dumps(told)
    assert json.loads(text) == told
    assert told["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert told["openslide_library"].startswith("4.")
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(told["gpus"]) == torch.cuda.device_count()
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert told["megatile"]["commit"] == (git.stdout.strip() or None)
    assert str(Path.home()) not in text
    assert '"/' not in text  # no value is a path


@pytest.mark.parametrize(
    ("variables", "started_by"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        ({"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpi"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", STARTED_BY_US: "7"}, None),
    ],
    ids=["batch script", "mpirun in a batch script", "--ranks under mpirun -n 1"],
)
def test_the_launcher_is_the_one_that_started_the_ranks(variables, started_by, monkeypatch):
    """A batch script had been taken for a step, so that the page advised an srun that fails."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert describe_launcher()["started_by"] == started_by


FAKE = Path(__file__).parents[2] / "helpers" / "fake_mlflow"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The folder of a fake server, and its client where ``import mlflow`` finds it."""
    monkeypatch.syspath_prepend(FAKE)
    for name in ("mlflow", "mlflow.entities"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    folder = tmp_path / "server"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(folder))
    return folder


def calls(server):
    return [json.loads(line) for line in (server / "calls").read_text().splitlines()]


def scalars(server):
    told = [metric for call, *rest in calls(server) if call == "log_batch" for metric in rest[1]]
    return [(name, step, value) for name, value, _, step in told]


def test_a_run_and_its_resumed_rest_are_one(server, classify_slides, train, tmp_path):
    server.mkdir()
    out = tmp_path / "run"
    arguments = ("--slides", classify_slides, *QUICK, "--out", out, "--mlflow=study")
    for more in (("--steps", "2"), ("--steps", "3", "--resume", "--extend")):
        train(*arguments, *more)
    told = calls(server)
    assert [call for call in told if call[0] in ("create_experiment", "create_run", "update_run")] == [
        ["create_experiment", "study"],
        ["create_run", "7", "run"],
        ["update_run", "run of run", "RUNNING"],
    ]
    losses = [(step, value) for name, step, value in scalars(server) if name == "train/loss"]
    assert losses == [*zip(losses_of(out, "step"), losses_of(out), strict=True)]
    assert {name for name, _, _ in scalars(server)} >= {"train/lr", "validation/loss", "validation/tile_auc"}
    params = dict(param for call, *rest in told if call == "log_batch" for param in rest[2])
    assert (params["tile"], params["mlflow"], params["steps"]) == ("256", "study", "2")
    assert [call[2] for call in told if call[0] == "set_terminated"] == ["FINISHED", "FINISHED"]
    sent = [call[2] for call in told if call[0] == "log_artifact"]
    assert sent.count("summary.json") == sent.count("report.html") == sent.count("metrics.csv") == 2


def test_a_server_that_comes_late_is_told_all(server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(metrics_log, "RETRY_S", 0.05)
    monkeypatch.setattr(metrics_log, "SEND_EVERY_S", 0.05)
    log = MlflowLog(tmp_path, "study", {f"setting{k}": "x" * 600 for k in range(150)})
    for step in range(1500):
        log.scalars(step, {"train/loss": float(step), "train/none": None})
    while "MLflow cannot be reached" not in caplog.text:
        pass
    server.mkdir()
    log.close("interrupted")
    assert [step for _, step, _ in scalars(server)] == list(range(1500))
    assert calls(server)[-1] == ["set_terminated", f"run of {tmp_path.name}", "KILLED"]
    assert caplog.text.count("MLflow") == 1


def test_a_server_that_is_not_there_ends_nothing(server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(metrics_log, "MOST_WAITING", 3)
    log = MlflowLog(tmp_path, "study", {})
    for step in range(5):
        log.scalars(step, {"train/loss": 1.0})
    log.close("completed")
    assert caplog.text.count("MLflow cannot be reached, and is tried again every 30 s: connection refused") == 1
    assert f"MLflow did not get 5 scalars and the last files; all are in {tmp_path}" in caplog.text


def test_without_mlflow_it_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (fault,) = RunConfig(DataSettings(Path("slides")), mlflow="study").validate()
    assert fault.startswith("--mlflow=study needs the package mlflow or mlflow-skinny, which is not installed")


@pytest.mark.parametrize("strategy", ["1f1b", "single"])
def test_schedule_picture_and_trace_are_of_the_step(strategy, tmp_path):
    """A process that has the whole model writes nothing."""
    steps, local = [batch_of([2, 2, 2], 12, 1, torch.float32)], LocalCommunicator()
    engine = build(local, "skips", Strategy(strategy, 1, 1, 3), steps)
    train(engine, steps)
    step = write_step(engine, local, strategy, tmp_path)
    if strategy == "single":
        assert step is None
        assert not list(tmp_path.iterdir())
        return
    timeline = gather_timeline(local, engine.spans())
    assert sum(step["step_seconds"].values()) == pytest.approx(timeline.makespan_s)
    assert step["step_seconds"]["compute"] == pytest.approx(timeline.busy_s(0))
    assert step["bubble_predicted"] == pytest.approx(0.0)
    actions, spans = from_csv((tmp_path / "schedule.csv").read_text())[0], timeline.spans[0]
    for found in (actions, [span.action for span in spans]):
        assert [*map(str, found)] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    picture = (tmp_path / "schedule.svg").read_text()
    ElementTree.fromstring(picture)
    assert "measured" in picture
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "0B2" for event in events) == 2  # simulated, measured


def test_every_scalar_is_sent_or_counted(tmp_path, monkeypatch):
    """Scalars that come while a message is under way push others out of a full queue."""
    monkeypatch.setattr(metrics_log, "MOST_WAITING", 10)
    monkeypatch.setattr(metrics_log, "MOST_METRICS", 4)
    monkeypatch.setattr(MlflowLog, "_start", lambda self: None)
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=lambda *scalar: scalar, Param=None))
    told = MlflowLog(tmp_path, "study", {})
    sent = []

    class Client:
        def log_batch(self, run, metrics):
            told.scalars(len(sent) + 100, {"more": 1.0, "again": 2.0})
            sent.extend(metrics)

    given = 14
    for step in range(given):
        told.scalars(step, {"loss": 0.5})
    for _ in range(3):
        told._send(Client(), "run")
        given += 2
    assert len(sent) == len(set(sent)) == 12
    assert len(sent) + len(told._waiting) + told._dropped == given
