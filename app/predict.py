"""``python -m app.predict``: heat maps, areas and scores of whole slides by a trained model.

Takes a folder of slides and a checkpoint of ``app.train``; leaves for each slide a heat map of each class (a pyramidal
TIFF), a picture, GeoJSON for QuPath and a table of tiles, and ``slides.csv`` of all. A slide that fails is named in
``failed_slides.csv``; another start continues with the slides that are not done.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from app.launch.host import LOCK, lock_folder
from app.prediction.command import PredictCommand
from app.settings.cli import USAGE, RunError, run_command
from app.settings.launcher import find_launch, started_by_us
from parallel.comm.launch import RankServer


def predict(command: PredictCommand, arguments: Sequence[str]) -> int:
    """Predict as ``command`` says; ``arguments`` are what further ranks are started with."""
    launch = find_launch()
    if command.ranks > 1 and launch is None:
        loads = "app.prediction.share", "parallel.comm.torch_comm"
        with lock_folder(command.out), RankServer(["app.predict", *arguments], loads) as server:
            code = server.launch(command.ranks)
        if code:
            message = f"a rank ended with exit code {code}; its message stands above"
            raise ValueError(message) if code == USAGE else RunError(message)
        return 0
    with contextlib.ExitStack() as held:
        if not started_by_us():  # the ranks of two starts must not write into one folder
            name = f"rank{launch.rank}.lock" if launch and launch.rank else LOCK
            held.enter_context(lock_folder(command.out, name))
        from app.prediction.share import predict_rank

        predict_rank(command, launch.rank if launch else 0)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: predicted, also where single slides failed; 1: failed; 2: wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(PredictCommand, lambda command: predict(command, arguments), arguments, "python -m app.predict")


if __name__ == "__main__":
    sys.exit(main())
