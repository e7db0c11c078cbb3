"""Every command, flag, file and picture that the documents name is there."""

import ast
import itertools
import re
import runpy
from pathlib import Path

import pytest

from tests.helpers.documents import commands

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("README.md"),
    )
)
MAKE_TARGETS = {"demo", "test", "test-all", "setup", "setup-all", "golden", "bench", "lint"}


def test_the_table_of_rooms_is_what_their_docstrings_say():
    table = dict(
        re.findall(
            r"^\| `((?:parallel|pipelines|app)/\w+)` \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
        )
    )
    rooms = [file for room in ("parallel", "pipelines", "app") for file in (ROOT / room).glob("*/__init__.py")]
    assert table == {
        str(file.parent.relative_to(ROOT)): ast.parse(file.read_text())
        .body[0]
        .value.value.strip()
        .rstrip(".")
        .replace("\n", " ")
        for file in rooms
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_name_things_that_exist(document):
    for line in commands(document):
        for target in re.findall(r"^make ([\w-]+)", line):
            assert target in MAKE_TARGETS
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for module in re.findall(r"-m ((?:app|benchmarks|tests)[\w.]*)", line):
            path = ROOT / Path(*module.split("."))
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
        for flag in re.findall(r"-m app\.\w+.* (--[\w-]+)", line):
            assert flag in (ROOT / "tests" / "golden" / "flags.txt").read_text(), flag


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_pictures_exist(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target


@pytest.mark.parametrize("page", sorted((ROOT / "benchmarks").rglob("*.md")), ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_of_benchmarks_name_a_command_that_exists(page):
    for module in re.findall(r"`python -m (benchmarks[\w.]*)", page.read_text()):
        assert (ROOT / Path(*module.split("."))).with_suffix(".py").exists(), module


TABLES = "strategies, best candidate of each", "largest tile within"
PLAN = "python -m app.plan --model resnet50 --tile 2048 --ranks 4 --device-spec v100-16gb --largest-tile"


@pytest.mark.long
def test_plans_shown_are_those_printed_today(capsys):
    """Rows that a page leaves out are dots."""
    from app.plan import main

    assert main(PLAN.split()[3:]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    first, last = (next(k for k, line in enumerate(printed) if line.startswith(words)) for words in TABLES)
    for page, tables in (("README.md", 1), ("docs/strategies.md", 2)):
        assert PLAN in commands(ROOT / page)
        blocks = re.findall(r"```\n((?:strategy|largest tile) .*?)```", (ROOT / page).read_text(), re.DOTALL)
        assert len(blocks) == tables
        for block, table in zip(blocks, (printed[first + 1 : last], printed[last:]), strict=False):
            shown = [" ".join(line.split()) for line in block.splitlines()]
            printed_rows = [line if line in shown else "..." for line in table]
            assert [line for line, _ in itertools.groupby(printed_rows)] == shown, page


@pytest.mark.long
@pytest.mark.parametrize("name", ["boxes", "memory"])
def test_pictures_are_those_drawn_today(name):
    """``PYTHONPATH=. python docs/pictures/boxes.py`` draws boxes.svg anew."""
    script = ROOT / "docs" / "pictures" / f"{name}.py"
    assert script.with_suffix(".svg").read_text() == runpy.run_path(str(script))["picture"]()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_configs_open_with_their_command_and_are_read(path, capsys):
    from app.train import main

    text = path.read_text()
    assert text.startswith("# python -m app.train --config configs/" + path.name)
    assert main(["--slides", "somewhere", "--config", str(path), "--print-config"]) == 0
    assert "tile: " in capsys.readouterr().out
