"""A benchmark's command, as its README shows it but shortened, run to its end; what it measures is not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def assert_runs(command: str, says: str) -> None:
    """``python -m command`` ends well, or misses a target, and prints ``says``."""
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    # 1: a target was missed, which a busy machine does.
    assert done.returncode in (0, 1), done.stderr
    assert says in done.stdout, done.stdout + done.stderr
