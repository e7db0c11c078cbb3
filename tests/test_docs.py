"""Every command the documents show is run, every file they name is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.memory_picture import FILE, picture

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "benchmarks").rglob("README.md"),
    )
)
MAKE_TARGETS = {"demo", "test", "setup", "golden", "bench", "lint"}


def commands(path: Path) -> list[str]:
    """Lines of the ``bash`` blocks of a document, without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_of_the_readme_run_in_order() -> None:
    """The demo that ``make demo`` runs, shortened, then the lines as they are printed."""
    shown = [line for line in commands(ROOT / "README.md") if not line.startswith(("make", "source"))]
    assert len(shown) >= 4
    said = run_python("demo/run.py", "--steps", "1")
    assert re.search(r"2 ranks as planned +slide_auc \d\.\d\d +\d+\.\d\d", said)
    assert re.search(r"MASTER on 2 ranks +slide_auc \d\.\d\d +\d+\.\d\d", said)
    assert said.count("report: demo-data/") == 4
    shutil.rmtree(ROOT / "runs", ignore_errors=True)
    for line in shown:
        program, *arguments = line.split()
        assert program == "python", line
        run_python(*arguments)


def run_python(*arguments: str) -> str:
    """What ``python`` with these arguments prints; it has to end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_name_things_that_exist(document: Path) -> None:
    for line in commands(document):
        for target in re.findall(r"^make (\w+)", line):
            assert target in MAKE_TARGETS
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for module in re.findall(r"-m ((?:app|benchmarks|tests)[\w.]*)", line):
            path = ROOT / Path(*module.split("."))
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
        for flag in re.findall(r"-m app\.\w+.* (--[\w-]+)", line):
            assert flag in (ROOT / "tests" / "golden" / "flags.txt").read_text(), flag


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_pictures_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target


def test_picture_of_memory_is_that_drawn_today() -> None:
    """``python -m tests.helpers.memory_picture`` draws it anew."""
    assert FILE.read_text() == picture()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_configs_open_with_their_command_and_are_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from app.train import main

    text = path.read_text()
    assert text.startswith("# python -m app.train --config configs/" + path.name)
    assert main(["--slides", "somewhere", "--config", str(path), "--print-config"]) == 0
    assert "tile: " in capsys.readouterr().out
