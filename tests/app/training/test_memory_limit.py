"""``--memory`` of a run, which GPUs and CPUs keep to and which is said; and where cuDNN times its algorithms."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from app.prediction.computation import Placement
from app.prediction.trained_model import TrainedModel
from app.settings.cli import RunError
from app.training.engines import choose_algorithms
from app.training.outcome import CHECKED, MemoryLimit, excess
from benchmarks.whole_engine import whole_engine
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.engine.step import Microbatch
from parallel.offload import saved_tensors
from parallel.offload.host_memory import HostMemory
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.batch import Batch
from pipelines.stream.device import DevicePrefetcher
from pipelines.stream.device_pixels import PixelMaker
from tests.app.conftest import QUICK, summary_of
from tests.helpers.hand_made_checkpoint import CLASSIFIER, write_checkpoint

CPU = torch.device("cpu")
MIB = 1 << 20
NUMBERS = MIB // 4


def test_a_gpu_gives_no_more(monkeypatch):
    told, gpu = [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: told.append((part, device)))
    for limit, device in ((4 << 30, gpu), (32 << 30, gpu), (None, gpu), (4 << 30, CPU)):
        MemoryLimit(limit, device)
    assert told == [(0.25, gpu), (1.0, gpu)]
    said = MemoryLimit(4 << 30, gpu).fault()
    assert "out of memory on cuda:1 within --memory 4 GiB" in said
    assert "--largest-tile" in said
    assert "--memory" not in MemoryLimit(None, gpu).fault()


def peak(memory, mib):
    """Return what ``memory`` has seen once a step has taken ``mib`` next to a tensor that stays."""
    with memory.watching([torch.ones(NUMBERS)]):
        torch.ones(mib * NUMBERS)
    return memory.device_bytes


def test_the_first_steps_are_counted_on_a_cpu_which_stops_where_a_gpu_of_that_size_would():
    memory = MemoryLimit(None, CPU)
    assert memory.device_bytes is None
    assert [peak(memory, mib) for mib in range(1, CHECKED + 2)] == [2 * MIB, 3 * MIB, 3 * MIB]
    assert peak(MemoryLimit(None, CPU, counts=False), 1) is None  # of compiled stages
    warned, stopped = MemoryLimit(4 * MIB, CPU), MemoryLimit(4 * MIB, CPU, stops=True)
    assert [peak(memory, 3) for memory in (warned, stopped)] == [4 * MIB] * 2
    assert peak(warned, 4) == 5 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="5242880 bytes of 4194304"):
        peak(stopped, 4)
    assert stopped.device_bytes == 5 * MIB
    assert "out of memory on cpu within --memory 4 MiB" in stopped.fault()


def test_storages_that_a_step_resizes_count_again():
    """As those of the parameters that fsdp gathers: made in the first step, empty between two steps."""
    memory = MemoryLimit(None, CPU)
    with memory.watching([]):
        gathered = torch.ones(NUMBERS)
    gathered.untyped_storage().resize_(0)
    with memory.watching([torch.ones(NUMBERS)]):
        gathered.untyped_storage().resize_(MIB)
        torch.ones(NUMBERS)
    assert memory.device_bytes == 3 * MIB


def test_a_run_that_takes_more_than_its_memory_stops(train, classify_slides, tmp_path):
    """One rank is started here; runs of two ranks stop in tests/test_readme.py."""
    asked = ("--memory", "2MiB", "--memory-excess=stop", "--parallel", "single", "--steps", "3")
    done = train("--slides", classify_slides, *QUICK, *asked, "--out", tmp_path / "run", code=1)
    assert "out of memory on cpu within --memory 2 MiB" in done.stdout + done.stderr
    assert not (tmp_path / "run" / "checkpoints" / "last.pt").exists()


def test_an_engine_holds_parameters_gradients_and_state():
    module = nn.Linear(512, 512, bias=False)
    mean = lambda output, target: output.mean()  # noqa: E731
    engine = whole_engine(module, mean, torch.optim.AdamW, LocalCommunicator(), batch=1, m=1, shape=(1, 512))
    memory = MemoryLimit(None, CPU)
    for step in range(CHECKED):
        with memory.watching(engine.on_device()):
            engine.step([Microbatch(torch.ones(1, 512), torch.zeros(1), (1, 512))], step, 0.1)
    # Weights, gradients, two moments; what the update works out takes two of them more.
    assert 4 <= memory.device_bytes / MIB <= 6.1


def test_microbatches_made_ahead_on_another_thread_count():
    """Tiles count in the step that makes them, and in the next one, which finds them on the device."""
    every, samples = np.ones(4, bool), np.arange(4)
    batch = Batch(np.zeros((4, 64, 64, 3), np.uint8), samples, samples, samples, 0, lambda: None, every, every, samples)
    one = 3 * 64 * 64 * 4

    def peaks(prefetch):
        memory, found = MemoryLimit(None, CPU), []
        pixels = PixelMaker(CPU, AugmentSettings(augment="none"), 0)
        repeated = itertools.repeat(batch)
        feed = DevicePrefetcher(
            repeated, lambda: True, pixels, prefetch=prefetch, thread_context=memory.on_other_thread
        )
        for _step in range(CHECKED):
            next(feed)
            with memory.watching(feed.held()):
                for images, _targets in feed.microbatches(batch, [1] * 4):
                    del images, _targets
            found.append(memory.device_bytes)
        return found

    labels = 4 * 8
    assert one <= peaks(0)[1] <= one + labels
    # While one is used, its successors are there; how many of them at once depends on how fast they are made.
    assert all(2 * one <= peak <= 3 * one + labels for peak in peaks(2)[1:])


def test_who_took_more_is_named():
    assert excess(None, [5]) == ""
    assert excess(5 * MIB, [MIB, 5 * MIB, 0]) == ""
    said = excess(5 * MIB, [MIB, 6 * MIB, 7 * MIB])
    assert "--memory allows 5 MiB a rank" in said
    assert "on 2 of 3: rank 1 6 MiB, rank 2 7 MiB" in said
    assert "--offload overlap" in said


@pytest.mark.process
def test_a_run_says_what_its_ranks_take(classify_slides, train_ranks, tmp_path):
    arguments = ("--slides", classify_slides, *QUICK, "--steps", "2", "--parallel", "gpipe", "--ranks", "2")
    done = train_ranks(*arguments, "--memory", "1MiB", "--out", tmp_path / "run")
    summary = summary_of(tmp_path / "run")
    assert summary["memory_limit_bytes"] == MIB
    assert len(summary["device_bytes"]) == 2
    # The first stage has two tiles of 256 px, float32, and convolutions of them.
    assert summary["device_bytes"][0] > 2 * 3 * 256 * 256 * 4 > MIB
    said = done.stdout + done.stderr
    assert said.count("warning: --memory allows 1 MiB a rank, and tensors took more on") == 1
    assert "Tensors on the device at most, by rank" in (tmp_path / "run" / "report.html").read_text()


def test_offload_fills_the_ranks_share_of_the_host(classify_slides, train, tmp_path, monkeypatch):
    budgets = []

    def pool(copies, budget):
        budgets.append(budget)
        return HostMemory(copies, budget)

    monkeypatch.setattr(saved_tensors, "HostMemory", pool)
    monkeypatch.setattr("app.training.session.host_share", lambda: 100 * MIB)
    command = ("--steps", "1", "--validation", "0", "--parallel", "single", "--offload", "overlap", "--out", tmp_path)
    train("--slides", classify_slides, *QUICK, *command)
    assert budgets == [100 * MIB]


DDP = Strategy("ddp", 2, 1, 2)


@pytest.fixture
def default(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize(
    ("strategy", "more", "expected"),
    [
        (Strategy("single", 1, 1, 1), {}, True),
        (DDP, {}, True),
        (Strategy("fsdp", 2, 1, 2), {}, True),
        (DDP, {"fixed": False}, False),
        (DDP, {"limited": True}, False),
        (DDP, {"device": "cpu"}, False),
        (DDP.under(recompute="block"), {}, False),
        (DDP.under(offload="overlap"), {}, False),
        (DDP.under(parameters=True), {}, False),
        (DDP.under(stream=512), {}, False),
        (Strategy("1f1b", 2, 2, 2), {}, False),
        (Strategy("spatial", 2, 1, 2, grid=TeamGrid(2, 1)), {}, False),
        (Placement().strategy(), {}, True),
        (Placement(stream=512).strategy(), {}, False),
    ],
)
def test_where_algorithms_are_timed(strategy, more, expected):
    given = {"fixed": True, "limited": False, "device": "cuda"} | more
    choose_algorithms(strategy, torch.device(given.pop("device")), **given)
    assert torch.backends.cudnn.benchmark == expected


@pytest.mark.usefixtures("default")
def test_not_where_the_user_asks_for_deterministic_algorithms_nor_in_prediction_over_stages(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    choose_algorithms(DDP, torch.device("cuda"), fixed=True)
    assert not torch.backends.cudnn.benchmark
    assert all(run_on_threads(2, lambda communicator, _: Placement(communicator).strategy().splits))


def test_a_run_chooses_by_its_tiles_and_its_memory(classify_slides, train, tmp_path, monkeypatch):
    def choose(strategy, device, *, fixed, limited):
        raise RunError(f"{strategy.name} {fixed=} {limited=}")

    monkeypatch.setattr("app.training.session.choose_algorithms", choose)
    command = (*QUICK, "--steps", "1", "--memory", "4GiB", "--out", tmp_path)
    assert "single fixed=True limited=True" in train("--slides", classify_slides, *command, code=1).stderr


@pytest.mark.parametrize("tile", [64, "slide"])
def test_a_prediction_chooses_by_its_tiles(tile, tmp_path, monkeypatch):
    chosen = []
    monkeypatch.setattr(
        "app.prediction.trained_model.choose_algorithms", lambda strategy, device, fixed: chosen.append(fixed)
    )
    path = write_checkpoint(tmp_path / "last.pt", CLASSIFIER, tile=tile, mpp=0.5)
    TrainedModel(path, CLASSIFIER, torch.device("cpu"))
    assert chosen == [tile == 64]
