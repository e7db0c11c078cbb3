"""Several runs on one page: what differs, and figures beside each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from app.pages.run_page import names_of, write_comparison
from app.report import main
from tests.helpers.run_folder import write_run, write_summary


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    found = [write_run(tmp_path / name) for name in ("first", "second & <last>")]
    (found[1] / "config.yaml").write_text(yaml.safe_dump({"slides": "slides", "model": "unet", "out": "elsewhere"}))
    (found[1] / "env.json").write_text(json.dumps({"python": "3.12.1", "packages": {"torch": "2.15.0"}, "gpus": []}))
    write_summary(found[1], strategy="master", images_per_second=7.5, metrics={"tile_auc": 0.95}, bubble=0.125)
    return found


def page(runs: list[Path], out: Path) -> ElementTree.Element:
    return ElementTree.fromstring(write_comparison(runs, out).read_text().removeprefix("<!DOCTYPE html>"))


def rows(root: ElementTree.Element, title: str) -> list[list[str]]:
    """Cells under a heading."""
    section = next(one for one in root.iter("section") if (one.findtext("h2") or "") == title)
    return [["".join(cell.itertext()) for cell in line] for line in section.iter("tr")]


def test_only_what_differs_is_in_the_tables(runs: list[Path], tmp_path: Path) -> None:
    root = page(runs, tmp_path / "c.html")
    head = ["", "first", "second & <last>"]
    assert rows(root, "Settings that differ") == [head, ["model", "resnet18", "unet"]]
    assert rows(root, "Environment that differs") == [head, ["python", "3.11.7", "3.12.1"]]


def test_figures_stand_beside_each_other(runs: list[Path], tmp_path: Path) -> None:
    found = {name: cells for name, *cells in rows(page(runs, tmp_path / "c.html"), "Figures")}
    assert found["Strategy"] == ["ddp", "master"]
    assert found["Speed, data loading included"] == ["15.87 images/s", "7.5 images/s"]
    assert found["Bubble of the last step"] == ["–", "12.50 %"]
    assert found["Tile AUC"] == ["0.9123", "0.95"]
    assert found["Peak memory, by rank"] == ["3 GiB, 2 GiB"] * 2
    assert found["Slide AUC"] == ["undefined", "–"]


def test_a_run_without_a_step_is_still_compared(runs: list[Path], tmp_path: Path) -> None:
    for name in ("metrics.csv", "validation.csv", "summary.json"):
        (runs[1] / name).unlink()
    root = page(runs, tmp_path / "c.html")
    assert ["Strategy", "ddp", "–"] in rows(root, "Figures")
    assert f"tensorboard --logdir {tmp_path}" in [pre.text for pre in root.iter("pre")]


def test_names_are_the_shortest_that_differ(tmp_path: Path) -> None:
    assert names_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert names_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]


def test_page_needs_nothing_but_itself(runs: list[Path], tmp_path: Path) -> None:
    html = write_comparison(runs, tmp_path / "c.html").read_text()
    assert "http" not in html
    assert not re.search(r"<(script|link|iframe|object|img)\b|@import|url\(|src=|href=\"(?!#)", html)
    assert "<last>" not in html


def test_command_compares_several(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*map(str, runs)]) == 0
    assert capsys.readouterr().out.strip() == "compare.html"
    assert (tmp_path / "compare.html").is_file()
    assert main([*map(str, runs), "--out", "new/page.html"]) == 0
    assert (tmp_path / "new" / "page.html").is_file()
    assert not list(tmp_path.glob("*.tmp"))


def test_what_cannot_be_compared_is_told(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--out", str(tmp_path / "c.html"))
    assert main([str(runs[0]), str(runs[0]), *out]) == 2
    assert "each run once" in capsys.readouterr().err
    assert main([str(runs[0]), str(tmp_path / "nowhere"), *out]) == 1
    assert "does not exist" in capsys.readouterr().err
    (runs[1] / "bench.json").write_text("{}")
    assert main([*map(str, runs), *out]) == 2
    assert "a benchmark is reported alone" in capsys.readouterr().err
    assert main([]) == 2
    assert "none was given" in capsys.readouterr().err
    assert not (tmp_path / "c.html").exists()
