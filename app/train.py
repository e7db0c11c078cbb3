"""``python -m app.train``: a folder of slides and labels in, a trained model, its scores and its speed out.

One process, ``--ranks N`` on this machine, or under torchrun or mpirun. Everything a run leaves is in its run folder.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.auto import plan_run, planned
from app.cli import FAILED, USAGE, RunError, run_command
from app.config import RunConfig
from app.dataset import Dataset, prepare
from app.environment import describe_environment
from app.launcher import find_launch
from app.runfolder import RunFolder
from pipelines.failures import FailedSlides

if TYPE_CHECKING:
    from app.interrupt import Interrupt
    from app.launch import Placement
    from app.rank_guard import RankGuard


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: trained, or interrupted and saved; 1: failed; 2: wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(RunConfig, lambda config: train(config, arguments), arguments, "python -m app.train")


def train(config: RunConfig, arguments: Sequence[str]) -> int:
    """Train as ``config`` says; ``arguments`` are what further ranks are started with."""
    from app.launch import start_ranks  # torch is imported once the settings are known to be right

    folder = RunFolder(config.out)
    config = _with_microbatches(config, folder)
    if config.strategy.ranks > 1 and find_launch() is None:
        # Everything that can be wrong with the data is found here, once, before any rank starts.
        _prepare(config, folder)
        code = start_ranks(config.strategy.ranks, "app.train", arguments)
        if code:
            where = f"above and in {folder.fault}" if folder.fault.exists() else "above"
            raise RunError(f"a rank ended with exit code {code}; its message stands {where}")
        return 0
    return _train_rank(config, folder)


def _with_microbatches(config: RunConfig, folder: RunFolder) -> RunConfig:
    """``config`` with the number of microbatches decided: a resumed run goes on with its own, whatever its strategy is
    now, because batch norm looks at one microbatch at a time.

    Raises:
        ValueError: the strategy cannot compute that number.
    """
    strategy = config.strategy
    if strategy.undecided and not config.resume:
        return config
    begun = folder.settings().get("microbatches") if config.resume else None
    m = begun if strategy.microbatches is None and begun is not None else strategy.m
    strategy = dataclasses.replace(strategy, microbatches=m)
    if faults := strategy.validate():
        raise ValueError(f"{folder.path} cannot be resumed like this:\n       " + "\n       ".join(faults))
    return dataclasses.replace(config, strategy=strategy)


def _train_rank(config: RunConfig, folder: RunFolder) -> int:
    """This process's part of the run; of all ranks that fail, one raises."""
    from app.interrupt import Interrupt
    from app.launch import place
    from app.rank_guard import RankGuard
    from parallel.comm.communicator import CommunicationError

    interrupt = Interrupt()
    interrupt.listen()
    placement = place(config.strategy)
    guard = RankGuard(placement, config.strategy.timeout_s, folder, interrupt)
    try:
        return _train_guarded(config, folder, placement, guard, interrupt)
    except Exception as fault:
        if not guard.tells(fault):
            return USAGE if isinstance(fault, ValueError) else FAILED
        if isinstance(fault, CommunicationError):
            raise RunError(str(fault)) from fault
        raise


def _train_guarded(
    config: RunConfig, folder: RunFolder, placement: Placement, guard: RankGuard, interrupt: Interrupt
) -> int:
    import torch

    from app.loop import TrainingLoop
    from app.session import build_session
    from app.summary import RunSummary
    from app.throughput import PeakMemory

    memory = PeakMemory(placement.device)
    dataset = _prepare_once(config, folder, placement)
    config = planned(config, folder.path)
    session = build_session(config, dataset, placement, FailedSlides(folder.failed_slides), guard.guardian)
    loop = TrainingLoop(session, folder, interrupt)
    summary = RunSummary(session, folder, loop.outcome, loop.memory)
    for note in session.notes:
        summary.say(note)
    if loop.outcome.step >= session.total_steps:
        if folder.tells_end(loop.outcome.step):
            summary.say(
                f"nothing to do: {config.out} has all its {loop.outcome.step} steps; ask for more --steps or --epochs"
            )
        else:  # it was killed between its last checkpoint and its summary
            summary.finished(memory.bytes)
        session.close()
        return 0
    try:
        loop.run()
    except Exception as fault:
        error = guard.explain(fault)
        if torch.OutOfMemoryError in (type(fault), type(fault.__cause__)):
            error += f"\n{loop.memory.fault()}"
        summary.failed(error, memory.bytes)
        if placement.communicator.world > 1 or guard.foresees(fault):
            raise RunError(error) from fault
        raise
    summary.finished(memory.bytes)
    session.close()
    return 0


def _prepare(config: RunConfig, folder: RunFolder) -> Dataset:
    """Open the run folder and make what it needs, telling the user."""
    folder.open(config)
    folder.log_to_file()
    folder.write_json("env.json", describe_environment())
    dataset = prepare(config, folder, _say)
    if config.strategy.undecided or config.strategy.runs_undecided:
        plan_run(config, len(dataset.classes), dataset.task == "segment", folder.path, _say)
        folder.keep_microbatches(planned(config, folder.path).strategy.m)
    return dataset


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
