"""Predicted times of layers against measured ones, on layers that the calibration has not timed.

Takes nothing; gives the error of the calibration that users get, forward and backward, layer by layer, and a picture of
twelve convolutions.

    python -m benchmarks.plan_accuracy.layer_times [--px 512] [--nets plain12 resnet50 ...] [--rounds 3] [--write]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from app.launch.host import usable_cores
from benchmarks.plan_accuracy.layer_measured import measure
from benchmarks.results import OUT, finish, markdown_table, measured_on, parser_of, publish, results, write_json
from models.registry import build_model
from parallel.cost.roofline import products
from parallel.graph.layers import Convolution, Layer, LayerGraph
from parallel.profile.cache import keep_freed_memory
from parallel.profile.calibrate import QUICK_S, DeviceUse, calibrate
from parallel.profile.op_timing import Setting, time_convolution
from parallel.trace.trace import trace

PLAIN = "plain12"
NETS = (
    *(PLAIN, "resnet50", "unet", "torchvision:densenet121", "torchvision:mobilenet_v3_large"),
    "torchvision:googlenet",
)
PLAIN_PX = 256
CHANNELS_AND_KERNEL = (
    (3, 32, 3),
    (32, 32, 3),
    (32, 32, 5),
    (32, 32, 7),
    (32, 64, 3),
    (64, 64, 3),
    (64, 64, 5),
    (64, 64, 7),
    (64, 128, 3),
    (128, 128, 3),
    (128, 128, 5),
    (128, 128, 7),
)
REFERENCES = tuple(
    Convolution(1, channels, channels, (kernel,) * 2, (1, 1), (1, 1), groups, (side,) * 2, (side,) * 2, False)
    for channels, kernel, groups, side in ((64, 3, 1, 128), (128, 5, 1, 64), (256, 1, 1, 128), (128, 3, 128, 256))
)
"""Timed around the calibration and around each net, to know how fast the machine is at that time."""
CPU = torch.device("cpu")
LEAST_S = 1e-4
"""Passes of a layer that take less are left out: they are calls into torch, not work."""
REPEATS = 4
DESIGN = 1000
"""Shapes of the calibration's design in which layers are looked up; 45 s do not suffice for as many."""
ASKED = 0.10
PASSES = ("forward", "backward")
PICTURE = "convolutions.svg"


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name != PLAIN:
        return build_model(name, classes=2)
    convolutions = [nn.Conv2d(c_in, c_out, kernel, padding=kernel // 2) for c_in, c_out, kernel in CHANNELS_AND_KERNEL]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10), nn.LogSoftmax(dim=1)
    return nn.Sequential(*convolutions, *head)


def seen(graph: LayerGraph) -> set[str]:
    """Return the layers with a convolution that the calibration may have timed in exactly this shape."""
    designed = {shape for _, shape in itertools.islice(products(seed=0), DESIGN)}
    return {layer.name for layer in graph.layers if any(op.convolution in designed for op in layer.ops)}


def reference_s() -> list[float]:
    """Return the seconds of every pass of ``REFERENCES``."""
    return [seconds for shape in REFERENCES for seconds in astuple(time_convolution(shape, Setting(CPU)))]


def rows_of(names: Sequence[str], px: int, rounds: int, budget_s: float) -> tuple[list[dict[str, Any]], float]:
    """Calibrate, then measure all nets in each round. Return a row for each layer that was not calibrated, and the
    error that the calibration expects.

    Each row has the seconds of every round as measured, and how many times slower the references were around the net
    than around the calibration.
    """
    references = [reference_s()]
    model = calibrate(DeviceUse(CPU, threads=usable_cores()), budget_s)
    references.append(reference_s())
    shapes = {name: (1, 3, *[min(px, PLAIN_PX) if name == PLAIN else px] * 2) for name in names}
    traced = {name: trace(net(name).to(memory_format=torch.channels_last), shape) for name, shape in shapes.items()}
    rows: list[dict[str, Any]] = []
    for name in names:
        known, costs = seen(traced[name].graph), model.estimate(traced[name].graph)
        for at, (layer, cost) in enumerate(zip(traced[name].graph.layers, costs.layers, strict=True)):
            if layer.name not in known:
                predicted = [cost.forward_s, cost.backward_s]
                rows.append(
                    {"net": name, "layer": layer.name, "kind": layer.kind, "shape": _text(layer), "at": at}
                    | {"predicted": predicted, "measured": [], "slower": []}
                )
        print(f"{name}, {shapes[name][-1]} px: {len(known)} layers seen in calibration", flush=True)
    for number, name in itertools.product(range(1, rounds + 1), names):
        costs = measure(traced[name], shapes[name], CPU, repeats=REPEATS)
        references.append(reference_s())
        slower = float(np.median(np.add(*references[-2:]) / np.add(*references[:2])))
        for row in rows:
            if row["net"] == name:
                cost = costs.layers[row["at"]]
                row["measured"].append([cost.forward_s, cost.backward_s])
                row["slower"].append(slower)
        print(f"round {number}, {name}: {sum(costs.seconds):.2f} s, references {slower:.2f}x", flush=True)
    return [row for row in rows if max(_seconds(row, side) for side in (0, 1)) >= LEAST_S], model.expected_error


def _text(layer: Layer) -> str:
    for op in layer.ops:
        if (conv := op.convolution) is not None:
            return f"{conv.channels_in}-{conv.channels_out}, {conv.kernel[0]} x {conv.kernel[1]}"
    return ""


def _rounds(row: dict[str, Any], side: int, paired: bool = True) -> list[float]:
    """Return the seconds of each round; ``paired``: at the speed that the machine had around the calibration."""
    return [
        taken[side] / (slower if paired else 1.0) for taken, slower in zip(row["measured"], row["slower"], strict=True)
    ]


def _seconds(row: dict[str, Any], side: int, paired: bool = True) -> float:
    return float(np.median(_rounds(row, side, paired)))


def errors(rows: Sequence[dict[str, Any]], side: int, paired: bool = True) -> list[float]:
    """Return the relative errors; ``side`` 0 is forward, 1 backward."""
    return [
        abs(row["predicted"][side] / _seconds(row, side, paired) - 1) for row in rows if _seconds(row, side) >= LEAST_S
    ]


def report(result: dict[str, Any]) -> str:
    rows, slower = result["rows"], [each for row in result["rows"] for each in row["slower"]]
    groups = [(name, [row for row in rows if row["net"] == name]) for name in result["nets"]]
    groups += [("all convolutions", [row for row in rows if row["shape"]]), ("all", rows)]
    columns = [f"{name}{what}" for name in PASSES for what in (", median", ", not paired", ", 90 %")]
    header = ["layers of", "layers", *columns, "predicted over measured, sum"]
    parts = [
        f"Calibrated in {result['seconds']:g} s for one rank of {result['threads']} threads, which expected "
        f"{result['expected_error']:.1%} (median, on shapes left out). {result['rounds']} rounds; around the nets the "
        f"references took {min(slower):.2f} to {max(slower):.2f} times what they took around the calibration.\n",
        markdown_table(header, [_line(name, part) for name, part in groups if part]),
    ]
    if plain := plain_rows(rows):
        parts.append(f"![predicted and measured milliseconds of {PLAIN}'s convolutions]({PICTURE})\n")
        parts.append(f"Convolutions of {PLAIN}, ms, measured seconds paired.\n")
        header = ["convolution", *(text for name in PASSES for text in (f"{name}, measured", "predicted", ""))]
        parts.append(markdown_table(header, map(_convolution, plain)))
    return results(*parts)


def plain_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the convolutions of ``PLAIN``, in order."""
    return [row for row in rows if row["net"] == PLAIN and row["shape"]]


def _line(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    cells = [name, str(len(rows))]
    for side in (0, 1):
        paired, raw = errors(rows, side), errors(rows, side, paired=False)
        cells += (
            [f"{np.median(paired):.1%}", f"{np.median(raw):.1%}", f"{np.quantile(paired, 0.9):.1%}"]
            if raw
            else [""] * 3
        )
    taken = sum(_seconds(row, side) for row in rows for side in (0, 1))
    return [*cells, f"{sum(sum(row['predicted']) for row in rows) / taken:.2f}"]


def _convolution(row: dict[str, Any]) -> list[str]:
    cells = [row["shape"]]
    for side in (0, 1):
        predicted, measured = row["predicted"][side], _seconds(row, side)
        cells += [f"{measured * 1e3:.1f}", f"{predicted * 1e3:.1f}", f"{predicted / measured - 1:+.0%}"]
    return cells


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a panel for each pass: the predicted curve over the measured points of ``rows``."""
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "convolutions"  # the same picture is the same file
    figure = Figure(figsize=(10, 4.5), layout="constrained", facecolor="white")
    numbers = range(1, len(rows) + 1)
    for side, chart in enumerate(figure.subplots(1, 2, sharey=True)):
        rounds = 1e3 * np.array([_rounds(row, side) for row in rows])
        middle = np.median(rounds, axis=1)
        ranges = middle - rounds.min(1), rounds.max(1) - middle
        chart.plot(numbers, [1e3 * row["predicted"][side] for row in rows], color="#1b6ca8", label="predicted")
        chart.errorbar(numbers, middle, ranges, fmt="o", color="#e07b39", label="measured, median and range of rounds")
        chart.set(title=PASSES[side], yscale="log", xlabel="convolution: channels, kernel")
        chart.set_xticks(
            numbers, [f"{number}: {row['shape']}" for number, row in zip(numbers, rows, strict=True)], rotation=90
        )
        chart.spines[["top", "right"]].set_visible(False)
        chart.grid(axis="y", color="#dddddd")
    figure.axes[0].set_ylabel("ms")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--px", type=int, default=512, help=f"side of a tile; {PLAIN} has at most {PLAIN_PX}")
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    parser.add_argument("--rounds", type=int, default=3, help="each measures every net once")
    parser.add_argument("--seconds", type=float, default=QUICK_S, help="budget of the calibration")
    arguments = parser.parse_args()
    torch.set_num_threads(usable_cores())
    keep_freed_memory()
    rows, expected = rows_of(arguments.nets, arguments.px, arguments.rounds, arguments.seconds)
    result = {
        **{name: getattr(arguments, name) for name in ("px", "nets", "rounds", "seconds")},
        "threads": usable_cores(),
        "expected_error": expected,
        "rows": rows,
        "environment": measured_on(),
    }
    write_json("layer_times", result)
    publish(__file__, report(result), arguments.write, "layer_times")
    if plain := plain_rows(rows):
        draw(plain, (Path(__file__).parent if arguments.write else OUT) / PICTURE)
    finish(
        f"median error of {name}, {PASSES[side]}: {median:.1%}, asked {ASKED:.0%}"
        for name in arguments.nets
        for side in (0, 1)
        if (median := float(np.median(errors([row for row in rows if row["net"] == name], side)))) > ASKED
    )


if __name__ == "__main__":
    main()
