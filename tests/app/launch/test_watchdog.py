"""A rank that dies, stops or hangs is named once and ended; one that ends in order is let go in silence."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]

RANK = """
import os, pathlib, signal, sys, time
from parallel.schedule.action import Action
from app.launch.watchdog import Watchdog

texts = {0: "0F0 0F1 0B0 0B1", 1: "1F0 1B0 1F1 1B1"}
schedule = {rank: [Action.parse(text) for text in line.split()] for rank, line in texts.items()}
watchdog = Watchdog(1, stuck_s=float(sys.argv[2]), stopped_s=1, fault_file=pathlib.Path(sys.argv[1]))
watchdog.start()
watchdog.follow(schedule)
print(watchdog._process.pid, flush=True)
watchdog.step(16)
watchdog.at(2, waiting=False, shapes="inputs (2, 256, 64, 64) float32")
"""
FIRST_LINE = "in 1F1: forward pass of microbatch 1 through stage 1, inputs (2, 256, 64, 64) float32"


class Rank:
    """A rank in a process of its own, and its watchdog."""

    def __init__(self, folder: Path, then: str, stuck_s: float = 60) -> None:
        self.file = folder / "fault.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK + then, str(self.file), str(stuck_s)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.watchdog = psutil.Process(int(self.process.stdout.readline()))
        self.process.stdout.readline()  # "ready", or nothing from a rank that has ended

    def end(self, within_s: float) -> str:
        """What rank and watchdog said; both are gone."""
        began_s = time.monotonic()
        # Ends when nobody holds standard error any more: neither the rank nor its watchdog.
        _, said = self.process.communicate(timeout=30)
        while self.watchdog.is_running() and self.watchdog.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() - began_s < within_s
        assert time.monotonic() - began_s < within_s
        return said


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def start_rank(then: str, stuck_s: float = 60) -> Rank:
        ranks.append(Rank(tmp_path, then, stuck_s))
        return ranks[-1]

    yield start_rank
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()


SLEEP = "print('ready', flush=True); time.sleep(60)"


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "was killed (signal 9)"),
        (signal.SIGSEGV, "crashed (signal 11, SIGSEGV)"),
        (signal.SIGUSR2, "was ended by SIGUSR2 (signal 12)"),
    ],
)
def test_killed_rank_is_named_at_once(number: signal.Signals, reason: str, start: Callable[..., Rank]) -> None:
    rank = start(SLEEP)
    rank.process.send_signal(number)
    said = rank.end(within_s=3)
    assert said.startswith(f"error: rank 1 {reason} at step 17 {FIRST_LINE}\n")
    assert ">>1F1<<" in said
    assert said.count("rank 1 was") + said.count("rank 1 crashed") == 1
    assert said == f"error: {rank.file.read_text()}"
    assert ("--no-channels-last" in said) == (number == signal.SIGSEGV)


@pytest.mark.process
def test_stopped_rank_is_named_and_killed(start: Callable[..., Rank]) -> None:
    rank = start(SLEEP)
    rank.process.send_signal(signal.SIGSTOP)
    said = rank.end(within_s=4)
    assert said.startswith(f"error: rank 1 was stopped (SIGSTOP) for 1 s and is killed at step 17 {FIRST_LINE}\n")
    assert rank.process.returncode == -signal.SIGKILL


@pytest.mark.process
def test_briefly_stopped_rank_is_left_alone(start: Callable[..., Rank]) -> None:
    rank = start("print('ready', flush=True); time.sleep(2.5)")
    rank.process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    rank.process.send_signal(signal.SIGCONT)
    assert rank.end(within_s=6) == ""
    assert rank.process.returncode == 0


@pytest.mark.process
def test_stuck_rank_is_named_and_killed(start: Callable[..., Rank]) -> None:
    rank = start(SLEEP, stuck_s=1)
    said = rank.end(within_s=4)
    assert said.startswith(f"error: rank 1 made no progress for 1 s and is killed at step 17 {FIRST_LINE}\n")
    assert rank.process.returncode == -signal.SIGKILL


@pytest.mark.process
@pytest.mark.parametrize(
    "then",
    [
        "[(watchdog.at(i % 4), time.sleep(0.1)) for i in range(25)]",
        "watchdog.at(1, waiting=True); time.sleep(2.5)",
        "watchdog.at(-1); time.sleep(2.5)",
        "watchdog.rest(); time.sleep(2.5)",
    ],
    ids=["moving", "waiting", "summing", "resting"],
)
def test_rank_that_is_not_stuck_is_left_alone(then: str, start: Callable[..., Rank]) -> None:
    rank = start("print('ready', flush=True); " + then, stuck_s=1)
    assert rank.end(within_s=6) == ""
    assert rank.process.returncode == 0


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
def test_orderly_end_is_silent(then: str, code: int, said: str, start: Callable[..., Rank]) -> None:
    rank = start(then)
    assert rank.end(within_s=3) == said
    assert rank.process.returncode == code


@pytest.mark.process
def test_only_the_first_rank_of_a_run_speaks(start: Callable[..., Rank]) -> None:
    ranks = [start(SLEEP) for _ in range(3)]
    for rank in ranks:
        rank.process.kill()
    assert sum(bool(rank.end(within_s=3)) for rank in ranks) == 1


@pytest.mark.process
def test_exit_without_goodbye_is_named(start: Callable[..., Rank]) -> None:
    said = start("os._exit(3)").end(within_s=3)
    assert said.startswith(f"error: rank 1 ended with exit code 3 and said nothing at step 17 {FIRST_LINE}\n")


def test_position_costs_less_than_two_microseconds() -> None:
    from app.launch.watchdog import Watchdog

    watchdog = Watchdog(0, stuck_s=60)
    best_s = float("inf")
    for _ in range(20):
        began_s = time.perf_counter()
        for position in range(1000):
            watchdog.at(position, False, "inputs (2, 256, 64, 64) float32")
        best_s = min(best_s, (time.perf_counter() - began_s) / 1000)
    assert best_s < 2e-6


@pytest.mark.process
def test_watchdog_imports_no_torch() -> None:
    check = "import app.launch.watchdog_process, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0


@pytest.mark.process
def test_a_machine_without_shared_memory_of_its_own() -> None:
    mount = "mount -t tmpfs -o ro none /dev/shm && exec "
    able = subprocess.run(["unshare", "-rm", "sh", "-c", mount + "true"], capture_output=True, text=True, timeout=20)
    if able.returncode:
        pytest.skip(f"no /dev/shm of its own can be made here: {able.stderr.strip()}")
    record = "from app.launch.progress_record import ProgressRecord as W; w = W(); w.step(3); "
    record += "print(W(w.descriptor).read().step)"
    command = ["unshare", "-rm", "sh", "-c", mount + f"{sys.executable} -c '{record}'"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("3\n", "")
