"""``python -m app.bench``: images per second of strategies and data-parallel baselines on the same slides.

Takes slides, a model, tile sizes, ranks and strategies; runs each in processes of its own, all of them once before any
a second time, and leaves ``bench.json`` and ``report.html`` in ``--out``. Every run is ``app.train`` as a user starts
it, on the same tiles of the same slides; running out of memory is a result.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from app.benchmark.command import BenchCommand
from app.launch.host import lock_folder
from app.settings.cli import run_command
from pipelines.catalog.catalog import check_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: measured, whatever came out; 1: not one case ran; 2: wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(BenchCommand, lambda command: _run(command, arguments), arguments, "python -m app.bench")


def _run(command: BenchCommand, arguments: Sequence[str]) -> int:
    from app.benchmark.runner import BenchmarkRunner  # which reads slides; first the settings are known to be right

    check_folder(command.data.slides)
    with lock_folder(command.out):
        return BenchmarkRunner(command, arguments).run()


if __name__ == "__main__":
    sys.exit(main())
