"""Is the planner right about tiles computed box by box? Seconds and bytes of a step, predicted, and then measured, of
eight problems that nothing was fitted to.

Takes nothing; gives ``bench-data/plan_accuracy_streamed.json`` and a table, on one thread. Seconds are the median of
timed steps, beside a calibration of this machine; bytes are those of tensors that live on the device at a time. Wants
an otherwise idle machine. Exit code 0 when everything asked was reached.

    taskset -c 0 python -m benchmarks.plan_accuracy.streamed [--only PROBLEM ...] [--steps N] [--write]
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.planning.machine import this_machine
from app.planning.workload import Workload
from app.settings.optimization import OptimizerSettings
from app.training.engines import build_engine, build_optimizer
from benchmarks.results import markdown_table, parser_of, publish, results
from models.blocks import Norm
from models.losses import PixelClassLoss, TileClassLoss
from models.registry import build_model
from parallel.comm.local import LocalCommunicator
from parallel.engine.step import Microbatch
from parallel.offload.live_bytes import LiveBytes
from parallel.plan.plan import PlanRow
from parallel.plan.search import Planner
from parallel.strategy import Strategy

OUT = Path(__file__).parents[2] / "bench-data" / "plan_accuracy_streamed.json"
MIB = 1 << 20
CLASSES = 2
SMALL = 256
"""px of the part of the tile that statistics are of."""
RATE = 1e-6
SECONDS, BYTES = 0.15, 0.10
"""Errors that are asked for."""


@dataclass(frozen=True)
class StreamedProblem:
    """One tile a step, in boxes of ``box`` px."""

    model: str
    norm: Norm
    tile: int
    box: int
    segments: bool = False

    def __str__(self) -> str:
        norm = "layer" if "convnext" in self.model else self.norm
        return f"{self.model.removeprefix('torchvision:')}, {norm} norm, {self.tile} px in boxes of {self.box}"


PROBLEMS = {
    "resnet34": StreamedProblem("torchvision:resnet34", "frozen", 1024, 256),
    "resnet101": StreamedProblem("torchvision:resnet101", "frozen", 768, 256),
    "unet": StreamedProblem("unet_w24", "frozen", 512, 256, segments=True),
    "densenet169": StreamedProblem("torchvision:densenet169", "frozen", 512, 256),
    "efficientnet": StreamedProblem("torchvision:efficientnet_b1", "frozen", 768, 256),
    "convnext": StreamedProblem("torchvision:convnext_tiny", "batch", 512, 256),
    "resnet18-batch": StreamedProblem("resnet18", "batch", 768, 256),
    "regnet": StreamedProblem("torchvision:regnet_y_800mf", "frozen", 1024, 512),
}


def compared(problem: StreamedProblem, steps: int) -> dict[str, Any]:
    """Predictions and measurements of a problem, as JSON can hold them."""
    strategy = Strategy("single", 1, 1, 1).under(stream=problem.box)
    row = _predicted(problem, strategy)
    image = torch.rand(1, 3, problem.tile, problem.tile).to(memory_format=torch.channels_last)
    engine = build_engine(
        strategy,
        _module(problem, image).to(memory_format=torch.channels_last),
        PixelClassLoss() if problem.segments else TileClassLoss(),
        functools.partial(build_optimizer, OptimizerSettings(optimizer="sgd")),
        LocalCommunicator(),
        batch=1,
        tile=problem.tile,
        seed=0,
        device=torch.device("cpu"),
    )
    target = torch.zeros((1, problem.tile, problem.tile) if problem.segments else (1,), dtype=torch.int64)

    def one_tile() -> Iterator[Microbatch]:
        yield Microbatch(image, target.to(torch.uint8) if problem.segments else target, tuple(image.shape))

    times = []
    for number in range(steps + 1):
        begun = time.perf_counter()
        engine.step(one_tile(), number, RATE)
        times.append(time.perf_counter() - begun)
    live = LiveBytes()
    live.add(engine.on_device())
    with live:
        engine.step(one_tile(), steps + 1, RATE)
    return {
        **asdict(problem),
        "predicted_s": row.step_s,
        "steps_s": times[1:],
        "predicted_bytes": row.peak_bytes[0],
        "live_bytes": live.peak_bytes,
        "host_bytes": row.host_bytes,
    }


def _module(problem: StreamedProblem, image: torch.Tensor) -> nn.Module:
    """The model; frozen norms have the statistics of the tile, so that values neither grow nor vanish."""
    module = build_model(problem.model, classes=CLASSES, norm=problem.norm)
    if problem.norm == "frozen":
        trained = build_model(problem.model, classes=CLASSES, norm="batch").train()
        for part in trained.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = 1.0
        with torch.no_grad():
            trained(image[:, :, :SMALL, :SMALL])
        module.load_state_dict(trained.state_dict(), strict=False)
    return module


def _predicted(problem: StreamedProblem, strategy: Strategy) -> PlanRow:
    machine = this_machine(1, memory=8 << 30)
    work = Workload(problem.model, problem.tile, CLASSES, problem.norm, problem.segments, "sgd")
    row = Planner(work.task(1, machine.estimate), machine.cluster).forecast(strategy)
    assert row is not None
    return row


def table(found: dict[str, Any]) -> str:
    """Markdown, a row for each problem."""
    lines = [
        (
            str(PROBLEMS[name]),
            f"{each['predicted_s']:.2f}",
            f"{_step_s(each):.2f}",
            f"{_error_s(each):+.0%}",
            f"{each['predicted_bytes'] / MIB:.0f}",
            f"{each['live_bytes'] / MIB:.0f}",
            f"{_error_bytes(each):+.1%}",
        )
        for name, each in found.items()
    ]
    header = ("problem", "step, s: predicted", "measured", "error", "MiB: predicted", "alive", "error")
    return markdown_table(header, lines)


def _step_s(each: dict[str, Any]) -> float:
    return statistics.median(each["steps_s"])


def _error_s(each: dict[str, Any]) -> float:
    return float(each["predicted_s"] / _step_s(each) - 1)


def _error_bytes(each: dict[str, Any]) -> float:
    return float(each["predicted_bytes"] / each["live_bytes"] - 1)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(PROBLEMS),
        choices=list(PROBLEMS),
        metavar="PROBLEM",
        help="measured now; what an earlier call found of the others stays",
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each")
    arguments = parser.parse_args()
    torch.set_flush_denormal(True)  # as app.train does
    torch.set_num_threads(1)
    earlier = json.loads(OUT.read_text()) if OUT.exists() else {}
    found = {name: earlier[name] for name in PROBLEMS if name in earlier and name not in arguments.only}
    OUT.parent.mkdir(exist_ok=True)
    for name in arguments.only:
        found[name] = compared(PROBLEMS[name], arguments.steps)
        OUT.write_text(json.dumps(found, indent=2) + "\n")
        print(table({name: found[name]}), flush=True)
    found = {name: found[name] for name in PROBLEMS if name in found}
    text = results("taskset -c 0 python -m benchmarks.plan_accuracy.streamed --write", table(found))
    publish(__file__, text, arguments.write, "boxes")
    faults = [
        f"{name}: {what} {error:+.0%}"
        for name, each in found.items()
        for what, error, most in (("step", _error_s(each), SECONDS), ("bytes", _error_bytes(each), BYTES))
        if abs(error) > most
    ]
    sys.exit(f"missed: {', '.join(faults)}" if faults else 0)


if __name__ == "__main__":
    main()
