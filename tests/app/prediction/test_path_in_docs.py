"""The commands of docs/prediction.md, on fewer steps and the slides that other tests draw."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from app.prediction import whole_slide
from tests.helpers.documents import commands
from tests.helpers.in_process import call

DOCUMENT = Path(__file__).parents[3] / "docs" / "prediction.md"


@pytest.mark.long
def test_every_command_does_what_it_says(segment_slides, tmp_path, monkeypatch):
    monkeypatch.setattr(whole_slide, "MOST_AREAS", 200)  # two steps of training give specks by the hundred thousand
    told = [shlex.split(line) for line in commands(DOCUMENT)]
    assert [words[2] for words in told] == ["app.synth", "app.train", "app.predict", "app.evaluate"]
    for words in told[1:]:
        module, *arguments = words[2:]
        arguments = [
            word.replace("demo-data/glands", str(segment_slides)).replace("runs/", f"{tmp_path}/").replace("150", "2")
            for word in arguments
        ]
        done = call(module, *arguments, env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
    out = tmp_path / "glands-predicted"
    assert len(list((out / "heat_maps").glob("*.gland.tif"))) == 4
    assert set(json.loads((out / "evaluation.json").read_text())["dice"]) == {"gland"}
    assert (out / "report.html").stat().st_size > 20_000
