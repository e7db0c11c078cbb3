"""The commands of benchmarks that start ranks, or compare engines, still run: shortened, and only to their end."""

from __future__ import annotations

import pytest

from tests.helpers.benchmark_run import assert_runs


@pytest.mark.bench
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("benchmarks.schedules.run --quick", "speed ratio"),
        ("benchmarks.exactness.run --only threads 1x2 two-outputs --again", "8 cells: 8 passed"),
        ("benchmarks.exactness.run keeping --only dropout gpipe --again", "11 cells: 11 passed"),
        ("benchmarks.schedules.sleeping --unit 0.001 --steps 1", "m D (F + B)"),
        ("benchmarks.workers.run --unit 0.001 --steps 8", "max n t"),
        ("benchmarks.workers.asynchronous --seeds 1 --windows 1 --unit 0.0005", "async, no bound"),
        ("benchmarks.workers.delayed nuclei --rates 0.002 --seeds 1 --steps 1", "pipedream, an update a minibatch"),
        ("benchmarks.workers.real --rounds 1 --tile 64 --tiles 6", "times equal shares"),
        (
            "benchmarks.plan_accuracy.activation_bytes --model resnet11_v2 --px 32 --depths 2",
            "ranks: +15.4%",
        ),
        ("benchmarks.teams.run --rounds 1 --models unet_w2:64", "2 ranks x 1 thread, s"),
        ("benchmarks.plan_accuracy.run --quick", "Peak bytes of a rank: median error"),
        ("benchmarks.overlap.run --quick", "too few rounds to answer"),
        ("benchmarks.overlap.checkpoints --quick", "(asked: 3.5%)"),
    ],
)
def test_benchmark_runs(command: str, says: str) -> None:
    assert_runs(command, says)
