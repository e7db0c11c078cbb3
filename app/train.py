"""``python -m app.train``: a folder of slides and labels in, a trained model, its scores and its speed out.

One process, ``--ranks N`` on this machine, or under torchrun or mpirun. Everything a run leaves is in its run folder. A
process that torchrun, ``--max-restarts`` or Slurm has started again continues from the last checkpoint there, as with
``--resume``; where there is none yet, the run starts from its beginning.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import functools
import logging
import os
import pickle
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.planning.auto import PLAN, as_square, check_largest, decided, in_boxes, plan_run, plan_text
from app.settings.cli import FAILED, USAGE, RunError, describe_system_error, run_command
from app.settings.launcher import (
    Attempts,
    describe_restart,
    find_launch,
    find_launcher,
    previous_attempts,
    started_by_us,
)
from app.settings.run import RunConfig
from app.settings.strategy_errors import strategy_errors
from app.training.dataset import Dataset, prepare
from app.training.progress import IndexProgress, say
from app.training.run_folder import RunFolder
from app.training.run_info import describe_environment
from parallel.comm.launch import RankServer
from pipelines.catalog.table import FailedSlides, counted

if TYPE_CHECKING:
    from app.launch.place import RankPlacement
    from app.launch.watchdog import Interrupt, RankGuard

LOADED_BY_RANKS = (
    "app.launch.watchdog",
    "app.training.loop",
    "app.training.summary",
    "parallel.comm.torch_comm",
    "torch._dynamo",  # by torch itself, for tensors without data and for optimizers
)
"""Modules that the ranks of a run import while they run."""
PREPARED = ".prepared.pickle"
"""The dataset in the run folder, from the process that starts the ranks to the first rank: annotations and masks are
read once."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: trained, or interrupted and saved; 1: failed; 2: wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(RunConfig, lambda config: train(config, arguments), arguments, "python -m app.train")


def train(config: RunConfig, arguments: Sequence[str]) -> int:
    """Train as ``config`` says; ``arguments`` are what further ranks are started with."""
    folder = RunFolder(config.out)
    if (config.strategy.ranks > 1 or config.max_restarts) and find_launch() is None:
        with folder.in_use(starts=True, writes=False):
            return _start_ranks(config, folder, arguments)
    with contextlib.ExitStack() as held:
        return _train_rank(config, folder, held)


def _start_ranks(config: RunConfig, folder: RunFolder, arguments: Sequence[str]) -> int:
    with RankServer(["app.train", *arguments], LOADED_BY_RANKS) as server:
        starter = find_launcher(server=server.pid)
        before = previous_attempts(folder.attempts(), starter)
        # Everything that can be wrong with the data is found here, once, while the server loads.
        config_here = _continued(config, folder, before)
        dataset = _prepare(_with_microbatches(config_here, _begun(config_here, folder, before)), folder, before)
        folder.keep_attempts(Attempts(before, (starter.agent,) if starter.agent else (), starter.job))
        handed_over = folder.path / PREPARED
        handed_over.write_bytes(pickle.dumps(dataset, 5))
        try:
            fewer = functools.partial(_fewer, config, folder, dataset)
            code = server.launch(config.strategy.ranks, config.max_restarts, fewer)
        finally:
            handed_over.unlink(missing_ok=True)
    if code:
        fault_file = folder.fault_of(max(1, folder.attempts().begun))
        where = f"above and in {fault_file}" if fault_file.exists() else "above"
        message = f"a rank ended with exit code {code}; its message stands {where}"
        raise ValueError(message) if code == USAGE else RunError(message)
    return 0


def _fewer(config: RunConfig, folder: RunFolder, dataset: Dataset, ranks: int) -> int:
    """Return the most ranks below ``ranks`` that can continue the run, with a plan; ``ranks`` where none can."""
    if config.min_ranks is None:
        return ranks
    for fewer in range(ranks - 1, config.min_ranks - 1, -1):
        asked = dataclasses.replace(config, strategy=dataclasses.replace(config.strategy, ranks=fewer))
        try:
            asked = _continued(asked, folder, 1)
            _plan(_with_microbatches(asked, _begun(asked, folder, 1)), folder, dataset)
        except (ValueError, RunError) as fault:
            logging.getLogger("app.train").warning("cannot go on with %d ranks: %s", fewer, fault)
        else:
            return fewer
    return ranks


def _continued(config: RunConfig, folder: RunFolder, before: int) -> RunConfig:
    """Return ``config`` with ``resume`` decided: there is a checkpoint, and ``--resume`` or an earlier attempt."""
    resumes = (config.resume or before > 0) and folder.last.exists()
    was_begun = folder.config.exists() and not folder.last.exists()
    if not (resumes or before or started_by_us()) and (config.resume or was_begun):
        say(f"{folder.path} holds no checkpoint: the run starts from its beginning")
    return dataclasses.replace(config, resume=resumes)


def _begun(config: RunConfig, folder: RunFolder, before: int) -> int | None:
    """Return the microbatches of the run in the folder: of its checkpoint, or of an attempt without one; None: it
    begins, or has a plan to make."""
    begun: int | None = folder.settings(again=before > 0).get("microbatches") if config.resume or before else None
    return begun


def _with_microbatches(config: RunConfig, begun: int | None) -> RunConfig:
    """Return ``config`` with the number of microbatches decided: a resumed run keeps its own, because batch norm looks
    at one microbatch at a time."""
    asked = config.strategy
    if asked.needs_strategy_plan and begun is None and not config.resume:
        return config
    m = begun if asked.microbatches is None and begun is not None else asked.m
    strategy = dataclasses.replace(asked, microbatches=m)
    if faults := strategy_errors(strategy):
        if asked.microbatches is None and not strategy_errors(asked):
            faults.append(
                f"the run computes each batch in {begun} microbatch{'es' * (begun != 1)}: add --microbatches {asked.m} "
                f"to go on with {asked.m} (batch norm and dropout then look at other groups of tiles, so the numbers "
                "are not those of an uninterrupted run), or use a strategy that computes as many as before"
            )
        raise ValueError(f"{config.out} cannot be resumed like this:\n       " + "\n       ".join(faults))
    return dataclasses.replace(config, strategy=strategy)


def _train_rank(config: RunConfig, folder: RunFolder, held: contextlib.ExitStack) -> int:
    """Run this process's part; of all ranks that fail, one raises."""
    from app.launch.place import agree_on_precision, place
    from app.launch.watchdog import Interrupt, RankGuard
    from app.training.outcome import HELP
    from parallel.comm.communicator import CommunicationError
    from parallel.profile.gpu import lacks_memory

    placement = place(config.strategy)
    interrupt = Interrupt()
    try:
        _take_folder(folder, placement, held)
        placement = agree_on_precision(placement, config.strategy.computed_precision)
        before, begun, config = _agree_on_restart(config, folder, placement)
    except Exception as fault:
        atexit.register(placement.communicator.abort)  # others wait for a first rank that fails alone
        if isinstance(fault, CommunicationError):
            raise RunError(str(fault)) from fault
        raise
    guard = RankGuard(placement, config.strategy.timeout_s, folder.fault_of(before + 1), interrupt)
    try:
        return _train_guarded(_with_microbatches(config, begun), folder, placement, guard, interrupt, before)
    except Exception as fault:
        if not guard.should_print(fault):
            return USAGE if isinstance(fault, ValueError) else FAILED
        if isinstance(fault, CommunicationError):
            raise RunError(str(fault)) from fault
        if lacks_memory(fault):
            raise RunError(f"{fault}\n{HELP}") from fault
        raise


def _take_folder(folder: RunFolder, placement: RankPlacement, held: contextlib.ExitStack) -> None:
    """Keep other runs out of the folder; the first rank does, before any rank writes there."""
    from app.launch.place import OTHERS_SPEAK_S
    from app.training.share import share

    def take() -> str:
        try:
            held.enter_context(folder.in_use(starts=not started_by_us(), writes=True))
        except RunError as fault:
            return str(fault)
        return ""

    refusal = share(placement.communicator, take)
    if not refusal:
        return
    atexit.register(placement.communicator.abort)
    if placement.communicator.rank:
        time.sleep(OTHERS_SPEAK_S)
        raise SystemExit(FAILED)
    raise RunError(refusal)


def _agree_on_restart(
    config: RunConfig, folder: RunFolder, placement: RankPlacement
) -> tuple[int, int | None, RunConfig]:
    """Return attempts before this one, microbatches of the run, and its settings, as the first rank finds them: others
    may see the folder later, and torchrun may give them another number."""
    from app.training.share import share

    def find() -> tuple[int, int | None, bool]:
        before = previous_attempts(folder.attempts(), find_launcher())
        stale = folder.fault_of(before + 1)  # of an earlier start: ranks that find it end in silence
        for path in (stale, stale.with_suffix(".deaths")):
            path.unlink(missing_ok=True)
        continued = _continued(config, folder, before)
        return before, _begun(continued, folder, before), continued.resume

    before, begun, resume = share(placement.communicator, find)
    return before, begun, dataclasses.replace(config, resume=resume)


def _train_guarded(
    config: RunConfig, folder: RunFolder, placement: RankPlacement, guard: RankGuard, interrupt: Interrupt, before: int
) -> int:
    from app.training.engines import strategy_notes
    from app.training.loop import TrainingLoop
    from app.training.outcome import PeakMemory
    from app.training.session import Session
    from app.training.share import share
    from app.training.summary import RunSummary
    from parallel.profile.gpu import lacks_memory

    memory = PeakMemory(placement.device)
    dataset, plan = _prepare_once(config, folder, placement, before)
    interrupt.listen()  # before, a signal ends the process: no step is lost, and the index is saved as it grows
    strategy = decided(config.strategy, folder.path, placement.device.type, plan)
    session = Session(config, strategy, dataset, placement, FailedSlides(folder.failed_slides), guard.watchdog)
    loop = TrainingLoop(session, folder, interrupt)
    if before and placement.communicator.rank == 0:
        say(describe_restart(before, loop.outcome.step, loop.repeated, folder.attempts().ranks))
    summary = RunSummary(session, folder, loop, before)
    if placement.communicator.rank == 0:
        for note in (*session.model.notes, *strategy_notes(strategy)):
            say(note)
    is_done = loop.is_done
    if is_done and share(placement.communicator, lambda: folder.tells_end(loop.outcome.step)):
        done, more = f"has all its {counted(loop.outcome.step, 'step')}", "--steps or --epochs, with --extend"
        if loop.outcome.step < session.total_steps:
            done, more = f"was stopped early at step {loop.outcome.step}", "--patience"
        summary.say(f"nothing to do: {config.out} {done}; ask for more {more}")
        session.close()
        return 0
    try:
        if is_done:  # it was killed between its last checkpoint and its summary, or failed there
            loop.outcome.check_replaced(folder.failed_slides)
        else:
            if placement.communicator.rank == 0:
                folder.summary.unlink(missing_ok=True)  # of an earlier start: a report would show it as this one's
            loop.run()
    except Exception as fault:
        error = guard.explain(fault)
        if lacks_memory(fault) or lacks_memory(fault.__cause__):
            error += f"\n{loop.memory.fault()}"
            if folder.last.exists():
                error += f". {folder.last} is kept: all of these but --tile may be added to --resume"
        if is_full := isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT):
            kept = f"{folder.last} is kept: then continue with --resume"
            error = f"{describe_system_error(fault)}; {kept if folder.last.exists() else 'then start again'}"
        with contextlib.suppress(OSError) if is_full else contextlib.nullcontext():
            summary.failed(error, memory.bytes)
        if is_full or placement.communicator.world > 1 or guard.is_expected(fault):
            raise RunError(error) from fault
        raise
    summary.finished(memory.bytes)
    if loop.measures_twin:
        guard.watchdog.close()  # the run is completed, whatever happens to these steps
        try:
            summary.fed_from_memory(loop.measure_twin())
        except Exception as fault:
            logging.getLogger("app.train").warning("--twin-steps: these steps failed: %s", fault)
            if placement.communicator.world > 1:  # ranks that wait for this one find it gone, and end likewise
                sys.stdout.flush()
                atexit.register(os._exit, 0)
            return 0
    session.close()
    return 0


def _prepare(config: RunConfig, folder: RunFolder, before: int, placement: RankPlacement | None = None) -> Dataset:
    """Open the run folder and make its dataset and plan, with progress; of ranks that have agreed on a precision, the
    plan is for that."""
    folder.open(config, again=before > 0)
    folder.log_to_file()
    with contextlib.closing(IndexProgress(say)) as progress:
        dataset = prepare(config, folder, progress)
    if placement is not None:
        strategy = dataclasses.replace(config.strategy, precision=placement.precision)
        config = dataclasses.replace(config, strategy=strategy)
    _plan(config, folder, dataset)
    return dataset


def _plan(config: RunConfig, folder: RunFolder, dataset: Dataset) -> None:
    """Write ``plan.json`` into the run folder where something is left to a planner; else remove it."""
    planned = config if dataset.tiles.sides is None else as_square(config, dataset.tiles.largest)
    learned = len(dataset.classes), dataset.task == "segment"
    epoch_tiles = len(dataset.rows("train")) if planned is config else None
    if config.strategy.needs_plan:
        try:
            plan_run(planned, *learned, folder.path, say, epoch_tiles)
        except RunError as fault:
            if planned is config:
                raise
            raise RunError(f"{fault}; {in_boxes(dataset.tiles.largest)}") from fault
        if not config.resume:  # a resumed run keeps its number
            folder.keep_microbatches(decided(config.strategy, folder.path, "cpu", plan_text(folder.path)).m)
        return
    (folder.path / PLAN).unlink(missing_ok=True)  # of an earlier start: reports would show its forecast
    if dataset.tiles.sides is not None:
        check_largest(config, dataset.tiles.largest, *learned)


def _prepare_once(config: RunConfig, folder: RunFolder, placement: RankPlacement, before: int) -> tuple[Dataset, str]:
    """Return the dataset and the text of the plan, as the first rank finds them, or makes them."""
    from app.training.share import share, take
    from parallel.comm.objects import gather_objects

    starter = find_launcher()
    agents = gather_objects(placement.communicator, starter.agent)

    def find() -> tuple[Dataset, str]:
        if started_by_us():
            folder.log_to_file()
            # gone after the first attempt: a restart looks whether slides have changed
            dataset = take(folder.path / PREPARED) or prepare(config, folder, lambda line: None)
        else:
            dataset = _prepare(config, folder, before, placement)
        folder.write_json("env.json", describe_environment())  # by a rank: torch knows the GPUs, and is loaded
        assert agents is not None
        ranks = (*(folder.attempts().ranks if before else ()), placement.communicator.world)
        different = tuple(dict.fromkeys(agent for agent in agents if agent))
        folder.keep_attempts(Attempts(before + 1, different, starter.job, ranks))
        return dataset, plan_text(folder.path)

    return share(placement.communicator, find)


if __name__ == "__main__":
    sys.exit(main())
