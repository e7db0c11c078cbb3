"""The demo and the commands of the README and of the page on strategies, which need the demo's slides.

All run in this process, and their ranks are forked, but for the demo's first command: how processes are started is
tested where a user's run is.
"""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import demo.run
from tests.helpers.documents import commands
from tests.helpers.forked import launched_here
from tests.helpers.in_process import call
from tests.helpers.indexed_once import indexed_once, kept_indexes

__all__ = ["indexed_once", "kept_indexes"]

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/strategies.md")
SHOWN = list(dict.fromkeys(line for page in PAGES for line in commands(ROOT / page)))
SHOWN = [line for line in SHOWN if not line.startswith(("make", "source"))]

pytestmark = [pytest.mark.readme, pytest.mark.timeout(900)]

SLIDE = "CMU-1-Small-Region.svs"

SHORTER = {
    "app.train": ("--steps", "1", "--tile", "256", "--validation-tiles=2"),
    "app.predict": ("--slides", "one"),
    "app.bench": ("--tiles", "256"),
    "app.plan": ("--tile", "512", "--model", "resnet18"),
}
"""Put after what is shown of a command: it is read, checked and begun as typed, and has less to compute."""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Working folder with all that commands of the README name; what they make lies in it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "data").symlink_to(ROOT / "data")
    (folder / "one").mkdir()
    (folder / "one" / SLIDE).symlink_to(ROOT / "data" / "real" / SLIDE)
    shutil.copytree(ROOT / "configs", folder / "configs")
    settings = folder / "configs" / "demo_classify.yaml"
    assert "tile: 512\n" in settings.read_text()
    settings.write_text(settings.read_text().replace("tile: 512\n", "tile: 256\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def with_slides(project):
    """The project, with the slides of the demo, which has made them if it was run here."""
    if not (project / "demo-data" / "slides" / "labels.csv").exists():
        demo.run.collect_slides(project / "demo-data")
    return project


def run_here(module, *arguments):
    with tempfile.TemporaryDirectory() as folder, launched_here(Path(folder)):
        return call(module, *arguments, env={"OMP_NUM_THREADS": "1"})


def test_demo(project, monkeypatch, capsys):
    """Run what ``make demo`` runs, shortened: one step, and smaller tiles where memory is not limited."""
    start = subprocess.run

    def run(command, **others):
        if command[1] != "-m" or command[2] == "app.synth":  # a run starts programs, too
            return start(command, **others)
        _, _, module, *arguments = command
        done = run_here(module, *arguments)
        print(done.stdout)
        assert done.returncode == 0 or not others["check"], done.stdout + done.stderr
        return done

    monkeypatch.setattr(demo.run.subprocess, "run", run)
    demo.run.main(["--steps", "1", "--out", "demo-data"])
    said = capsys.readouterr().out
    assert re.search(r"nuclei in real tissue, U-Net +dice \d\.\d\d +\d+\.\d\d", said)
    assert re.search(r"512 px, 2 ranks, ddp +slide_auc \d\.\d\d +\d+\.\d\d", said)
    assert "<- plan" in said
    assert said.count("out of memory  ") == 2
    assert re.search(r"MASTER, recompute +slide_auc - +\d+\.\d\d", said)
    assert re.search(r"256 px tiles +slide_auc 1\.00", said)
    assert said.count("report: demo-data/") == 7


def test_the_demo_tells_other_failures_from_out_of_memory(tmp_path):
    run, summary = demo.run.Run("1024 px", "large", (), stops=True), tmp_path / "summary.json"
    with pytest.raises(SystemExit, match=r"1024 px: .* before the first step"):
        demo.run.check_memory_ran_out(run, tmp_path)
    for error, told in ((None, "it did not"), ("the loss is nan", "the loss is nan")):
        summary.write_text(json.dumps({"error": error}))
        with pytest.raises(SystemExit, match=told):
            demo.run.check_memory_ran_out(run, tmp_path)
    summary.write_text(json.dumps({"error": "out of memory on cpu within --memory 480 MiB: lower --tile"}))
    demo.run.check_memory_ran_out(run, tmp_path)


@pytest.mark.parametrize("line", SHOWN)
def test_command(line, with_slides):
    program, minus_m, module, *arguments = line.split()
    assert (program, minus_m) == ("python", "-m"), line
    done = run_here(module, *arguments, *SHORTER.get(module, ()))
    assert done.returncode == 0, done.stdout + done.stderr
    if module == "app.train" and "--ranks" in arguments and "--parallel" not in arguments:
        assert re.search(r"plan: an epoch takes .* tiles", done.stdout)
        assert re.search(r"completed: .* images/s; planned [\d.]+ \([+-]\d+%\)", done.stdout)


def test_there_are_commands():
    assert len(SHOWN) >= 8


def test_the_readme_is_one_page():
    assert (ROOT / "README.md").stat().st_size <= 8_192
