"""``python -m app.plan ... | head -1``: no traceback, and the command does what else it was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]

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


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_reader_that_leaves_ends_no_command(closed: str, fails: bool, tmp_path: Path) -> None:
    arguments = ["--done", str(tmp_path / "done"), *(["--fails"] if fails else [])]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stderr
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


def test_help_into_a_closed_pipe() -> None:
    shell = f"{sys.executable} -m app.synth --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
