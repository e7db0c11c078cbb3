"""Commands as a user starts them: launchers, signals, ranks that die, fail or do not come, pipes that are closed."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.ranks import AS_IN_A_CONTAINER, MPIRUN
from tests.app.conftest import (
    QUICK,
    ROOT,
    TORCHRUN,
    begin,
    begin_train,
    checkpoint_of,
    give_index,
    losses_of,
    rank_process,
    summary_of,
    train_command,
)
from tests.helpers.hand_made_checkpoint import CLASSIFIER, write_checkpoint

pytestmark = pytest.mark.process

ENDLESS = (*QUICK, "--checkpoint-every", "2", "--steps", "100000")
TWO = ("--ranks", "2", "--parallel", "ddp")


def run_to_its_end(*command, timeout_s=200, **env):
    process = begin(*command, **AS_IN_A_CONTAINER, **env)
    printed, _ = process.communicate(timeout=timeout_s)
    return process.returncode, printed


def test_losses_are_equal_under_torchrun_over_gloo_under_mpirun_and_on_one_rank(classify_slides, train, tmp_path):
    one, shared = tmp_path / "one", ("--slides", classify_slides, *QUICK, "--optimizer", "sgd", "--steps", "3")
    train(*shared, "--parallel", "single", "--out", one)
    python, *module = train_command(*shared, "--parallel", "bidirectional", "--validation-tiles=1", "--out")
    for name, start in (("gloo", [TORCHRUN, "--nproc-per-node", "2"]), ("mpi", [str(MPIRUN), "-n", "2", python])):
        give_index(classify_slides, tmp_path / name)
        code, printed = run_to_its_end(*start, *module, str(tmp_path / name))
        assert code == 0, printed
        assert "\x1b" not in printed
        assert (summary_of(tmp_path / name)["ranks"], summary_of(tmp_path / name)["steps"]) == (2, 3)
    assert len(set(losses_of(tmp_path / "gloo"))) == 3
    assert losses_of(tmp_path / "gloo") == losses_of(tmp_path / "mpi")
    assert losses_of(tmp_path / "gloo") == pytest.approx(losses_of(one), rel=1e-4)


def test_ranks_train_split_and_go_on_sharded_and_in_slices(classify_slides, train_ranks, tmp_path):
    """Without --microbatches: those of the first strategy are kept, which are not the second one's own."""
    arguments = [argument for argument in QUICK if argument not in ("--microbatches", "2")]
    common = ("--slides", classify_slides, *arguments, "--optimizer", "sgd", "--out", tmp_path / "run", "--ranks", "2")
    keys = ("strategy", "stages", "microbatches", "images")
    for strategy, expected in (
        (("--parallel", "master", "--steps", "3", "--twin-steps=1"), ["master", 2, 4, 12]),
        (("--parallel", "fsdp", "--steps", "5", "--resume", "--extend"), ["fsdp", 1, 4, 20]),
        (("--parallel", "ddp", "--zero", "2", "--steps", "6", "--resume", "--extend"), ["ddp", 1, 4, 24]),
    ):
        train_ranks(*common, *strategy)
        summary = summary_of(tmp_path / "run")
        assert [summary[key] for key in keys] == expected
        assert 0 < summary["bubble"] < 1 if strategy[1] == "master" else summary["bubble"] is None
        assert len(summary["peak_memory_bytes"]) == summary["ranks"] == 2


def test_signal_saves_and_ends_well(classify_slides, tmp_path):
    """The launcher passes it to its ranks; one process takes it in tests/app/launch/test_watchdog.py."""
    out = tmp_path / "run"
    process = begin_train("--slides", classify_slides, *ENDLESS, *TWO, "--out", out)
    process.send_signal(signal.SIGUSR1)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    summary = summary_of(out)
    assert (summary["status"], summary["images"]) == ("interrupted", 4 * summary["steps"])
    assert checkpoint_of(out)["step"] == summary["steps"]


@pytest.mark.parametrize("strategy", [TWO, ("--max-restarts", "1", "--parallel", "single")], ids=["two", "one"])
def test_ranks_stop_and_save_when_their_launcher_is_killed(strategy, classify_slides, tmp_path):
    out, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    arguments = ("--slides", classify_slides, *ENDLESS, *strategy, "--validation", "0", "--out", out)
    launcher = begin_train(*arguments, TMPDIR=str(temporary))
    started = psutil.Process(launcher.pid).children(recursive=True)
    assert len(started) >= 2
    assert list(temporary.glob("megatile-ranks-*"))
    launcher.kill()  # and not waited for: nobody may take its exit status before the ranks look
    _, alive = psutil.wait_procs(started, timeout=40)
    for process in alive:
        process.kill()
    launcher.communicate()
    assert not alive
    assert not list(temporary.glob("megatile-ranks-*"))
    summary = summary_of(out)
    assert (summary["status"], checkpoint_of(out)["step"]) == ("interrupted", summary["steps"])


def test_ranks_predict_no_more_when_their_launcher_is_killed(classify_slides, tmp_path):
    checkpoint, out = write_checkpoint(tmp_path / "best.pt", CLASSIFIER, tile=256, mpp=0.5), tmp_path / "out"
    words = ("--slides", classify_slides, "--checkpoint", checkpoint, "--model", CLASSIFIER, "--out", out)
    words += ("--ranks", "2", "--overlap", "0.9", "--batch", "1")  # seconds for each slide
    launcher = begin(sys.executable, "-m", "app.predict", *map(str, words))
    while not all((out / f"run-{rank}.log").exists() for rank in range(2)):
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.01)
    ranks = [rank_process(launcher, rank) for rank in range(2)]
    launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=40)
    for process in alive:
        process.kill()
    launcher.communicate()
    assert not alive
    assert not (out / "slides.csv").exists()


def test_killed_rank_ends_the_run_with_one_message(classify_slides, tmp_path):
    out = tmp_path / "run"
    process = begin_train("--slides", classify_slides, *ENDLESS, *TWO, "--out", out)
    rank_process(process, 1).send_signal(signal.SIGKILL)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1, printed
    message = (out / "fault.txt").read_text()
    assert message.startswith("rank 1 was killed (signal 9) at step ")
    assert printed.count("was killed (signal 9)") == 1
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].endswith(f"exit code 137; its message stands above and in {out}/fault.txt")
    summary = summary_of(out)
    assert (summary["status"], summary["error"] + "\n") == ("failed", message)
    assert checkpoint_of(out)["step"] > 0


@pytest.mark.parametrize(
    ("fault", "reason", "launcher"),
    [
        # mpirun may take the exit code before it is seen
        ("killed", r"(was killed \(signal 9\)|died)", (str(MPIRUN), "-n", "2")),
        ("shape", r"failed \(RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied \(1x7 and 8x2\)\)", ()),
    ],
    ids=["killed-mpi", "shape-gloo"],
)
def test_failing_rank_is_named_with_action_and_shapes(fault, reason, launcher, classify_slides, tmp_path):
    out = tmp_path / "run"
    split = ("--parallel", "1f1b", "--cuts=3", "--batch", "2", "--model", "tests.helpers.failing_model:failing")
    arguments = ("--slides", classify_slides, *QUICK, *split, "--out", out, "--steps", "100000")
    give_index(classify_slides, out)
    code, printed = run_to_its_end(
        *launcher, *train_command(*arguments, *(() if launcher else ("--ranks", "2"))), FAULT=fault
    )
    assert code not in (0, 2), printed
    messages = re.findall(r"error: (rank \d .*)", printed)
    assert len(messages) == 1, printed
    where = r" at step 2 in 1F1: forward pass of microbatch 1 through stage 1, inputs \w+ \(1, 8, 63, 63\) float32"
    assert re.fullmatch(rf"rank 1 {reason}{where}", messages[0]), messages[0]
    assert ">>1F1<<" in printed
    assert (out / "fault.txt").read_text().splitlines()[0] == messages[0]
    # Found dead or heard of, not waited for: watchdogs end what lingers after 20 s.
    assert time.time() - (out / "fault.txt").stat().st_mtime < 15


def meeting(folder):
    """A start that fails in time, before it reads anything."""
    return train_command("--slides", folder, "--out", folder / "run", "--parallel", "ddp", "--join-timeout-s=2")


def error_of(*command, timeout_s=140, **env):
    """The one error of ranks that cannot come together; on a busy machine, importing torch takes most of the time."""
    process = begin(*command, new_session=True, **AS_IN_A_CONTAINER, **env)
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the rank that sleeps
    assert process.returncode != 0
    (error,) = (line for line in printed.splitlines() if "error: " in line)
    return error


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ([TORCHRUN, "--nproc-per-node=2", "--no-python"], r"rank 1 of 2 did not come within [\d.]+ s \(--join-timeout"),
        ([str(MPIRUN), "-n", "2"], r"MPI did not start within 2 s \(--join-timeout-s\), .* once all 2 ranks are there"),
    ],
    ids=["torchrun", "mpirun"],
)
def test_a_rank_that_does_not_come_is_named_once(launcher, expected, tmp_path):
    late = "test $RANK$PMI_RANK$OMPI_COMM_WORLD_RANK = 1 && sleep 120; exec " + " ".join(meeting(tmp_path))
    assert re.search(expected, error_of(*launcher, "sh", "-c", late))


def test_a_first_rank_that_fails_before_it_is_watched_ends_the_others(tmp_path):
    """They waited for its word for half an hour."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "attempts.json").write_text("[]")
    command = train_command("--slides", tmp_path, "--out", tmp_path / "run", "--parallel", "ddp")
    assert "attempts.json" in error_of(str(MPIRUN), "-n", "2", *command)


def test_a_port_that_is_taken(tmp_path):
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0"}
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        error = error_of(*meeting(tmp_path), MASTER_PORT=str(port), **ranks)
    assert f"cannot listen on port {port}, where the ranks are to meet (MASTER_PORT): Address already in use" in error


def test_a_network_interface_that_is_not_there(tmp_path):
    command = (TORCHRUN, "--nproc-per-node=2", *meeting(tmp_path)[1:])
    error = error_of(*command, GLOO_SOCKET_IFNAME="no-such-net")
    for words in ("rank 0 of 2 on ", "no-such-net; all ranks have come", "set GLOO_SOCKET_IFNAME"):
        assert words in error


def test_a_launcher_of_another_mpi(tmp_path):
    error = error_of(*meeting(tmp_path), OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2")
    assert "2 ranks were started, and MPI knows of 1: the launcher belongs to another MPI" in error


COMMAND = """
import logging, sys
from dataclasses import dataclass
from pathlib import Path
from app.settings.cli import RunError, run_command

@dataclass(frozen=True)
class Command:
    done: Path
    fails: bool = False

def body(command):
    for number in range(20_000):
        print("line", number)
        if not number % 1000:
            sys.stdout.flush()
            print("working", file=sys.stderr)
    logging.getLogger("any").warning("a warning")
    command.done.touch()
    if command.fails:
        raise RunError("it failed")

sys.exit(run_command(Command, body, None, "command"))
"""


@pytest.mark.parametrize(("closed", "fails"), [("stdout", True), ("stdout", False), ("stderr", True)])
def test_a_reader_that_leaves_ends_no_command(closed, fails, tmp_path):
    arguments = ["--done", str(tmp_path / "done"), *(["--fails"] if fails else [])]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    getattr(process, closed).close()
    said = (process.stderr if closed == "stdout" else process.stdout).read()
    assert process.wait(60) == fails
    assert (tmp_path / "done").exists()
    assert "Traceback" not in said
    assert "BrokenPipe" not in said
    if closed == "stdout":
        assert said.splitlines()[-1] == ("command: error: it failed" if fails else "a warning")
    else:
        assert len(said.splitlines()) == 20_000
    for stream in (process.stdout, process.stderr):
        stream.close()


def test_help_into_a_closed_pipe():
    shell = f"{sys.executable} -m app.synth --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
