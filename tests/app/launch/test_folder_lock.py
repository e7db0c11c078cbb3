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
from app.launch import host
from app.launch.host import LOCK, Holder, lock_folder
from app.settings.cli import FAILED, RunError
from app.training.run_folder import RunFolder
from tests.app.conftest import QUICK, ROOT, Train, train_command, train_environment
from tests.app.test_train import wait_for

HOLD = """
import sys, time
from pathlib import Path
from app.launch.host import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PATIENCE_S", 0.3)


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
        lock_folder(tmp_path),
    ):
        pass


@pytest.mark.process
def test_a_killed_holder_keeps_nobody_out(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    with lock_folder(tmp_path):
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
        with lock_folder(tmp_path):
            assert time.monotonic() - begun_s > 0.9


@pytest.mark.process
def test_what_a_process_forks_does_not_hold_its_lock(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        child = os.fork()
        if not child:
            time.sleep(5)
            os._exit(0)
    with lock_folder(tmp_path):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_without_locks_the_name_in_the_file_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_folder(tmp_path), pytest.raises(RunError, match=f"process {os.getpid()} .*remove"), lock_folder(tmp_path):
        pass
    with lock_folder(tmp_path, shared=True), lock_folder(tmp_path, shared=True):
        pass
    path = left_behind(tmp_path, "elsewhere")
    with pytest.raises(RunError, match="on elsewhere, process 4711"), lock_folder(tmp_path):
        pass
    path.unlink()
    with lock_folder(tmp_path):
        pass


def test_a_job_that_was_requeued_takes_its_folder_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    left_behind(tmp_path, "elsewhere")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with lock_folder(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("written", [[], ["run.log"]])
def test_an_error_before_anything_is_written_leaves_no_folder(tmp_path: Path, written: list[str]) -> None:
    folder = tmp_path / "new"

    def fail() -> None:
        with lock_folder(folder):
            for name in written:
                (folder / name).touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert folder.exists() == bool(written)


def test_parts_of_an_index_share_a_folder_and_nobody_else_does(tmp_path: Path) -> None:
    with lock_folder(tmp_path, shared=True), lock_folder(tmp_path, shared=True):  # noqa: SIM117  # what is refused, apart
        with pytest.raises(RunError, match="in use"), lock_folder(tmp_path):
            pass
    with lock_folder(tmp_path), pytest.raises(RunError, match="in use"), lock_folder(tmp_path, shared=True):
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
