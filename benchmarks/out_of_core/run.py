"""Measure what trains within a budget of device memory: peak bytes by what is kept, and the largest tile.

    python -m benchmarks.out_of_core.run [--parts peaks largest] [--models resnet50 unet] [--px 1024 2048]
        [--ranks 1 2 4] [--budget 2GiB] [--write]

Rows are kept in ``bench-data/out_of_core_BUDGET.json`` and stay in the tables until they are measured again.
"""

from __future__ import annotations

from typing import Any

from app.settings.fields import bytes_of
from benchmarks.out_of_core import largest, peaks
from benchmarks.results import markdown_table, measured_on, parser_of, publish, read_json, results, write_json

MIB = 2**20
PARTS = ("peaks", "largest")
HEADER = ("model", "ranks", "strategy", "px", "area over plain", "planned px", "fullest rank, MiB", "predicted")


def _peak_line(row: dict[str, Any]) -> tuple[str, ...]:
    found = row["measured"]
    name = (row["model"], str(row["px"]), row["way"])
    if found is None:
        return (*name, "no room here", _mib(row["predicted"]), "", "", _mib(row["predicted_host"]), "")
    live = found["device_bytes"] - found["constant_bytes"]
    return (
        *name,
        _mib(live),
        _mib(row["predicted"]),
        f"{row['predicted'] / live - 1:+.1%}",
        _mib(found["host_bytes"]),
        _mib(row["predicted_host"]),
        _mib(found["resident_bytes"]),
    )


def _largest_line(row: dict[str, Any], plain: dict[str, Any] | None) -> tuple[str, ...]:
    exact = "no room here" if row["gradient_error"] is None else f"{row['gradient_error']:.1e}"
    if row.get("rounding") is not None:
        exact += f" (on two threads {row['rounding']:.1e})"
    fullest = max(row["device_bytes"])
    return (
        row["model"],
        str(row["ranks"]),
        row["name"],
        str(row["px"]),
        f"{(row['px'] / plain['px']) ** 2:.1f}" if plain else "",
        str(row["planned_px"]),
        _mib(fullest),
        f"{max(row['predicted']) / fullest - 1:+.1%}" if row["px"] == row["planned_px"] else "",
        _mib(sum(row["host_bytes"])),
        f"{row['seconds']:.0f}",
        exact,
        row["next"],
    )


def _mib(size: float) -> str:
    return f"{size / MIB:.0f}"


def report(found: dict[str, dict[str, Any]], budget: str) -> str:
    first = markdown_table(
        ("model", "px", "kept", "live, MiB", "predicted", "error", "host, MiB", "predicted", "resident, MiB"),
        [_peak_line(row) for row in found["peaks"].values()],
    )
    rows = found["largest"].values()
    plain = {row["model"]: row for row in rows if row["name"] == "plain"}
    second = markdown_table(
        (*HEADER, "host, all ranks, MiB", "step, s", "gradients", "in the way of twice the side"),
        [_largest_line(row, plain.get(row["model"])) for row in rows],
    )
    return results(
        "Peak bytes of one tile, on one rank:\n",
        first,
        f"Largest tile within {budget} of device bytes a rank, {largest.BATCH} tiles a step, AdamW:\n",
        second,
    )


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="+", default=["resnet50", "unet"])
    parser.add_argument("--px", type=int, nargs="+", default=[1024, 2048], help="tile sides of the peaks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--budget", default="2GiB", help="device bytes of each rank")
    parser.add_argument("--write", action="store_true", help="add to the tables of README.md")
    asked = parser.parse_args()
    budget = bytes_of(asked.budget)
    if budget is None:
        parser.error(f"--budget takes a size such as 2GiB; got {asked.budget!r}")
    file = f"out_of_core_{asked.budget}"
    known = read_json(file)
    found = {part: known.get(part, {}) for part in PARTS}

    def note(part: str, key: tuple[Any, ...], row: dict[str, Any]) -> None:
        found[part]["|".join(map(str, key))] = row
        write_json(file, {**found, "environment": measured_on()})

    if "peaks" in asked.parts:
        for row in peaks.rows(asked.models, asked.px):
            note("peaks", (row["model"], row["px"], row["way"]), row)
            print(*_peak_line(row), flush=True)
    if "largest" in asked.parts:
        for model in asked.models:
            for name, ranks, planned in largest.rows(model, budget, asked.ranks):
                row = largest.measure(model, budget, name, ranks, planned)
                note("largest", (model, ranks, name), row)
                print(*_largest_line(row, found["largest"].get(f"{model}|1|plain")), flush=True)
    text = report(found, asked.budget)
    publish(__file__, text, asked.write)


if __name__ == "__main__":
    main()
