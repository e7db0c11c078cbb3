"""The commands of docs/tutorial.md, on fewer steps and the slides that other tests draw, print what the page shows."""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from app.prediction import slide_files
from tests.helpers.in_process import call

DOCUMENT = Path(__file__).parents[3] / "docs" / "tutorial.md"


def shown_commands():
    """Commands of the page, each with the lines that it shows of what is printed."""
    for block in re.findall(r"```console\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        for part in block.split("$ ")[1:]:
            command, *lines = part.splitlines()
            yield command, [line for line in lines if line != "..."]


def without_numbers(line):
    """What a line says, whatever its figures are."""
    return re.sub(r"(?<![\w/])-?[\d.:]+(?![\w/])|(?<=/)\d+|- \(- to -\)|-(?= \()", "#", line)


def check(commands, folders):
    """Run the commands on two steps in other ``folders``; return the modules."""

    def here(text):
        for shown, folder in folders.items():
            text = text.replace(shown, str(folder))
        return text

    modules = []
    for command, shown in commands:
        _, _, module, *arguments = shlex.split(command)
        modules.append(module.removeprefix("app."))
        if module == "app.synth" and here(arguments[0]) in map(str, folders.values()):
            continue  # these are there
        arguments = ["2" if before == "--steps" else here(word) for before, word in pairwise(["", *arguments])]
        done = call(module, *arguments, env={"OMP_NUM_THREADS": "1"}, code=0)
        printed = {without_numbers(line) for line in done.stdout.splitlines()}
        for line in shown:
            expected = without_numbers(here(line))
            assert expected in printed, f"{module} does not print {expected!r}, but {printed}"
    return modules


@pytest.mark.long
def test_from_drawn_areas_to_predicted_ones(segment_slides, tmp_path, monkeypatch):
    monkeypatch.setattr(slide_files, "MOST_AREAS", 200)  # two steps of training give specks by the hundred thousand
    folders = {"demo-data/glands": segment_slides, "demo-data": tmp_path, "runs": tmp_path / "runs"}
    commands = [shown for shown in shown_commands() if "study" not in shown[0]]
    assert check(commands, folders) == ["synth", "convert", "doctor", "train", "synth", "predict", "evaluate"]
    out = tmp_path / "runs" / "new"
    assert len(list((out / "heat_maps").glob("*.gland.tif"))) == 2
    assert set(json.loads((out / "evaluation.json").read_text())["dice"]) == {"gland"}
    assert (out / "report.html").stat().st_size > 20_000


@pytest.mark.long
def test_one_label_a_slide(classify_slides, tmp_path):
    commands = [shown for shown in shown_commands() if "study" in shown[0]]
    assert check(commands, {"demo-data/study": classify_slides, "runs": tmp_path}) == ["synth", "train"]
