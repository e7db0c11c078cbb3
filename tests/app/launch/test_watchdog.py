"""A rank that dies, stops or hangs, also on its GPU, is named once and ended; an orderly end is silent."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from app.launch.watchdog import DeviceProgress, Interrupt, Watchdog
from app.launch.watchdog_process import NO_ACTION, ProgressRecord, WatchdogProcess, report_first
from parallel.schedule.text import describe_fault, format_grid, from_csv
from tests.app.conftest import ROOT
from tests.helpers.in_process import put_back

TWO_RANKS = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
RANK = """
import os, pathlib, signal, sys, time
from parallel.schedule.text import from_csv
from app.launch import watchdog as module

module.STOPPED_S = 1
watchdog = module.Watchdog(1, stuck_s=float(sys.argv[2]), fault_file=pathlib.Path(sys.argv[1]))
watchdog.start()
watchdog.follow({0: (), 1: ()})  # of other shares, before
time.sleep(0.2)
watchdog.follow(from_csv(sys.argv[3]))
print(watchdog._process.pid, flush=True)
watchdog.step(16)
watchdog.at(2, waiting=False, shapes="inputs (2, 256, 64, 64) float32")
"""
WHERE = "in 1F1: forward pass of microbatch 1 through stage 1, inputs (2, 256, 64, 64) float32"
READY = "print('ready', flush=True); "
SLEEP = READY + "time.sleep(60)"


class Rank:
    """A rank in a process of its own, and its watchdog."""

    def __init__(self, folder, then, stuck_s=60):
        self.file = folder / "fault.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK + then, str(self.file), str(stuck_s), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.watchdog = psutil.Process(int(self.process.stdout.readline()))
        self.process.stdout.readline()  # "ready", or nothing from a rank that has ended

    def end(self, within_s):
        """Return what rank and watchdog said; both are gone."""
        began_s = time.monotonic()
        # Ends when nobody holds standard error any more: neither the rank nor its watchdog.
        _, said = self.process.communicate(timeout=30)
        while self.watchdog.is_running() and self.watchdog.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() - began_s < within_s
        assert time.monotonic() - began_s < within_s
        return said


@pytest.fixture
def start(tmp_path):
    ranks = []

    def start_rank(then, stuck_s=60):
        ranks.append(Rank(tmp_path, then, stuck_s))
        return ranks[-1]

    yield start_rank
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()


@pytest.mark.process
@pytest.mark.parametrize(
    ("then", "number", "stuck_s", "reason", "within_s", "code"),
    [
        (SLEEP, signal.SIGKILL, 60, "was killed (signal 9)", 3, -9),
        (SLEEP, signal.SIGSEGV, 60, "crashed (signal 11, SIGSEGV)", 3, -11),
        (SLEEP, signal.SIGUSR2, 60, "was ended by SIGUSR2 (signal 12)", 3, -12),
        (SLEEP, signal.SIGSTOP, 60, "was stopped (SIGSTOP) for 1 s and is killed", 4, -9),
        (SLEEP, None, 1, "made no progress for 1 s and is killed", 4, -9),
        ("os._exit(3)", None, 60, "ended with exit code 3 and said nothing", 3, 3),
    ],
    ids=["killed", "crashed", "ended", "stopped", "stuck", "without goodbye"],
)
def test_a_rank_that_fails_is_named_once_and_ended(then, number, stuck_s, reason, within_s, code, start):
    rank = start(then, stuck_s)
    if number is not None:
        rank.process.send_signal(number)
    said = rank.end(within_s)
    assert said.startswith(f"error: rank 1 {reason} at step 17 {WHERE}\n")
    assert ">>1F1<<" in said
    assert said == f"error: {rank.file.read_text()}"
    assert said.count(reason) == 1
    assert ("--no-channels-last" in said) == (number == signal.SIGSEGV)
    assert rank.process.returncode == code


@pytest.mark.process
@pytest.mark.parametrize(
    ("then", "stopped_s"),
    [
        ("time.sleep(2)", 0.5),
        (
            "[(watchdog.at(i % 4), time.sleep(0.1)) for i in range(14)]; watchdog.at(1, waiting=True); time.sleep(1.4);"
            " watchdog.at(-1); time.sleep(1.4); watchdog.rest(); time.sleep(1.4)",
            0,
        ),
    ],
    ids=["briefly stopped", "moving, waiting, summing, resting"],
)
def test_rank_that_is_not_stuck_is_left_alone(then, stopped_s, start):
    rank = start(READY + then, stuck_s=60 if stopped_s else 1)
    if stopped_s:
        rank.process.send_signal(signal.SIGSTOP)
        time.sleep(stopped_s)
        rank.process.send_signal(signal.SIGCONT)
    assert (rank.end(within_s=9), rank.process.returncode) == ("", 0)


@pytest.mark.process
@pytest.mark.parametrize(
    ("then", "code", "said"),
    [
        ("watchdog.close(); watchdog.close(); print('ready', flush=True); os.kill(os.getpid(), 9)", -9, ""),
        ("sys.exit(0)", 0, ""),
        ("watchdog.report('why'); sys.exit('why')", 1, "why\n"),
        ("watchdog.report('why'); watchdog.close(); os.kill(os.getpid(), 9)", -9, ""),
    ],
    ids=["closed", "end", "spoken", "spoken and killed"],
)
def test_orderly_end_is_silent(then, code, said, start):
    rank = start(then)
    assert (rank.end(within_s=3), rank.process.returncode) == (said, code)


@pytest.mark.process
def test_only_the_first_rank_of_a_run_speaks(start):
    ranks = [start(SLEEP) for _ in range(3)]
    for rank in ranks:
        rank.process.kill()
    assert sum(bool(rank.end(within_s=3)) for rank in ranks) == 1


def test_a_signal_asks_a_run_to_end_and_a_second_ctrl_c_ends_it():
    interrupt = Interrupt()
    with put_back():
        interrupt.listen()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            interrupt.requested = False
            signal.raise_signal(number)
            assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.process
def test_a_machine_without_shared_memory_of_its_own():
    mount = "mount -t tmpfs -o ro none /dev/shm && exec "
    able = subprocess.run(["unshare", "-rm", "sh", "-c", mount + "true"], capture_output=True, text=True, timeout=20)
    if able.returncode:
        pytest.skip(f"no /dev/shm of its own can be made here: {able.stderr.strip()}")
    record = "from app.launch.watchdog_process import ProgressRecord as W; w = W(); w.step(3); "
    record += "print(W(w.descriptor).read().step)"
    command = ["unshare", "-rm", "sh", "-c", mount + f"{sys.executable} -c '{record}'"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("3\n", "")


class Gpu:
    """Comes to as many of the events recorded on it as it is told to."""

    def __init__(self):
        self.recorded = self.reached = 0

    def event(self):
        self.recorded += 1
        number = self.recorded
        return SimpleNamespace(record=lambda stream: None, query=lambda: self.reached >= number)


@pytest.fixture
def gpu(monkeypatch):
    fake = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return fake


def queued_step():
    """Progress of a GPU, and the record of a rank, which has queued a whole step."""
    record = ProgressRecord()
    device = DeviceProgress(record, torch.device("cuda", 0))
    record.step(0)
    for position in range(4):
        device.at(position, waiting=True)
        device.at(position, shapes=f"inputs {position}")
    device.at(NO_ACTION)
    return device, record


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        (0, (NO_ACTION, False, "", True)),
        (5, (2, True, "", True)),
        (6, (2, False, "inputs 2", True)),
        (9, (NO_ACTION, False, "", False)),
    ],
    ids=["not begun", "waits for a message", "computes", "done"],
)
def test_the_record_says_where_the_gpu_is(reached, expected, gpu):
    device, record = queued_step()
    device.look()
    gpu.reached = reached
    device.look()
    found = record.read(of_device=True)
    assert (found.position, found.waiting, found.shapes, found.of_device) == expected
    assert (record.read().position, found.step) == (NO_ACTION, 0)
    device.look()
    assert record.read(of_device=True).since_s == found.since_s  # still there


def test_a_rank_stuck_on_its_gpu_is_named_with_its_action(gpu, tmp_path, monkeypatch):
    device, record = queued_step()
    gpu.reached = 6
    device.look()
    file, killed = tmp_path / "fault.txt", []
    process = WatchdogProcess(0, 1, record.descriptor, stuck_s=0.0, stopped_s=60, fault_file=str(file))
    process._schedule = TWO_RANKS
    monkeypatch.setattr(process, "_is_connected", lambda: True)
    rank = SimpleNamespace(status=lambda: psutil.STATUS_SLEEPING, kill=lambda: killed.append(True))
    assert not process._watch(rank)
    assert killed
    assert file.read_text().startswith("rank 1 made no progress on its GPU")
    assert all(words in file.read_text() for words in ("in 1F1: ", "inputs 2"))


def test_a_rank_on_the_cpu_records_no_events(gpu):
    Watchdog(0, stuck_s=60, device=torch.device("cpu")).at(1)
    assert gpu.recorded == 0
    Watchdog(0, stuck_s=60, device=torch.device("cuda", 0)).at(1)
    assert gpu.recorded == 1


def test_a_relative_fault_file_is_the_same_for_the_watchdog(tmp_path, monkeypatch):
    """Its process runs in the folder of the code, where it looked for another file."""
    monkeypatch.chdir(tmp_path)
    watchdog = Watchdog(0, stuck_s=60, fault_file=Path("run/fault.txt"))
    assert watchdog._settings["fault_file"] == str(Path.cwd() / "run" / "fault.txt")


def test_the_thread_ends_with_the_gpu(gpu, monkeypatch):
    """A GPU that fails raises in the rank, too; its last place stays recorded."""

    def fail():
        raise torch.AcceleratorError("CUDA error", 700)

    devices = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr("app.launch.watchdog.POLL_S", 0.001)
    device, _ = queued_step()
    monkeypatch.setattr(device, "look", fail)
    device.start()
    device._thread.join(10)
    assert not device._thread.is_alive()
    assert devices == [torch.device("cuda", 0)]
    device.close()


def test_message_names_everything_and_marks_the_cell():
    shapes = "inputs (2, 256, 64, 64) float32"
    first, second, *grid = describe_fault(TWO_RANKS, 1, 2, 16, shapes, "was killed (signal 9)", "Look.").splitlines()
    assert (first, second) == (f"rank 1 was killed (signal 9) at step 17 {WHERE}", "Look.")
    assert "\n".join(grid) == format_grid(TWO_RANKS, mark=(1, 2), around=4)
    assert sum(line.count(">>1F1<<") for line in grid) == 1


@pytest.mark.parametrize(
    ("schedule", "rank", "position", "step", "expected"),
    [
        *((TWO_RANKS, 0, position, 3, "rank 0 died at step 4, between actions") for position in (None, -1, -2)),
        *((None, 3, position, 0, "rank 3 died at step 1") for position in (-1, 7)),
        (TWO_RANKS, 1, -2, -1, "rank 1 died before the first step"),
    ],
)
def test_outside_of_a_known_action_a_message_is_one_line(schedule, rank, position, step, expected):
    assert describe_fault(schedule, rank, position, step, "", "died") == expected


def test_one_of_many_speaks_also_without_a_folder(tmp_path):
    file = tmp_path / "fault.txt"
    with ThreadPoolExecutor(8) as threads:
        first = list(threads.map(lambda rank: report_first(f"rank {rank}", file), range(32)))
    assert first.count(True) == 1
    assert file.read_text() == f"rank {first.index(True)}\n"
    assert report_first("rank 0", tmp_path / "gone" / "fault.txt")
    assert report_first("rank 0", None)


def test_a_path_that_is_no_text_is_reported(tmp_path):
    file = tmp_path / "fault.txt"
    assert report_first("no slide \udce4.svs", file)
    assert file.read_text() == "no slide \\udce4.svs\n"
