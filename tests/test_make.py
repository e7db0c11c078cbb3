"""What the Makefile's commands reach for: nothing of the system's unless asked by name."""

import subprocess
from pathlib import Path

import pytest

from tests.helpers.lanes import NEEDS
from tools.seeded_faults import QUICK

ROOT = Path(__file__).parents[1]
SYSTEM = "tools/system_packages.sh"


def would_run(*targets):
    """Every line that ``make`` would run in a fresh clone."""
    command = ["make", "--dry-run", "--always-make", *targets]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("target", ["setup", "demo", "lint", "test", "bench", "golden"])
def test_only_setup_all_installs_system_packages(target):
    lines = would_run(target)
    assert "-m venv .venv" in lines
    assert SYSTEM not in lines
    assert SYSTEM in would_run("setup-all")


def test_only_an_unfinished_environment_is_removed(tmp_path):
    removes = f"-m venv {tmp_path} --clear\n"
    assert removes in would_run("setup", f"VENV={tmp_path}")
    (tmp_path / ".installed").touch()
    assert removes not in would_run("setup", f"VENV={tmp_path}")


def test_what_lands_is_tested_whole_and_with_all_programs():
    assert "\nmake test-all\n" in (ROOT / ".ci" / "run").read_text()
    lines = would_run("test-all").splitlines()
    (tests,) = (number for number, line in enumerate(lines) if "-m pytest" in line)
    assert lines.index(SYSTEM) < tests
    assert "--full" in lines[tests]
    assert '-m "' not in lines[tests]


def test_the_quick_lane_leaves_out_what_has_a_mark():
    assert f"not ({' or '.join(NEEDS)})" == QUICK
    assert f'-m "{QUICK}"' in would_run("test")


@pytest.mark.process
@pytest.mark.parametrize("path", ["tools/system_packages.sh", "tools/touched_outside.sh", ".ci/run"])
def test_scripts_are_in_order(path):
    assert subprocess.run(["bash", "-n", path], cwd=ROOT, capture_output=True, text=True, timeout=20).stderr == ""
