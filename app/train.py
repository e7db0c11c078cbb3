"""``python -m app.train``: a folder of slides and labels in, a trained model, its scores and its speed out.

One process, ``--ranks N`` on this machine, or under torchrun. Everything a run leaves is in its run folder.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.cli import RunError, run_command
from app.config import RunConfig
from app.dataset import Dataset, prepare
from app.environment import describe_environment
from app.runfolder import RunFolder
from pipelines.failures import FailedSlides
from pipelines.slide import SlideError

if TYPE_CHECKING:
    from app.launch import Placement


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: trained, or interrupted and saved; 1: failed; 2: wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(RunConfig, lambda config: train(config, arguments), arguments, "python -m app.train")


def train(config: RunConfig, arguments: Sequence[str]) -> int:
    """Train as ``config`` says; ``arguments`` are what further ranks are started with."""
    from app.launch import start_ranks, under_launcher  # torch is imported once the settings are known to be right

    folder = RunFolder(config.out)
    if config.strategy.ranks > 1 and not under_launcher():
        # Everything that can be wrong with the data is found here, once, before any rank starts.
        _prepare(config, folder)
        code = start_ranks(config.strategy.ranks, arguments)
        if code:
            raise RunError(f"a rank ended with exit code {code}; its message stands above and in {folder.path}/run.log")
        return 0
    return _train_rank(config, folder)


def _train_rank(config: RunConfig, folder: RunFolder) -> int:
    """This process's part of the run."""
    import torch

    from app.interrupt import Interrupt
    from app.launch import place
    from app.loop import TrainingLoop
    from app.session import build_session
    from app.summary import RunSummary
    from app.throughput import PeakMemory
    from parallel.comm.communicator import CommunicationError

    interrupt = Interrupt()
    interrupt.listen()
    placement = place(config.strategy)
    memory = PeakMemory(placement.device)
    dataset = _prepare_once(config, folder, placement)
    session = build_session(config, dataset, placement, FailedSlides(folder.failed_slides))
    loop = TrainingLoop(session, folder, interrupt)
    summary = RunSummary(session, folder, loop.outcome)
    for note in session.notes:
        summary.say(note)
    if loop.outcome.step >= session.total_steps:
        summary.say(
            f"nothing to do: {config.out} has all its {loop.outcome.step} steps; ask for more --steps or --epochs"
        )
        session.close()
        return 0
    try:
        loop.run()
    except torch.OutOfMemoryError as fault:
        error = f"out of memory on {placement.device}: lower --tile, raise --microbatches, or use --precision bf16"
        summary.failed(error, memory.bytes)
        raise RunError(error) from fault
    except (RunError, SlideError, CommunicationError) as fault:
        summary.failed(str(fault), memory.bytes)
        raise RunError(str(fault)) from fault
    summary.finished(memory.bytes)
    session.close()
    return 0


def _prepare(config: RunConfig, folder: RunFolder) -> Dataset:
    """Open the run folder and make what it needs, telling the user."""
    folder.open(config)
    folder.log_to_file()
    folder.write_json("env.json", describe_environment())
    return prepare(config, folder, _say)


def _prepare_once(config: RunConfig, folder: RunFolder, placement: Placement) -> Dataset:
    """The dataset: made by the process that started the ranks, or by the first rank while the others wait."""
    from app.launch import started_by_us

    first = placement.communicator.rank == 0
    if first and not started_by_us():
        dataset = _prepare(config, folder)
        placement.communicator.barrier()
        return dataset
    placement.communicator.barrier()
    if first:
        folder.log_to_file()
    return prepare(config, folder, _say_nothing)


def _say(line: str) -> None:
    print(line, flush=True)
    logging.getLogger("app.train").info(line)


def _say_nothing(line: str) -> None:
    """What is found again has been said before."""


if __name__ == "__main__":
    sys.exit(main())
