"""The commands of benchmarks of slides, models and plans still run: shortened, and only to their end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.benchmark_run import assert_runs

ROOT = Path(__file__).parents[1]


@pytest.mark.bench
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("benchmarks.tile_reading.data_wait --tile 256 --steps 1 --side 1536", "data_wait_fraction"),
        ("benchmarks.many_slides.run --slides 1 --size 1200 --steps 1", "trained on 1 tiles"),
        ("benchmarks.tile_reading.run --side 9000 --rounds 0.02", "peak memory of one 8192 px read"),
        (
            "benchmarks.plan_accuracy.layer_times --px 64 --nets plain12 --seconds 0.2 --rounds 1",
            "Convolutions of plain12",
        ),
        ("benchmarks.weak_scaling.run --quick", "Simulated efficiency at 64 ranks"),
        ("benchmarks.weak_scaling.trained --quick", "resnet20_v2 on tiles of 64 px, V100, simulated"),
        ("benchmarks.nuclei.compare microbatch --steps 1 --folds 1", "1 steps. 112 MiB a rank."),
        ("benchmarks.plan_accuracy.plan_speed --only one-node", "s on the cores"),
        ("benchmarks.formats.run --regions 4", "4 regions of each slide"),
        ("benchmarks.annotations.run --vertices 2000 --tiles 2", "2,000 vertices in each"),
        ("benchmarks.tile_size.run bands-resnet18 --slides 8 --steps 1 --seeds 1 --windows '512 px' bag", "| bag"),
        ("benchmarks.tile_size.run rooms --slides 8 --steps 1 --seeds 1 --windows 'whole slide'", "| whole slide"),
    ],
)
def test_benchmark_runs(command: str, says: str) -> None:
    assert_runs(command, says)


@pytest.mark.bench
@pytest.mark.parametrize(
    ("command", "says"),
    [("benchmarks.bags.run noise --slides 8 --steps 1 --seeds 1", "| --tile slide --head attention")],
)
def test_benchmark_that_forks_its_runs(command: str, says: str) -> None:
    """Use a process of its own: autograd refuses to work in a fork of one that has made a backward pass."""
    module, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout
