"""One run in a folder at a time: who is there is named, and who is gone keeps nobody out."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from app import index
from app.launch import host
from app.launch.host import LOCK, Holder, lock_folder
from app.settings.cli import FAILED, RunError
from app.training.run_folder import RunFolder
from tests.app.conftest import QUICK, ROOT

HOLD = """
import sys, time
from pathlib import Path
from app.launch.host import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(host, "PATIENCE_S", 0.3)


@pytest.fixture
def other(tmp_path):
    """A process that is in ``tmp_path``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def left_behind(folder):
    """The lock's file of a holder elsewhere that did not let go."""
    (folder / LOCK).write_text(json.dumps(asdict(replace(Holder.of_this_process(), host="elsewhere", pid=4711))))


def refuses(folder, match, **how):
    with pytest.raises(RunError, match=match), lock_folder(folder, **how):
        pass
    return True


@pytest.mark.process
def test_the_second_is_told_who_the_first_is_and_a_killed_one_keeps_nobody_out(
    tmp_path, other, classify_slides, capsys
):
    assert refuses(tmp_path, rf"is in use by \S+ on \S+, process {other.pid} .*since 20.*--out")
    assert index.main(["--slides", str(classify_slides), "--out", str(tmp_path), "--tile", "256"]) == FAILED
    assert f"process {other.pid}" in capsys.readouterr().err
    assert not (tmp_path / "tiles.parquet").exists()
    other.send_signal(signal.SIGKILL)
    with lock_folder(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert (tmp_path / LOCK).read_text() == ""


@pytest.mark.process
def test_who_is_ended_by_what_starts_us_is_waited_for(tmp_path, other, monkeypatch):
    path, here = tmp_path / LOCK, Holder.of_this_process()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"agent": "host 1"}))
    threading.Timer(1.0, other.kill).start()
    begun_s = time.monotonic()
    monkeypatch.setattr(Holder, "of_this_process", lambda: replace(here, agent="host 1"))
    with lock_folder(tmp_path):
        assert time.monotonic() - begun_s > 0.9


@pytest.mark.process
def test_what_a_process_forks_does_not_hold_its_lock(tmp_path):
    with lock_folder(tmp_path):
        child = os.fork()
        if not child:
            time.sleep(5)
            os._exit(0)
    with lock_folder(tmp_path):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.usefixtures("without_locks")
def test_without_locks_the_name_in_the_file_decides(tmp_path, monkeypatch):
    with lock_folder(tmp_path):
        assert refuses(tmp_path, f"process {os.getpid()} .*remove")
    with lock_folder(tmp_path, shared=True), lock_folder(tmp_path, shared=True):
        pass
    left_behind(tmp_path)
    assert refuses(tmp_path, "on elsewhere, process 4711")
    (tmp_path / LOCK).unlink()
    with lock_folder(tmp_path):
        pass
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    left_behind(tmp_path)  # a job that was requeued takes its folder
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with lock_folder(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("written", [[], ["run.log"]])
def test_an_error_before_anything_is_written_leaves_no_folder(tmp_path, written):
    folder = tmp_path / "new"

    def fail():
        with lock_folder(folder):
            for name in written:
                (folder / name).touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert folder.exists() == bool(written)


def test_parts_of_an_index_and_ranks_of_a_run_share_a_folder_and_nobody_else_does(tmp_path):
    with lock_folder(tmp_path, shared=True), lock_folder(tmp_path, shared=True):
        assert refuses(tmp_path, "in use")
    with lock_folder(tmp_path):
        assert refuses(tmp_path, "in use", shared=True)
    folder = RunFolder(tmp_path)
    with folder.in_use(starts=True, writes=False), folder.in_use(starts=False, writes=True):
        pass
    with folder.in_use(starts=False, writes=True):  # noqa: SIM117  # ranks that outlive what started them
        with pytest.raises(RunError, match="in use"), folder.in_use(starts=True, writes=False):
            pass


def test_two_runs_do_not_mix(classify_slides, train, tmp_path):
    """Both once ended with exit code 0 and one metrics.csv of both; now the second leaves all as it is."""
    with lock_folder(tmp_path):
        second = train("--slides", classify_slides, *QUICK, "--steps", "1", "--out", tmp_path, code=FAILED)
    assert f"process {os.getpid()} " in second.stderr.partition("is in use by ")[2]
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
