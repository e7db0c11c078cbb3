"""The commands of docs/qupath.md, on fewer steps and the slides that other tests draw, print what the page shows."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.prediction import area_files
from tests.helpers.in_process import call

DOCUMENT = Path(__file__).parents[3] / "docs" / "qupath.md"


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Commands of the page, each with the lines that it shows of what is printed."""
    for block in re.findall(r"```console\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        for part in block.split("$ ")[1:]:
            command, *lines = part.splitlines()
            yield command, [line for line in lines if line != "..."]


def without_numbers(line: str) -> str:
    """What a line says, whatever its figures are."""
    return re.sub(r"(?<![\w/])-?[\d.:]+(?![\w/])|(?<=/)\d+|- \(- to -\)|-(?= \()", "#", line)


@pytest.mark.long
def test_every_command_prints_what_the_page_shows(segment_slides, tmp_path, monkeypatch):
    monkeypatch.setattr(area_files, "MOST_AREAS", 200)  # two steps of training give specks by the hundred thousand
    modules = []
    for command, shown in shown_commands():
        _, _, module, *arguments = shlex.split(command)
        modules.append(module)
        if module == "app.synth":
            continue

        def here(text: str) -> str:
            moved = text.replace("demo-data/qupath", f"{tmp_path}/qupath").replace("runs/", f"{tmp_path}/")
            return re.sub("demo-data/(glands|new)", str(segment_slides), moved)

        arguments = ["2" if word == "150" else here(word) for word in arguments]
        done = call(module, *arguments, env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        printed = {without_numbers(line.replace("/2  loss", "/150  loss")) for line in done.stdout.splitlines()}
        for line in shown:
            expected = without_numbers(here(line))
            assert expected in printed, f"{module} does not print {expected!r}, but {printed}"
    assert modules == ["app.synth", "app.convert", "app.train", "app.synth", "app.predict", "app.evaluate"]
    out = tmp_path / "new"
    assert len(list((out / "heat_maps").glob("*.gland.tif"))) == 4
    assert set(json.loads((out / "evaluation.json").read_text())["dice"]) == {"gland"}
    assert (out / "report.html").stat().st_size > 20_000
