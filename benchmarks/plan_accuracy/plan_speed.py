"""Time the plans of the README, each started as a user starts it.

Takes nothing; gives the seconds of each command by the clock and on the cores, imports and tracing included. Exit code
1 if a plan takes longer than asked.

    python -m benchmarks.plan_accuracy.plan_speed [--rounds 3] [--only NAME | --write]
"""

from __future__ import annotations

import os
import statistics

from benchmarks.results import finish, markdown_table, parser_of, publish, results, write_json
from benchmarks.timing import Took, run_app

PLANS: dict[str, tuple[str, float | None]] = {
    "one-node": ("--model resnet50 --tile 512 --ranks 4 --device-spec v100-16gb", None),
    "1024-ranks": ("--model resnet1001_v2 --tile 512 --ranks 1024 --device-spec v100-16gb", 15.0),
    "largest-tile": ("--model resnet50 --tile 2048 --ranks 4 --device-spec v100-16gb --largest-tile", 10.0),
    "largest-tile-here": ("--model resnet50 --tile 1024 --batch 4 --memory 2GiB --largest-tile", 10.0),
}
"""Name -> arguments of app.plan, and the seconds that a user may wait, on a machine with nothing else to do."""


def planned(arguments: str) -> Took:
    """Return the seconds of one plan in a process of its own."""
    return run_app("app.plan", *arguments.split(), env={**os.environ, "OMP_NUM_THREADS": "1"})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="times that each is run; medians are given")
    parser.add_argument("--only", choices=PLANS, help="this plan alone")
    arguments = parser.parse_args()
    if arguments.write and arguments.only:
        parser.error("--write replaces the whole table: leave out --only")
    names = [arguments.only] if arguments.only else list(PLANS)
    if "largest-tile-here" in names:  # what is calibrated once a machine is no part of it
        planned("--model resnet18 --tile 64 --memory 2GiB")
    found = {}
    for name in names:
        rounds = [planned(PLANS[name][0]) for _ in range(arguments.rounds)]
        found[name] = dict(zip(("wall_s", "cpu_s"), map(statistics.median, zip(*rounds, strict=True)), strict=True))
    if not arguments.only:
        write_json("plan_speed", found)
    lines = [
        (f"`{PLANS[name][0]}`", f"{each['wall_s']:.1f}", f"{each['cpu_s']:.1f}", str(PLANS[name][1] or ""))
        for name, each in found.items()
    ]
    header = ("python -m app.plan", "s by the clock", "s on the cores", "asked: at most")
    text = results(markdown_table(header, lines))
    publish(__file__, text, arguments.write, "plan_speed")
    slow = [(name, each["wall_s"]) for name, each in found.items() if each["wall_s"] > (PLANS[name][1] or float("inf"))]
    finish(f"{name}: {seconds:.1f} s, asked {PLANS[name][1]:g} s" for name, seconds in slow)


if __name__ == "__main__":
    main()
