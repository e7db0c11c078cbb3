"""Sweeps on the page: every setting, what is said of it, and nothing where there was none."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from app.benchmark.knobs import KNOBS, settings_of
from app.benchmark.sweep import Measured, sweep_findings, sweep_rows
from app.pages.bench_sweep import sweep_parts


def sweep() -> dict[str, Any]:
    knobs = KNOBS[:2]
    speeds = {0: (1.0, 1.01), 1: (1.5, 1.51), 2: (1.2, 1.21), 3: ()}
    measured = [
        Measured(setting, speeds[number], "" if speeds[number] else "it <broke>")
        for number, setting in enumerate(settings_of(knobs))
    ]
    rows = sweep_rows(knobs, measured)
    described = [{"name": knob.name, "off": knob.off, "on": knob.on, "what": knob.what} for knob in knobs]
    found = {"rows": rows, "findings": sweep_findings(rows), "knobs": described}
    return {"model": "m", "strategy": "ddp", "ranks": 2, "tile_px": 512, **found}


def test_every_setting_has_its_row_and_findings_stand_above() -> None:
    html = "".join(sweep_parts([sweep()]))
    page = ElementTree.fromstring(f"<main>{html}</main>")
    text = " ".join(page.itertext())
    assert "m, ddp on 2 ranks, 512 px" in text
    assert "Alone, what helps: read-ahead 1GiB" in text
    assert "tiles are read while others are computed" in text
    assert [cell.text for cell in page.findall(".//tbody/tr/td[1]")] == [row["label"] for row in sweep()["rows"]]
    assert "it <broke>" in text


def test_nothing_without_sweeps() -> None:
    assert list(sweep_parts([])) == []
