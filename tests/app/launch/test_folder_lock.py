"""One run in a folder at a time: who is there is named, and who is gone keeps nobody out."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from app import index
from app.launch import folder_lock
from app.launch.folder_lock import LOCK, Holder, sole_user
from app.settings.cli import FAILED, RunError
from app.training.run_folder import RunFolder
from tests.app.conftest import QUICK, ROOT, Train, train_command, train_environment
from tests.app.test_train import wait_for

HOLD = """
import sys, time
from pathlib import Path
from app.launch.folder_lock import sole_user
with sole_user(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "PATIENCE_S", 0.3)
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.1)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in ``tmp_path``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def left_behind(folder: Path, host: str) -> Path:
    """The lock's file of a holder on ``host`` that did not let go."""
    path = folder / LOCK
    path.write_text(json.dumps(asdict(replace(Holder.here(), host=host, pid=4711))))
    return path


@pytest.mark.process
def test_the_second_is_told_who_the_first_is(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    with (
        pytest.raises(RunError, match=rf"is in use by \S+ on \S+, process {other.pid} .*since 20.*--out"),
        sole_user(tmp_path),
    ):
        pass


@pytest.mark.process
def test_a_killed_holder_keeps_nobody_out(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    with sole_user(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert (tmp_path / LOCK).read_text() == ""


@pytest.mark.process
def test_who_is_ended_by_what_starts_us_is_waited_for(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    path = tmp_path / LOCK
    here = Holder.here()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"agent": "host 1"}))
    threading.Timer(1.0, other.kill).start()
    begun_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Holder, "here", lambda: replace(here, agent="host 1"))
        with sole_user(tmp_path):
            assert time.monotonic() - begun_s > 0.9


@pytest.mark.process
def test_what_a_process_forks_does_not_hold_its_lock(tmp_path: Path) -> None:
    with sole_user(tmp_path):
        child = os.fork()
        if not child:
            time.sleep(5)
            os._exit(0)
    with sole_user(tmp_path):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_holder_on_another_host_without_a_sign_of_life_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left_behind(tmp_path, "elsewhere")
    with sole_user(tmp_path):
        assert "on elsewhere, process 4711" in caplog.text
        assert "taken over" in caplog.text


def test_a_job_that_was_requeued_to_another_host_waits_for_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    left_behind(tmp_path, "elsewhere")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with sole_user(tmp_path):
        assert "sign of life" not in caplog.text


def test_a_holder_on_another_host_that_lives_is_named(tmp_path: Path) -> None:
    """Its lock is not seen here, as on a network file system mounted with local locks."""
    path, ended = left_behind(tmp_path, "elsewhere"), threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(RunError, match="on elsewhere, process 4711"), sole_user(tmp_path):
            pass
    finally:
        ended.set()
        beating.join()
    assert Holder(**json.loads(path.read_text())).host == "elsewhere"


def test_without_locks_the_sign_of_life_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with sole_user(tmp_path), pytest.raises(RunError, match=f"process {os.getpid()} "), sole_user(tmp_path):
        pass
    left_behind(tmp_path, Holder.here().host)
    with sole_user(tmp_path):
        pass


def test_parts_of_an_index_share_a_folder_and_nobody_else_does(tmp_path: Path) -> None:
    with sole_user(tmp_path, shared=True), sole_user(tmp_path, shared=True):  # noqa: SIM117  # what is refused, apart
        with pytest.raises(RunError, match="in use"), sole_user(tmp_path):
            pass
    with sole_user(tmp_path), pytest.raises(RunError, match="in use"), sole_user(tmp_path, shared=True):
        pass


@pytest.mark.process
def test_the_index_command_keeps_out_of_a_folder_in_use(
    tmp_path: Path, classify_slides: Path, other: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert index.main(["--slides", str(classify_slides), "--out", str(tmp_path), "--tile", "256"]) == FAILED
    assert f"process {other.pid}" in capsys.readouterr().err
    assert not (tmp_path / "tiles.parquet").exists()


def test_ranks_that_outlive_their_starter_keep_others_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.in_use(starts=True, writes=False), folder.in_use(starts=False, writes=True):
        pass
    with folder.in_use(starts=False, writes=True):  # noqa: SIM117  # what is refused, apart
        with pytest.raises(RunError, match="in use"), folder.in_use(starts=True, writes=False):
            pass


@pytest.mark.process
def test_two_runs_do_not_mix(classify_slides: Path, train: Train, train_ranks: Train, tmp_path: Path) -> None:
    """Both once ended with exit code 0 and one metrics.csv of both; now the second leaves all as it is."""
    out = tmp_path / "run"
    arguments = ("--slides", classify_slides, *QUICK, "--out", out, "--checkpoint-every", "2")
    with subprocess.Popen(
        train_command(*arguments, "--steps", "100000"),
        cwd=ROOT,
        env=train_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as first:
        wait_for(out / "checkpoints" / "last.pt", first)
        for start, more in ((train, ("--resume",)), (train_ranks, ("--resume", "--ranks", "2", "--parallel", "ddp"))):
            second = start(*arguments, "--steps", "100000", *more)
            assert second.returncode == FAILED
            assert "is in use by " in second.stderr
            assert f"process {first.pid} " in second.stderr
            assert "Traceback" not in second.stderr
        assert first.poll() is None
        first.kill()
    steps = [line.split(",")[0] for line in (out / "metrics.csv").read_text().splitlines()[1:]]
    assert steps[:-1] == [str(step) for step in range(1, len(steps))]
