"""``python -m app.plan``: which strategies can train a model at a tile size, how fast, and on how many bytes a rank.

Takes a model, a tile size, ranks and memory; prints a table of strategies, best first, and leaves ``plan.json``,
``candidates.json``, the chosen schedule and the model's graph with its cuts in ``--out``. Nothing is trained, and none
of the ranks has to be there: ``--device-spec`` names another machine.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from app.planning.command import PlanCommand
from app.settings.cli import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: something fits; 1: nothing does, or the plan failed; 2: wrong usage."""
    return run_command(PlanCommand, _run, argv, prog="python -m app.plan")


def _run(command: PlanCommand) -> int:
    from app.planning.report import report  # torch is imported once the settings are known to be right

    return report(command)


if __name__ == "__main__":
    gc.disable()  # a graph and what is known of it stay to the end: traversing them takes an eighth of a plan's time
    code = main()
    gc.freeze()  # nor does a process that ends traverse them
    sys.exit(code)
