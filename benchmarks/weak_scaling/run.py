"""Weak scaling of ResNet-1001-v2 to 1,024 V100, simulated, and the simulator beside real runs on this machine.

Takes nothing; gives ``bench-data/weak_scaling.json``, the tables of the README, and with ``--write`` its picture too.
The real runs want an otherwise idle machine. Exit code 0.

    python -m benchmarks.weak_scaling.run [--steps N] [--write] [--quick]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.machine import measured_on
from benchmarks.results import OUT, markdown_table, parser_of, publish, results
from benchmarks.weak_scaling.picture import draw_picture
from benchmarks.weak_scaling.reality import MODEL, TILE, TILES, Compared, compared, hybrids, reality_table
from benchmarks.weak_scaling.simulation import ASSUMED, CHANGES, Curve, simulated
from parallel.units import bytes_text

PUBLISHED = (1024, 0.9732)
"""Ranks and efficiency: Jain et al., GEMS, SC 2020, abstract; ResNet-1k on Volta V100."""
PICTURE = Path(__file__).with_name("weak_scaling.svg")
COMMAND = "python -m benchmarks.weak_scaling.run --write"


def simulation_table(curves: Sequence[Curve]) -> str:
    """A row for each curve: efficiency at some numbers of ranks, the rest at the most of them."""
    shown = [n for n in (64, 256, 1024) if n <= curves[0].ranks[-1]]
    header = ["strategy", "tiles of a group", "ranks of a group", "fullest rank"]
    header += [*(f"{n} ranks" for n in shown), "images/s", "step, s", "of it for gradients, s"]
    return markdown_table(
        header,
        (
            [
                _name(curve),
                str(curve.tiles),
                str(curve.strategy.depth),
                bytes_text(curve.peak_bytes),
                *(_percent(curve.efficiency[ASSUMED.name][curve.ranks.index(n)]) for n in shown),
                f"{curve.images_per_second:.0f}",
                f"{curve.step_s[-1]:.3f}",
                f"{curve.exchange_s[-1]:.4f}",
            ]
            for curve in curves
        ),
    )


def what_if_table(curves: Sequence[Curve]) -> str:
    """Efficiency at the most ranks under each assumption."""
    names = [change.name for change in CHANGES]
    return markdown_table(
        ["strategy", "tiles of a group", *names],
        (
            [_name(curve), str(curve.tiles), *(_percent(curve.efficiency[name][-1]) for name in names)]
            for curve in curves
        ),
    )


def efficiency_table(found: Sequence[Compared]) -> str:
    """From one group to two, predicted and measured: what the picture shows, on a machine that is at hand."""
    return markdown_table(
        ["strategy", "efficiency, predicted", "measured", "predicted / measured"],
        (
            [name, _percent(predicted), _percent(measured), f"{predicted / measured:.3f}"]
            for name, predicted, measured in efficiencies(found)
        ),
    )


def efficiencies(found: Sequence[Compared]) -> Iterator[tuple[str, float, float]]:
    """Strategy, and its efficiency on two groups over one: predicted, measured."""
    of_one = {one.strategy.name: one for one in found if one.strategy.groups == 1}
    for two in found:
        if two.strategy.groups == 2:
            one = of_one[two.strategy.name]
            yield two.strategy.name, one.predicted_s / two.predicted_s, one.measured_s / two.measured_s


def _name(curve: Curve) -> str:
    candidate = curve.strategy
    return f"{candidate.name} {candidate.savings}".rstrip()


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each real run")
    parser.add_argument("--write", action="store_true", help="put tables and picture into this folder")
    parser.add_argument("--quick", action="store_true", help="a small model to 64 ranks, no real runs: does it run?")
    arguments = parser.parse_args()
    model, tile, most = ("resnet110_v2", 128, 64) if arguments.quick else ("resnet1001_v2", 512, PUBLISHED[0])
    curves = simulated(model, tile, most)
    parts = [
        f"Simulated, {model} on {tile} px: efficiency by number of ranks; images/s and seconds at {most} ranks.",
        simulation_table(curves),
        f"Simulated efficiency at {most} ranks, where another assumption holds.",
        what_if_table(curves),
    ]
    found = [] if arguments.quick else compared(hybrids(), arguments.steps)
    if found:
        parts += [
            f"Predicted and measured on this machine, {MODEL}, {TILE} px, {TILES} tiles a step for one rank and for "
            f"each group of two; medians of {arguments.steps} steps.",
            reality_table(found),
            "From one group (2 ranks) to two (4 ranks):",
            efficiency_table(found),
        ]
    OUT.mkdir(exist_ok=True)
    kept = {
        "curves": [curve.to_json() for curve in curves],
        "reality": [one.to_json() for one in found],
        "environment": measured_on(),
    }
    name = "weak_scaling_quick" if arguments.quick else "weak_scaling"
    (OUT / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n")
    title = f"Simulated weak scaling: {model}, {tile} px tiles, V100 (16 GB), NVLink, EDR InfiniBand"
    draw_picture(curves, PUBLISHED, title, PICTURE if arguments.write else OUT / f"{name}.svg")
    text = results(COMMAND, *parts)
    publish(__file__, text, arguments.write)


if __name__ == "__main__":
    main()
