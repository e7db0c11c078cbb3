"""How long a user waits for a plan: commands of the README, each started as a user starts it.

Takes nothing; gives the seconds of each command by the clock and on the cores, imports and tracing included.

    python -m benchmarks.plan_accuracy.plan_speed [--rounds 3] [--only NAME] [--write]
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.results import markdown_table, parser_of, publish, results

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "plan_speed.json"
PLANS = {
    "one-node": "--model resnet50 --tile 512 --ranks 4 --device-spec v100-16gb",
    "1024-ranks": "--model resnet1001_v2 --tile 512 --ranks 1024 --device-spec v100-16gb",
    "largest-tile": "--model resnet50 --tile 2048 --ranks 4 --device-spec v100-16gb --largest-tile",
    "largest-tile-here": "--model resnet50 --tile 1024 --batch 4 --memory 2GiB --largest-tile",
}
"""Name -> arguments of app.plan."""
BUDGETS_S = {"1024-ranks": 20.0, "largest-tile": 15.0, "largest-tile-here": 15.0}
"""Seconds by the clock that a user may wait, on a machine with nothing else to do."""


def planned(arguments: str) -> tuple[float, float]:
    """Seconds by the clock and on the cores of one plan in a process of its own.

    Raises:
        CalledProcessError: the plan failed, or nothing fits.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "app.plan", *arguments.split()]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    taken, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="times that each is run; medians are given")
    parser.add_argument("--only", choices=PLANS, help="this plan alone")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(PLANS)
    if "largest-tile-here" in names:  # what is calibrated once a machine is no part of it
        planned("--model resnet18 --tile 64 --memory 2GiB")
    found = {}
    for name in names:
        rounds = [planned(PLANS[name]) for _ in range(arguments.rounds)]
        wall_s, cpu_s = (statistics.median(each[k] for each in rounds) for k in (0, 1))
        found[name] = {"wall_s": wall_s, "cpu_s": cpu_s}
    if not arguments.only:
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(found, indent=2))
    lines = [
        (f"`{PLANS[name]}`", f"{each['wall_s']:.1f}", f"{each['cpu_s']:.1f}", _asked(name))
        for name, each in found.items()
    ]
    header = ("python -m app.plan", "s by the clock", "s on the cores", "asked: at most")
    text = results("python -m benchmarks.plan_accuracy.plan_speed --write", markdown_table(header, lines))
    publish(__file__, text, arguments.write, "plan_speed")
    missed = [name for name, budget in BUDGETS_S.items() if name in found and found[name]["wall_s"] > budget]
    sys.exit(f"slower than asked: {', '.join(missed)}" if missed else 0)


def _asked(name: str) -> str:
    return f"{BUDGETS_S[name]:.0f}" if name in BUDGETS_S else ""


if __name__ == "__main__":
    main()
