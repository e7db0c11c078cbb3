"""The benchmarks' commands still run: shortened, and only to their end; what they measure is not judged here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("benchmarks.engine.run --tile 64 --steps 1", "engine_over_plain"),
        ("benchmarks.data_wait.run --tile 256 --steps 1", "data_wait_fraction"),
        ("benchmarks.big_slide.run --size 3000 --tile 512 --steps 1", "1 tiles trained on"),
        ("benchmarks.tile_reading.run --side 9000 --rounds 0.02", "peak memory of one 8192 px read"),
        ("benchmarks.stream.run --side 9000 --rounds 0.02", "2048 px, one thread"),
        ("benchmarks.tile_reading.exactness data/real", "largest difference 0"),
        ("benchmarks.schedules.run --quick", "speed ratio"),
        ("benchmarks.exactness.run --only threads 1x2 float32 --again", "16 cells: 16 passed"),
        ("benchmarks.exactness.keeping --only dropout gpipe --again", "16 cells: 16 passed"),
        ("benchmarks.model_zoo.run --only torchvision:squeezenet1_1 --again", "1 of 1 classifiers of torchvision"),
        ("benchmarks.sleeping_stages.run --unit 0.005 --steps 1", "m D (F + B)"),
        ("benchmarks.activation_bytes.run --model resnet18 --px 64 --depths 2", "max(A_k, A_{D-1-k})"),
        ("benchmarks.memory.run --models resnet18 --px 64 --ranks 1 2 --strategies 1f1b", "Error of the prediction"),
        ("benchmarks.links.run --models unet_w4 --px 32", "only supports adjacent-stage"),
        ("benchmarks.balances.run --quick", "resnet101, 64 px"),
        ("benchmarks.plan_accuracy.run --quick", "Peak bytes of a rank: median error"),
        ("benchmarks.layer_times.run --px 64 --nets plain12 --seconds 0.5", "predicted by the calibration of 0.5 s"),
        ("benchmarks.checkpoint_stall.run --quick", "(asked: 3.5%)"),
        ("benchmarks.weak_scaling.run --quick", "Simulated efficiency at 64 ranks"),
        (
            "benchmarks.offload_study.run --models squeezenet1_1 --modes none naive --epochs 1 --pictures 12 --batch 4",
            "to the host",
        ),
    ],
)
def test_benchmark_runs(command: str, says: str) -> None:
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
