"""The command-line surface is what it is made from; every benchmark says when, where and how it was measured."""

import re
from pathlib import Path

import pytest

from tests.golden.regenerate import FLAGS, ROOT, flags

BENCHMARKS = sorted(path.parent.name for path in (ROOT / "benchmarks").glob("*/README.md"))
UNRUN = {"gpu"}
"""Benchmarks without a committed run."""


def test_no_flag_appears_or_vanishes_unseen():
    assert flags() == FLAGS.read_text(), "a flag or a default changed: run `make golden` and look at the diff"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_its_date_machine_command_and_rows(name):
    text = (ROOT / "benchmarks" / name / "README.md").read_text()
    command = f"python -m benchmarks.{name}." in text or f"benchmarks/{name}/run.sh" in text
    assert command or re.search(rf"the code is `benchmarks/{name}/\w+\.py` of commit \w{{8}}", text)
    if name not in UNRUN:
        assert re.search(r"\d+ November 2026|2026-11-\d\d", text)
        assert re.search(r"EPYC|Xeon", text)
        assert text.count("\n|") > 2


def test_results_quote_benchmarks():
    quoted = re.findall(r"\]\(\.\./benchmarks/(\w+)/README.md\)", Path(ROOT / "docs" / "results.md").read_text())
    assert len(set(quoted)) > 15
    assert set(quoted) <= set(BENCHMARKS)
