"""The README's commands, as they are printed and in their order, in a copy of the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.documents import commands

ROOT = Path(__file__).parents[1]
SHOWN = [line for line in commands(ROOT / "README.md") if not line.startswith(("make", "source"))]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Copy:
    """The project as a clone has it, so that nothing in the working tree is overwritten.

    Attributes:
        said: what the demo printed.
    """

    folder: Path
    said: str


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy in which the demo that ``make demo`` runs has run, shortened."""
    folder = tmp_path_factory.mktemp("project")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return Copy(folder, run_python(folder, "demo/run.py", "--steps", "1"))


def run_python(folder: Path, *arguments: str) -> str:
    """What ``python`` with these arguments prints; it has to end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_demo(project: Copy) -> None:
    assert re.search(r"2 ranks as planned +slide_auc \d\.\d\d +\d+\.\d\d", project.said)
    assert re.search(r"MASTER on 2 ranks +slide_auc \d\.\d\d +\d+\.\d\d", project.said)
    assert project.said.count("report: demo-data/") == 4


@pytest.mark.parametrize("line", SHOWN)
def test_command(line: str, project: Copy) -> None:
    program, *arguments = line.split()
    assert program == "python", line
    run_python(project.folder, *arguments)


def test_there_are_commands() -> None:
    assert len(SHOWN) >= 8
