"""The fuzz command: it tells each kind of fault apart, its damage is repeatable, and a short run of it finds none."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fuzz import run as fuzz
from benchmarks.fuzz.mutations import is_payload, layout_of, write_variant
from benchmarks.fuzz.seeds import FORMATS, write_seeds
from benchmarks.fuzz.subject import Report

ROOT = Path(__file__).parents[1]

QUICK = [name for name in FORMATS if name not in ("svs", "ndpi")]
"""Without the real slides, which take longer to read."""

VARIANTS = 3
"""Of each format in the short run; a damaged file costs about 0.1 s."""


@pytest.fixture(autouse=True)
def _no_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would import the whole of pytest, which is ``__main__`` here."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


def whole_report() -> Report:
    return Report(facts=("tiled", 0.5), reads={"8x8:0,0": np.zeros((8, 8, 3), np.uint8)}, backend="tiled")


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({}, "unchanged"),
        ({"reads": {}, "fault": "SlideError: damaged"}, "refused"),
        ({"reads": {"8x8:0,0": None}, "fault": "one tile"}, "partly read"),
        ({"foreign": "KeyError"}, "foreign exception"),
        ({"peak_bytes": 1 << 31}, "over 1.5 GB"),
        pytest.param({"facts": ("tiled", 1.27)}, "SILENT", marks=pytest.mark.process),
        pytest.param({"reads": {"8x8:0,0": np.ones((8, 8, 3), np.uint8)}}, "SILENT", marks=pytest.mark.process),
    ],
)
def test_outcomes_are_told_apart(change: dict[str, object], outcome: str, tmp_path: Path) -> None:
    report = replace(whole_report(), **change)
    assert fuzz.judged("png", report, whole_report(), False, tmp_path / "none.png")[0] == outcome


@pytest.mark.process
def test_what_ends_a_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuzz.apart(os.abort) == "crash: SIGABRT"
    assert fuzz.apart(os._exit, 3) == "crash: exit code 3"
    assert "MemoryError" in repr(fuzz.apart(bytearray, 4 << 30))
    monkeypatch.setattr(fuzz, "CLOCK_S", 0.2)
    assert fuzz.apart(time.sleep, 5) == "hang"


def test_damage_is_repeatable_and_knows_what_it_touches(tmp_path: Path) -> None:
    seed = write_seeds(tmp_path / "whole", ["tiff-deflate"])["tiff-deflate"]
    layout = layout_of(seed)
    copies = [tmp_path / f"{k}.tif" for k in range(2)]
    done = [write_variant(seed, layout, copy, random.Random(7)) for copy in copies]
    assert done[0] == done[1]
    assert copies[0].read_bytes() == copies[1].read_bytes() != seed.read_bytes()
    whole = seed.read_bytes()
    inside, before = bytearray(whole), bytearray(whole)
    inside[layout.payload[0][0]] ^= 1
    before[4] ^= 1
    assert is_payload(whole, bytes(inside), layout)
    assert not is_payload(whole, bytes(before), layout)


@pytest.mark.process
def test_a_short_run_finds_no_fault(tmp_path: Path) -> None:
    """As a command: its processes are forked from one of its own, that has loaded little."""
    command = ["-m", "benchmarks.fuzz.run", "--variants", str(VARIANTS), "--formats", ",".join(QUICK)]
    done = subprocess.run(
        [sys.executable, *command, "--json", str(tmp_path / "variants.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    variants = json.loads((tmp_path / "variants.json").read_text())
    assert len(variants) == VARIANTS * len(QUICK)
    assert [variant for variant in variants if variant["outcome"] in fuzz.FAULTS] == []
