"""The commands of the README and of the page on strategies, in a copy of the project; each needs the demo's slides."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.documents import commands

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/strategies.md")
SHOWN = list(dict.fromkeys(line for page in PAGES for line in commands(ROOT / page)))
SHOWN = [line for line in SHOWN if not line.startswith(("make", "source"))]

pytestmark = [pytest.mark.readme, pytest.mark.timeout(900)]


COLLECT = "import demo.run, pathlib; demo.run.collect_slides(pathlib.Path('demo-data').absolute())"
"""What ``demo/run.py`` does first."""

SHORTER = {
    "app.train": ("--steps", "1", "--developer", "validation-tiles=6", "--developer", "twin-steps=0"),
    "app.bench": ("--tiles", "256"),
}
"""Put after what is shown of a command: it is read, checked and begun as typed, and has less to compute."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as a clone has it: nothing in the working tree is overwritten."""
    folder = tmp_path_factory.mktemp("project")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def with_slides(project: Path) -> Path:
    """The project, with the slides of the demo, which has made them if it was run here."""
    if not (project / "demo-data" / "slides" / "labels.csv").exists():
        run_python(project, "-c", COLLECT)
    return project


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


def test_demo(project: Path) -> None:
    """What ``make demo`` runs, shortened: tiles of a quarter of the px, and one step on them."""
    settings = project / "configs" / "demo_classify.yaml"
    assert "tile: 512\n" in settings.read_text()
    settings.write_text(settings.read_text().replace("tile: 512\n", "tile: 256\n"))
    said = run_python(project, "demo/run.py", "--steps", "1")
    assert re.search(r"nuclei in real tissue, U-Net +dice \d\.\d\d +\d+\.\d\d", said)
    assert re.search(r"512 px, 2 ranks, ddp +slide_auc \d\.\d\d +\d+\.\d\d", said)
    assert "<- plan" in said
    assert said.count("out of memory  ") == 2
    assert re.search(r"MASTER, recompute +slide_auc - +\d+\.\d\d", said)
    assert re.search(r"256 px tiles +slide_auc 1\.00", said)
    assert said.count("report: demo-data/") == 7


@pytest.mark.parametrize("line", SHOWN)
def test_command(line: str, with_slides: Path) -> None:
    program, minus_m, module, *arguments = line.split()
    assert (program, minus_m) == ("python", "-m"), line
    run_python(with_slides, "-m", module, *arguments, *SHORTER.get(module, ()))


def test_there_are_commands() -> None:
    assert len(SHOWN) >= 8


def test_the_readme_is_one_page() -> None:
    assert (ROOT / "README.md").stat().st_size <= 8_192
