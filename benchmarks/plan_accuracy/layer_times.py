"""Predicted times of layers against measured ones, on layers that the calibration has not timed.

Takes nothing; gives the error of a quick and of a long calibration, forward and backward, layer by layer.

    python -m benchmarks.plan_accuracy.layer_times [--px 512] [--nets plain12 resnet50 ...] [--seconds 25 90] [--write]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.plan_accuracy.layer_measured import measure
from benchmarks.results import finish, markdown_table, measured_on, parser_of, publish, results, write_json
from models.registry import build_model
from parallel.cost.roofline import products
from parallel.cost.stage_cost import Costs
from parallel.graph.layers import Layer, LayerGraph
from parallel.profile.cache import keep_freed_memory
from parallel.profile.calibrate import LONG_S, QUICK_S, DeviceUse, calibrate
from parallel.trace.trace import trace

PLAIN = "plain12"
NETS = (PLAIN, "resnet50", "unet", "torchvision:densenet121", "torchvision:mobilenet_v3_large")
PLAIN_PX = 256
CHANNELS_AND_KERNEL = (
    (3, 32, 3),
    (32, 32, 5),
    (32, 32, 7),
    (32, 64, 3),
    (64, 64, 3),
    (64, 64, 5),
    (64, 64, 7),
    (64, 128, 5),
    (128, 128, 3),
    (128, 128, 5),
    (128, 128, 7),
    (128, 128, 3),
)
LEAST_S = 1e-4
"""Passes of a layer that take less are left out: they are calls into torch, not work."""
REPEATS = 4
DESIGN = 3000
"""Shapes of the calibration's design that layers are looked up in; none gets so far."""
ASKED = 0.10


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name != PLAIN:
        return build_model(name, classes=2)
    layers: list[nn.Module] = []
    for channels_in, channels_out, kernel in CHANNELS_AND_KERNEL:
        layers += [nn.Conv2d(channels_in, channels_out, kernel, padding=kernel // 2), nn.ReLU()]
    return nn.Sequential(*layers)


def seen(graph: LayerGraph) -> set[str]:
    """Layers with a convolution that the calibration may have timed in exactly this shape."""
    designed = {shape for _, shape in itertools.islice(products(seed=0), DESIGN)}
    return {layer.name for layer in graph.layers if any(op.convolution in designed for op in layer.ops)}


def rows_of(name: str, px: int, estimate: Callable[[LayerGraph], Sequence[Costs]]) -> list[dict[str, Any]]:
    """A row for each layer of a net that takes its time and was not calibrated."""
    px = min(px, PLAIN_PX) if name == PLAIN else px
    shape = (1, 3, px, px)
    traced = trace(net(name).to(memory_format=torch.channels_last), shape)
    measured = measure(traced, shape, torch.device("cpu"), repeats=REPEATS)
    known = seen(traced.graph)
    estimates = estimate(traced.graph)
    rows = []
    for at, layer in enumerate(traced.graph.layers):
        cost = measured.layers[at]
        if max(cost.forward_s, cost.backward_s) < LEAST_S or layer.name in known:
            continue
        rows.append(
            {
                "net": name,
                "layer": layer.name,
                "kind": layer.kind,
                "shape": _text(layer),
                "forward_s": cost.forward_s,
                "backward_s": cost.backward_s,
                "predicted": [[costs.layers[at].forward_s, costs.layers[at].backward_s] for costs in estimates],
            }
        )
    print(
        f"{name}, {px} px: {len(rows)} layers, {len(known)} seen in calibration, {sum(measured.seconds):.2f} s",
        flush=True,
    )
    return rows


def _text(layer: Layer) -> str:
    for op in layer.ops:
        if (conv := op.convolution) is not None:
            return f"{conv.channels_in}-{conv.channels_out}, {conv.kernel[0]} x {conv.kernel[1]}"
    return ""


def errors(rows: Sequence[dict[str, Any]], number: int, side: int) -> list[float]:
    """Relative, of prediction ``number``; ``side`` 0 is forward, 1 backward."""
    key = ("forward_s", "backward_s")[side]
    return [abs(row["predicted"][number][side] / row[key] - 1) for row in rows if row[key] >= LEAST_S]


def report(result: dict[str, Any]) -> str:
    rows, parts = result["rows"], []
    for number, (asked_s, expected) in enumerate(zip(result["seconds"], result["expected_errors"], strict=True)):
        groups = [(name, [row for row in rows if row["net"] == name]) for name in result["nets"]]
        groups += [("all convolutions", [row for row in rows if row["shape"]]), ("all", list(rows))]
        parts.append(f"Calibrated in {asked_s:g} s, which expected {expected:.1%} (median, on shapes left out).\n")
        header = (
            "layers of",
            "layers",
            "forward, median",
            "90 %",
            "backward, median",
            "90 %",
            "predicted over measured, sum",
        )
        parts.append(markdown_table(header, [_line(name, part, number) for name, part in groups if part]))
    plain = [row for row in rows if row["net"] == PLAIN and row["shape"]]
    if plain:
        parts.append(
            f"The plain net's convolutions, ms, predicted by the calibration of {result['seconds'][-1]:g} s.\n"
        )
        header = ("convolution", "forward, measured", "predicted", "", "backward, measured", "predicted", "")
        parts.append(markdown_table(header, map(_convolution, plain)))
    return results("python -m benchmarks.plan_accuracy.layer_times --write", *parts)


def _line(name: str, rows: Sequence[dict[str, Any]], number: int) -> list[str]:
    cells = [name, str(len(rows))]
    for side in (0, 1):
        found = errors(rows, number, side)
        cells += [f"{np.median(found):.1%}", f"{np.quantile(found, 0.9):.1%}"] if found else ["", ""]
    taken = sum(row["forward_s"] + row["backward_s"] for row in rows)
    return [*cells, f"{sum(sum(row['predicted'][number]) for row in rows) / taken:.2f}"]


def _convolution(row: dict[str, Any]) -> list[str]:
    cells = [row["shape"]]
    for side, key in enumerate(("forward_s", "backward_s")):
        predicted, measured = row["predicted"][-1][side], row[key]
        cells += [f"{measured * 1e3:.1f}", f"{predicted * 1e3:.1f}", f"{predicted / measured - 1:+.0%}"]
    return cells


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--px", type=int, default=512, help=f"side of a tile; {PLAIN} has at most {PLAIN_PX}")
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    parser.add_argument("--seconds", type=float, nargs="+", default=[QUICK_S, LONG_S], help="budgets of calibrations")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    models = [calibrate(DeviceUse(torch.device("cpu"), heap_kept=True), seconds) for seconds in arguments.seconds]
    rows = []
    for name in arguments.nets:
        rows += rows_of(name, arguments.px, lambda graph: [model.estimate(graph) for model in models])
    result = {
        "px": arguments.px,
        "nets": arguments.nets,
        "seconds": arguments.seconds,
        "expected_errors": [model.expected_error for model in models],
        "rows": rows,
        "environment": measured_on(),
    }
    write_json("layer_times", result)
    publish(__file__, report(result), arguments.write, "layer_times")
    worst = max(float(np.median(errors(rows, len(models) - 1, side))) for side in (0, 1))
    finish([f"median error {worst:.1%}, asked {ASKED:.0%}"] if worst > ASKED else ())


if __name__ == "__main__":
    main()
