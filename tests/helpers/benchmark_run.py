"""A benchmark's command, as its README shows it but shortened, run to its end; what it measures is not judged.

It runs in this process, as do the project's commands that it starts; ranks are forked from a process that has loaded
torch. ``test_gpu_benchmark`` starts both one by one.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import benchmarks.ranks
from tests.helpers.forked import launched_here, run_module, run_ranks
from tests.helpers.in_process import call, put_back

START_RANKS, START = benchmarks.ranks.run_on_ranks, subprocess.run


def assert_runs(command: str, says: str) -> None:
    """``python -m command`` ends well, or misses a target, and prints ``says``."""
    module, *arguments = shlex.split(command)
    said = io.StringIO()
    code: object = 0
    with (
        put_back(),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        warnings.catch_warnings(action="default"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(benchmarks.ranks, "run_on_ranks", run_on_forked_ranks)
        patch.setattr(subprocess, "run", run_command)
        patch.setattr("parallel.profile.cache.keep_freed_memory", lambda: True)
        patch.setattr(sys, "argv", [module])
        try:
            run_module(module, arguments)
        except SystemExit as stop:
            code = stop.code or 0
    # 1: a target was missed, which a busy machine does.
    assert code in (0, 1), said.getvalue()
    assert says in said.getvalue(), said.getvalue()


def run_command(command: Sequence[str], **others: Any) -> subprocess.CompletedProcess[Any]:
    """Stand in for ``subprocess.run``: the project's own commands run in this process."""
    _, *words = command
    if words[:1] != ["-m"] or not words[1].startswith("app."):
        return START(command, **others)
    with tempfile.TemporaryDirectory() as folder, launched_here(Path(folder)):
        done = call(*words[1:], env=others.get("env"))
    if others.get("check"):
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_on_forked_ranks(
    world: int, target: str, argument: Any, *, launcher: Any = "torch", timeout_s: float = 200, **others: Any
) -> list[Any]:
    """Stand in for ``benchmarks.ranks.run_on_ranks``: ranks of torch are forked, on the CPU."""
    if launcher != "torch":
        return START_RANKS(world, target, argument, launcher=launcher, timeout_s=timeout_s)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "argument.json").write_text(json.dumps(argument))
        words = [target, name, launcher, str(timeout_s), others.get("device", "cpu")]
        codes, printed = run_ranks(world, "benchmarks.ranks", words, folder, others.get("limit_s", timeout_s))
        print(printed)
        if any(codes):
            raise RuntimeError(f"{target} on {world} ranks ended with {codes}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
