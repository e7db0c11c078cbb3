"""Commands on GPUs that are simulated, and commands that open no CUDA context: a GPU may admit one process only."""

import contextlib
import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import sys

import pytest
import torch

import app
import parallel
from app import plan
from app.benchmark import runner
from app.benchmark.row import Trial
from app.planning.machine import CUDA_CONTEXT, this_machine
from app.training.run_info import describe_gpus
from parallel.comm.launch import RankServer
from parallel.cost.cluster import COMMUNICATOR_BYTES, LINK_BYTES, link_named
from parallel.profile import calibrate, gpu
from parallel.profile.link_speed import load_or_measure_copies
from tests.app.conftest import CLASSIFIER, QUICK, losses_of, rows_of
from tests.helpers.in_process import call
from tests.helpers.sim_gpu import simulated
from tests.parallel.profile.test_calibrate import KEY, made_up_readings

STEPS = 3
COMMAND = (*QUICK, "--tile", "128", "--steps", str(STEPS))
ON_GPU = ("--device", "cuda", "--precision", "fp32")
WAYS = {
    "made ahead, checkpoints": ("--device-prefetch=2", "--checkpoint-every", "1"),
    "stream": ("--stream", "64"),
    "offload": ("--offload", "overlap", "--offload-ahead=16KiB"),
    "parameters on the host": ("--offload-state=parameters",),
}


@contextlib.contextmanager
def ordered(devices=1):
    """GPUs that are simulated, on which nothing is unordered.

    Kernels and copies run as late as their order allows, and memory without a value holds NaN, so what is not waited
    for changes a number.
    """
    with simulated(devices, late=0) as gpus:
        yield gpus
        assert not gpus.found


@pytest.fixture(scope="module")
def on_cpu(classify_slides, train, tmp_path_factory):
    """A run on the CPU."""
    run = tmp_path_factory.mktemp("cpu") / "run"
    train("--slides", classify_slides, "--out", run, *COMMAND, "--device", "cpu")
    return run


@pytest.mark.parametrize("way", WAYS)
def test_training(way, classify_slides, on_cpu, train, tmp_path):
    with ordered() as gpus:
        train("--slides", classify_slides, "--out", tmp_path, *COMMAND, *ON_GPU, *WAYS[way])
        assert gpus.process.launches > 100
    assert losses_of(tmp_path) == pytest.approx(losses_of(on_cpu), rel=1e-5)


def test_resume_with_fewer_devices(classify_slides, train, tmp_path):
    command = ("--slides", classify_slides, "--out", tmp_path, *COMMAND, *ON_GPU, "--checkpoint-every", "1")
    with simulated(4):
        train(*command)
    with ordered(2):
        train(*command, "--steps", str(STEPS + 1), "--resume", "--extend")
    assert len(losses_of(tmp_path)) == STEPS + 1


def test_prediction(classify_slides, on_cpu, tmp_path):
    (tmp_path / "slides").mkdir()
    shutil.copy(sorted(classify_slides.glob("*.tif*"))[0], tmp_path / "slides")
    checkpoint = ("--checkpoint", on_cpu / "checkpoints/last.pt", "--model", CLASSIFIER)
    command = ("app.predict", *checkpoint, "--slides", tmp_path / "slides", "--stream", "64", "--out")
    call(*command, tmp_path / "cpu", "--device", "cpu", code=0)
    with ordered():
        call(*command, tmp_path / "gpu", "--device", "cuda", code=0)
    tables = (rows_of(tmp_path / device / "slides.csv") for device in ("cpu", "gpu"))
    ours, theirs = ([float(row["score_crowded"]) for row in table] for table in tables)
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_verify():
    with ordered():
        assert "passed" in call("app.verify", "--model", CLASSIFIER, "--tile", "64", "--device", "cuda", code=0).stdout


GIB = 1 << 30
PROPERTIES = {"name": "NVIDIA Test", "memory_bytes": 16 * GIB, "capability": "8.0", "bf16": True, "missing_kernels": ""}
MESSAGES = {"empty_message": 1e-5, "message": 1e-5 + 1e-3, "message_bytes": 1e8}
LINKS = MESSAGES | {"empty_sum": 4e-5, "sum": 4e-5 + 1e-3, "sum_bytes": 5e7}
LINKS |= {"link_bytes": 2e7, "communicator_bytes": 3e8}
"""What ranks on GPUs measure of their links."""
ANSWERS = {
    "read_gpus": [PROPERTIES, PROPERTIES],
    "read_gpu": PROPERTIES | {"free_bytes": 15 * GIB},
    "gpu_copies": [1e10, 2e10],
    "measure_by_ranks": LINKS,
}
"""Function -> what the process that calls it prints."""


@pytest.fixture(scope="module")
def model():
    return calibrate.fit_model(made_up_readings(60), KEY, 1.0)


@pytest.fixture
def opened(monkeypatch):
    """A machine with two GPUs as this process may see it: opening a context is an error, and is recorded."""
    found = []

    def open_context():
        found.append("context")
        raise AssertionError("this process opens a CUDA context")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_lazy_init", open_context)  # which C++ calls as well
    return found


@pytest.fixture
def asked(opened, model, monkeypatch, tmp_path):
    """Return what other processes are asked about the GPUs; they answer immediately."""
    asked = []

    def run(command, **_):
        if command[:2] != [sys.executable, "-c"] or "parallel.profile" not in command[2]:
            raise FileNotFoundError  # what else a command asks, such as git, is not installed here
        name = next(name for name in ANSWERS if f"{name}(" in command[2])
        links = re.search(r"'ranks': (\d+), .*'device': '(\w+)'", command[2])
        asked.append(f"links of {links[1]} on {links[2]}" if links else name)
        return subprocess.CompletedProcess(command, 0, f"a line\n{json.dumps(ANSWERS[name])}\n", "")

    def noted(what, answer):
        asked.append(what)
        return answer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(calibrate, "_run", lambda settings, _: noted(f"calibrate {len(settings)}", []))
    monkeypatch.setattr(calibrate, "fit_model", lambda *_: model)
    for name in ("__init__", "__exit__"):
        monkeypatch.setattr(RankServer, name, lambda *_: None)
    monkeypatch.setattr(RankServer, "launch", lambda *_: noted("ranks", 0))
    monkeypatch.setattr(RankServer, "pid", 0, raising=False)
    gpu.gpu_at.cache_clear()
    yield asked
    gpu.gpu_at.cache_clear()


PLANS = ["read_gpu", "calibrate 1", "gpu_copies", "links of 2 on cuda"]
TRAIN = ("--slides", "SLIDES", *QUICK, "--steps", "2", "--out", "OUT", "--ranks", "2")


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("app.plan", ("--model", "resnet18", "--tile", "64", "--ranks", "2"), PLANS),
        ("app.train", (*TRAIN, "--parallel", "auto"), [*PLANS, "ranks"]),
        ("app.train", (*TRAIN, "--parallel", "ddp", "--recompute", "optimal"), [*PLANS, "ranks"]),
        ("app.bench", ("--slides", "SLIDES", "--tiles", "256", "--ranks", "2", "--out", "OUT"), ["read_gpus"]),
        ("app.doctor", ("--out", "OUT"), ["read_gpus"]),
        ("app.predict", ("--slides", "SLIDES", "--checkpoint", "x.pt", "--out", "OUT", "--ranks", "2"), ["ranks"]),
        ("app.verify", ("--parallel", "ddp", "--ranks", "2"), ["read_gpu", "ranks"]),
    ],
    ids=["plan", "train-auto", "train-optimal", "bench", "doctor", "predict", "verify"],
)
def test_a_command_opens_no_context_before_its_ranks(
    command, words, expected, asked, opened, classify_slides, monkeypatch, tmp_path
):
    monkeypatch.setattr(runner, "run_trial", lambda *_: Trial("cannot", "not run"))
    monkeypatch.setattr("app.doctor.check_devices", lambda _: [])  # computes on each GPU, and starts nothing after it
    places = {"SLIDES": str(classify_slides), "OUT": str(tmp_path / "run")}
    done = call(command, *[places.get(word, word) for word in words])
    assert opened == []
    assert asked == expected, done.stderr


@pytest.mark.usefixtures("opened")
def test_a_plan_knows_what_the_other_processes_measured(asked):
    machine = this_machine(4, device="cuda")
    cluster = machine.cluster
    assert asked[-1] == "links of 4 on cuda"
    assert (machine.precision, cluster.name, cluster.lanes) == ("bf16", "NVIDIA Test", 2)
    assert cluster.memory_bytes == 15 * GIB // 2 - CUDA_CONTEXT
    assert cluster.copy_bandwidth == pytest.approx(4e10 / 3)
    assert (cluster.inside.bandwidth, cluster.inside.latency_s) == (pytest.approx(1e11), 1e-5)
    assert cluster.sum_s(50_000_000, range(4)) == pytest.approx(1e-3 + 4e-5)
    assert (cluster.link_bytes, cluster.communicator_bytes) == (0, 0), "ranks that share a GPU use no NCCL"
    cluster = this_machine(2, device="cuda").cluster
    assert (cluster.link_bytes, cluster.communicator_bytes) == (2e7, 3e8)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("ranks", "expected"), [(2, (LINK_BYTES, COMMUNICATOR_BYTES)), (4, (0, 0))])
def test_links_that_cannot_be_measured_are_assumed(ranks, expected, monkeypatch, caplog):
    def fails(*_, **__):
        raise RuntimeError("all CUDA-capable devices are busy")

    monkeypatch.setattr("app.planning.machine.load_or_measure_links", fails)
    cluster = this_machine(ranks, device="cuda").cluster
    assert cluster.inside == link_named("pcie4")
    assert (cluster.link_bytes, cluster.communicator_bytes) == expected
    assert "busy: planned with pcie4" in caplog.text


@pytest.mark.usefixtures("opened")
def test_a_process_that_has_a_context_asks_no_other(monkeypatch, tmp_path):
    """The GPU of a rank that plans may admit no other process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: torch.enable_grad())
    monkeypatch.delattr(subprocess, "run")
    monkeypatch.delattr(subprocess, "Popen")
    monkeypatch.setattr(gpu, "read_gpu", lambda _: ANSWERS["read_gpu"])
    read = []
    monkeypatch.setattr(calibrate, "readings_of", lambda settings: read.append(settings["device"]) or [])
    gpu.gpu_at.cache_clear()
    assert gpu.gpu_at(0).free_bytes == 15 * GIB
    assert calibrate._run([{"device": "cuda:0"}], 1.0) == []
    assert read == ["cuda:0"]
    monkeypatch.setattr("parallel.profile.link_speed.gpu_copies", lambda name: (1e9, 3e9))
    assert load_or_measure_copies(torch.device("cuda", 0)).bandwidth == pytest.approx(1.5e9)
    gpu.gpu_at.cache_clear()


@pytest.mark.usefixtures("opened")
def test_a_process_that_fails_is_quoted(monkeypatch, caplog, capsys):
    printed = "a trace\ntorch.AcceleratorError: CUDA-capable device(s) is/are busy\nCompile with TORCH_USE_CUDA_DSA\n"

    def fails(*_, **__):
        raise subprocess.CalledProcessError(1, [], stderr=printed)

    monkeypatch.setattr(subprocess, "run", fails)
    gpu.gpu_at.cache_clear()
    assert plan.main(["--model", "resnet18", "--tile", "64"]) == 1
    assert "said: torch.AcceleratorError: CUDA-capable device(s) is/are busy; see" in capsys.readouterr().err
    assert describe_gpus()["gpus"] == []
    assert "are busy; see" in caplog.text


@pytest.mark.process
def test_what_another_process_returns_comes_back(monkeypatch):
    assert gpu.in_cuda_process(gpu.read_gpus) == gpu.read_gpus()
    monkeypatch.setattr(calibrate, "keep_freed_memory", lambda: True)
    settings = {"device": "cpu", "dtype": "float32", "channels_last": True, "seconds": 0.0, "seed": 0}
    assert next(calibrate.readings_of(settings | {"tf32": False}))["what"] == "moving"


def test_no_module_opens_a_context_when_it_is_imported(opened):
    def ours():
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("app", "parallel")}

    loaded = ours()
    for name in loaded:
        del sys.modules[name]
    try:
        for package in (app, parallel):
            for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                if "mpi_" not in found.name:  # they start MPI
                    importlib.import_module(found.name)
        assert len(ours()) > 200
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(loaded)
    assert opened == []
