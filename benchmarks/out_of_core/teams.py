"""The largest tiles of teams, trained on real ranks of this machine: one step of each, its bytes beside the planned.

Takes nothing; prints a line for each case as it comes, and with ``--write`` puts the table into README.md. ResNet-50
has tiles of about the largest sides that plans find within 2 GiB a rank. A U-Net has tiles of 2,048 px, whose plain
step takes 22 GiB, and oneDNN's reference kernel, more minutes than are given here: its gradients on 2 and 4 ranks and
in boxes are held against each other. Exit code 1 where a rank took more than its budget.

    python -m benchmarks.out_of_core.teams [--only REGEX] [--write]
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.out_of_core.problem import BATCH, GIB, planner
from benchmarks.out_of_core.trial import largest_error
from benchmarks.ranks import run_on_ranks
from benchmarks.results import markdown_table, parser_of, results, write_results
from parallel.plan.plan import PlanRow
from parallel.space.team import Grid
from parallel.strategy import Strategy

MIB = 2**20
BUDGET = 2 * GIB
COMMAND = "python -m benchmarks.out_of_core.teams --write"
HEADER = ("model", "px", "tiles", "ranks", "way", "fullest rank, MiB", "predicted", "step, s", "loss", "gradients")


@dataclass(frozen=True)
class Case:
    """One step of ``model`` on tiles of ``px``.

    Attributes:
        within: bytes that a rank may take; None: no limit.
        policy: fields of ``ActivationPolicy``.
    """

    model: str
    px: int
    tiles: int
    ranks: int
    within: int | None
    policy: tuple[tuple[str, Any], ...] = ()

    @property
    def strategy(self) -> Strategy:
        """A team of all ranks, rows alone; a rank alone has none."""
        if self.ranks == 1:
            return Strategy("single", 1, 1, self.tiles).under(**dict(self.policy))
        return Strategy("spatial", self.ranks, 1, self.tiles, grid=Grid(self.ranks, 1)).under(**dict(self.policy))

    @property
    def way(self) -> str:
        """Return the team and what is kept of a pass."""
        return f"{self.strategy.name} {self.strategy.savings}".rstrip()

    def __str__(self) -> str:
        return f"{self.model} {self.px} px x{self.tiles}, {self.ranks} ranks, {self.way}"


AGAIN = (("recompute", "block"),)
CASES = (
    Case("resnet50", 1344, BATCH, 2, BUDGET),
    Case("resnet50", 2560, BATCH, 2, BUDGET, AGAIN),
    Case("resnet50", 1920, BATCH, 4, BUDGET),
    Case("resnet50", 3584, BATCH, 4, BUDGET, AGAIN),
    Case("resnet50", 3072, 1, 2, BUDGET, (("stream", 512),)),
    Case("unet", 2048, 1, 2, None, AGAIN),
    Case("unet", 2048, 1, 4, None, AGAIN),
    Case("unet", 2048, 1, 1, None, (("stream", 512),)),
)


def measure(case: Case, gradients: Path) -> dict[str, Any]:
    """Return what the ranks of one step took, and what was planned.

    Args:
        gradients: file to write them to.
    """
    row = planner(case.model, case.px, case.ranks, case.within or 64 * GIB, case.tiles).forecast(case.strategy)
    assert row is not None, f"{case}: not a way to train"
    asked = {"model": case.model, "px": case.px, "batch": case.tiles, "row": PlanRow(row.strategy).to_json()}
    told = run_on_ranks(
        case.ranks,
        "benchmarks.out_of_core.trial:run",
        asked | {"state_on_host": False, "gradients": str(gradients), "threads": 2 if case.ranks == 1 else 1},
    )
    fullest = max(range(case.ranks), key=lambda rank: told[rank]["device_bytes"])
    return {
        "device_bytes": told[fullest]["device_bytes"],
        "predicted": max(row.peak_bytes),
        "seconds": max(rank["seconds"] for rank in told),
        "loss": told[0]["loss"],
    }


def line(case: Case, row: dict[str, Any]) -> tuple[str, ...]:
    """Return one line of the table."""
    return (
        case.model,
        f"{case.px:,}",
        str(case.tiles),
        str(case.ranks),
        case.way,
        f"{row['device_bytes'] / MIB:.0f}" + ("" if case.within is None else f" of {case.within / MIB:.0f}"),
        f"{row['predicted'] / row['device_bytes'] - 1:+.1%}",
        f"{row['seconds']:.0f}",
        f"{row['loss']:.6f}",
        row["gradients"],
    )


def _apart(ours: Path, theirs: Path) -> str:
    """How far gradients are from others, relative to the largest of their tensor at most, and to the largest of all."""
    one, other = torch.load(ours), torch.load(theirs)
    most = max(float(value.abs().max()) for value in other.values())
    of_all = max(float((one[name] - other[name]).abs().max()) for name in other) / most
    return f"{largest_error(ours, theirs):.1e} of a tensor's, {of_all:.1e} of the largest off"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="regular expression of cases: " + "; ".join(map(str, CASES)))
    arguments = parser.parse_args()
    lines, over = [], False
    with tempfile.TemporaryDirectory() as folder:
        files: dict[tuple[str, int, int], tuple[str, Path]] = {}
        for number, case in enumerate(case for case in CASES if re.search(arguments.only, str(case))):
            ours = Path(folder) / f"{number}.pt"
            row = measure(case, ours)
            first = files.setdefault((case.model, case.px, case.tiles), (f"{case.ranks} ranks", ours))
            row["gradients"] = "" if first[1] == ours else f"{_apart(ours, first[1])} those of {first[0]}"
            lines.append(line(case, row))
            over |= case.within is not None and row["device_bytes"] > case.within
            print(*lines[-1], sep=" | ", flush=True)
    if arguments.write:
        write_results(Path(__file__).with_name("README.md"), results(COMMAND, markdown_table(HEADER, lines)), "teams")
    sys.exit(over)


if __name__ == "__main__":
    main()
