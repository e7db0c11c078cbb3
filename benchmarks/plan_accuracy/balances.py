"""Does the planner balance better? Its slowest stage beside that of equal layer counts and of torchgpipe's balances.

Takes nothing; gives ``bench-data/balances.json`` and the tables of the README. Judges are the cost model calibrated on
this machine, the data sheet of a V100, and for few stages the clock. Exit code 0 when the planner was never worse.

    python -m benchmarks.plan_accuracy.balances [--only MODEL ...] [--rounds N] [--write] [--quick]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from app.planning.machine import named_machine, this_machine
from benchmarks.machine import measured_on
from benchmarks.plan_accuracy.balance_cuts import EQUAL, PLANNED, PUBLISHED, partitions, slowest_s
from benchmarks.plan_accuracy.balance_measure import stage_times
from benchmarks.results import OUT, markdown_table, parser_of, publish, results
from models.registry import build_model
from parallel.cost.stage_cost import Costs
from parallel.graph.layers import LayerGraph
from parallel.graph.scale import with_tiles
from parallel.trace.trace import trace

NOISE = 0.02
"""By how much a measured stage may be slower before it counts as worse."""
RANKS = 2
V100 = "v100-16gb"
V100_LINK = "nvlink2"


@dataclass(frozen=True)
class Model:
    """One of torchgpipe's.

    Attributes:
        px: side of its images there.
        norm: of our model.
    """

    name: str
    px: int
    classes: int
    norm: Any = "batch"

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return build_model(self.name, classes=self.classes, norm=self.norm)


MODELS = (
    Model("unet(5,64)", 192, 1, "instance"),
    Model("resnet101", 224, 1000),
    Model("amoebanet(18,256)", 224, 1000),
)
QUICK = Model("resnet101", 64, 1000)
STAGES, MEASURED_STAGES = (2, 4, 8), (2, 4)


@dataclass(frozen=True)
class Judge:
    """A cost model.

    Attributes:
        tiles: of a microbatch.
        link_s: per byte between two stages.
    """

    name: str
    tiles: int
    estimate: Callable[[LayerGraph], Callable[[int], Costs]]
    link_s: float


def judges(quick: bool) -> list[Judge]:
    """The data sheet, and this machine unless ``quick``: to calibrate it takes longer than all the rest."""
    sheet = named_machine(V100, RANKS, link=V100_LINK)
    found = [Judge(f"{V100}, {V100_LINK}, 32 images", 32, sheet.estimate, 1 / sheet.cluster.inside.bandwidth)]
    if not quick:
        here = this_machine(RANKS)
        found.append(Judge("calibrated here, 1 image", 1, here.estimate, 1 / here.cluster.inside.bandwidth))
    return found


def compared(model: Model, judged_by: Sequence[Judge], rounds: int, measured: Sequence[int]) -> list[dict[str, Any]]:
    """A row for every judge and number of stages; measured ones with the cuts of the last judge."""
    module = model.build().to(memory_format=torch.channels_last)
    images = torch.randn(1, 3, model.px, model.px).to(memory_format=torch.channels_last)
    traced = trace(module, tuple(images.shape))
    rows = []
    for judge in judged_by:
        graph = with_tiles(traced.graph, judge.tiles)
        seconds = judge.estimate(traced.graph)(judge.tiles).seconds
        for stages in STAGES:
            found = partitions(model.name, graph, stages, seconds, judge.link_s)
            slowest = {name: slowest_s(partition, seconds, judge.link_s) for name, partition in found.items()}
            rows.append(_row(model, stages, judge.name, slowest))
            if judge is judged_by[-1] and stages in measured:
                times = stage_times(traced, found, images, rounds)
                slowest = {name: max(of_stages) for name, of_stages in times.items()}
                rows.append(_row(model, stages, "measured here, 1 image", slowest) | {"stages_s": times})
    return rows


def _row(model: Model, stages: int, judge: str, slowest: dict[str, float]) -> dict[str, Any]:
    return {"model": model.name, "px": model.px, "stages": stages, "judge": judge, "slowest_s": slowest}


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the README."""
    lines = []
    for row in rows:
        slowest = row["slowest_s"]
        lines.append(
            (
                f"{row['model']}, {row['px']} px",
                str(row["stages"]),
                row["judge"],
                *(f"{1e3 * slowest[name]:.1f}" for name in (PLANNED, EQUAL, PUBLISHED)),
                *(f"{slowest[name] / slowest[PLANNED]:.2f}" for name in (EQUAL, PUBLISHED)),
            )
        )
    header = (
        "model",
        "stages",
        "judge",
        "slowest stage, ms: planned",
        EQUAL,
        PUBLISHED,
        "equal / planned",
        "published",
    )
    return results("python -m benchmarks.plan_accuracy.balances --write", markdown_table(header, lines))


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where the planner was worse."""
    faults = []
    for row in rows:
        slack = 1 + NOISE if row["judge"].startswith("measured") else 1 + 1e-9
        planned = row["slowest_s"][PLANNED]
        for name in (EQUAL, PUBLISHED):
            if planned > slack * row["slowest_s"][name]:
                by = planned / row["slowest_s"][name] - 1
                faults.append(f"{row['model']} in {row['stages']}, {row['judge']}: {by:.1%} slower than {name}")
    return faults


def main() -> None:
    parser = parser_of(__doc__)
    names = [model.name for model in MODELS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="MODEL", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=3, help="of measuring; the fastest counts")
    parser.add_argument("--quick", action="store_true", help="resnet101 at 64 px, no calibration: does it run?")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    judged_by = judges(arguments.quick)
    rows: list[dict[str, Any]] = []
    for model in [QUICK] if arguments.quick else [model for model in MODELS if model.name in arguments.only]:
        begun = time.perf_counter()
        if arguments.quick:
            rows += compared(model, judged_by, 1, MEASURED_STAGES[:1])
        else:
            rows += compared(model, judged_by, arguments.rounds, MEASURED_STAGES)
        print(f"{model.name}: {time.perf_counter() - begun:.0f} s", flush=True)
    OUT.mkdir(exist_ok=True)
    name = "balances_quick.json" if arguments.quick else "balances.json"
    (OUT / name).write_text(json.dumps({"rows": rows, "environment": measured_on()}, indent=2) + "\n")
    text = report(rows)
    publish(__file__, text, arguments.write, "balances")
    faults = missed(rows)
    print("\n".join(["worse:", *faults] if faults else ["the planner's slowest stage is never worse"]))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
