"""Measure what checkpoints cost: periods of steps with one checkpoint, written at once or in two phases, or with none.

Takes nothing; gives the share of the time that a checkpoint adds to a period. The three take turns in one process, on
one rank with all cores and with the model split over two. What is compared is the median, over all periods of a kind,
of what comes before the first step, of the first step, of the second, and so on: a machine that is slow for a moment
makes one of them longer, and the median does not see it. Exit code 1 if a target was missed.

    python -m benchmarks.overlap.checkpoints [--every 10] [--rounds 5] [--px 256] [--quick] [--write]
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from app.checkpoint.periodic import CheckpointManager
from app.settings.optimization import CheckpointSettings, OptimizerSettings
from app.settings.strategy import StrategySettings
from app.training.engines import build_engine, build_optimizer
from app.training.run_folder import RunFolder
from benchmarks.ranks import run_on_ranks
from benchmarks.results import OUT, finish, markdown_table, parser_of, publish, results, write_json
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch, TrainingEngine

KINDS = ("none", "blocking", "two-phase")
ASKED, LR, CPU = 0.035, 1e-4, torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Case:
    """A training whose checkpoints are measured: a step of ``batch`` tiles of ``px`` in ``m`` microbatches."""

    strategy: str
    ranks: int
    model: str = "resnet50"
    px: int = 256
    batch: int = 8
    m: int = 4
    every: int = 10
    rounds: int = 5


def measure(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of each part of the periods of each kind, as this rank saw them: what comes before the first step,
    every step, and what comes after the last.

    A period with a checkpoint begins with it, and ends when it is on the disk: a run waits for it before the next.

    Args:
        argument: ``case``: fields of ``Case``; ``folder`` to write to; ``threads`` of a rank.
    """
    torch.set_num_threads(argument["threads"])
    case, folder = Case(**argument["case"]), RunFolder(Path(argument["folder"]))
    engine = _engine(communicator, case)
    steps, parts = itertools.count(), _microbatches(engine, case)
    found: dict[str, Any] = {kind: [] for kind in KINDS} | {"write_s": {kind: [] for kind in KINDS}}
    make = functools.partial(CheckpointManager, last=folder.last, best=folder.best, engine=engine, device=CPU, step=0)
    blocking = make(CheckpointSettings(0, checkpoint_write="blocking"))
    with make(CheckpointSettings(0)) as two_phase:
        writers = {"none": None, "blocking": blocking, "two-phase": two_phase}
        for number in range(1 + case.rounds):
            for kind in KINDS if number % 2 else reversed(KINDS):  # each comes after each other as often
                communicator.barrier()
                parts_s, written_s = _period(engine, parts, steps, case.every, two_phase, writers[kind])
                if number:  # in the first, memory is taken for the first time
                    found[kind].append(parts_s)
                    found["write_s"][kind].append(written_s)
        found["tuned"] = two_phase.every
    found["threads"] = torch.get_num_threads()
    found["bytes"] = folder.last.stat().st_size if communicator.rank == 0 else 0
    engine.close()
    return found


def _period(
    engine: TrainingEngine,
    parts: list[Microbatch],
    steps: itertools.count[int],
    every: int,
    tuned: CheckpointManager,
    writer: CheckpointManager | None,
) -> tuple[list[float], float]:
    """Return seconds of each part, and until the step after which the checkpoint was on the disk."""
    begun_s = time.monotonic()
    moments, written_s = [begun_s], 0.0
    if writer is not None:
        state = engine.state_dict()
        writer.save({**state, "step": 0} if state else {}, 0, begun_s, best=False)
    moments.append(time.monotonic())
    for _ in range(every):
        engine.step(parts, next(steps), LR)
        moments.append(time.monotonic())
        tuned.add_step(moments[-1] - moments[-2])
        if not written_s and not (writer and writer.busy):
            written_s = moments[-1] - begun_s
    for each in {tuned, writer or tuned}:
        each.finish()
    moments.append(time.monotonic())
    return [end - begin for begin, end in itertools.pairwise(moments)], written_s or moments[-1] - begun_s


def _engine(communicator: Communicator, case: Case) -> TrainingEngine:
    asked: Any = {"parallel": case.strategy, "ranks": case.ranks, "batch": case.batch, "microbatches": case.m}
    torch.manual_seed(0)
    return build_engine(
        StrategySettings(**asked, device="cpu").to_strategy("cpu"),
        build_model(case.model, classes=2).to(memory_format=torch.channels_last),
        F.cross_entropy,
        functools.partial(build_optimizer, OptimizerSettings(lr=LR)),
        communicator,
        batch=case.batch,
        tile=case.px,
        seed=0,
        device=CPU,
    )


def _microbatches(engine: TrainingEngine, case: Case) -> list[Microbatch]:
    """Return random tiles: of each microbatch what this rank takes."""
    shape = (case.batch // case.m, 3, case.px, case.px)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    images, targets = images.contiguous(memory_format=torch.channels_last), torch.arange(shape[0]) % 2
    wants = [engine.wants(i) for i in engine.share]
    return [Microbatch(images if want.images else None, targets if want.targets else None, shape) for want in wants]


def usual_s(found: dict[str, Any], kind: str) -> float:
    """Return seconds of a period of ``kind``, each part of it the median of all periods."""
    return sum(statistics.median(part) for part in zip(*found[kind], strict=True))


def added(found: dict[str, Any], kind: str) -> float:
    """Return the share of the time that the checkpoint of a period adds."""
    return usual_s(found, kind) / usual_s(found, "none") - 1


def row(case: Case, found: dict[str, Any]) -> list[str]:
    def periods(kind: str) -> str:
        whole = [sum(parts) for parts in found[kind]]
        return f"{min(whole):.1f} to {max(whole):.1f} s"

    written = ("blocking", "two-phase")
    return [
        f"{case.strategy}, {case.ranks} x {found['threads']} thread{'s' if found['threads'] > 1 else ''}",
        f"{case.model}, {case.px} px, batch {case.batch}",
        f"{found['bytes'] / 2**20:.0f} MiB",
        f"{usual_s(found, 'none') / case.every:.2f} s",
        *(f"{100 * added(found, kind):.1f} %" for kind in written),
        *(f"{statistics.median(parts[0] for parts in found[kind]):.3f} s" for kind in written),
        f"{statistics.median(found['write_s']['two-phase']):.2f} s",
        str(found["tuned"]),
        *map(periods, KINDS),
    ]


HEADER = ("ranks", "training", "checkpoint", "step", "blocking adds", "two-phase adds", "blocking, between steps")
HEADER += ("two-phase, between steps", "on the disk after", "k for 3.5 %", "periods with none", "blocking", "two-phase")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--every", type=int, default=10, help="steps of a period")
    parser.add_argument("--rounds", type=int, default=5, help="periods of each kind")
    parser.add_argument("--px", type=int, default=256, help="side of the tiles")
    parser.add_argument("--quick", action="store_true", help="a small model: shows that it runs, not what it costs")
    arguments = parser.parse_args()
    size: dict[str, Any] = {"every": arguments.every, "rounds": arguments.rounds, "px": arguments.px}
    if arguments.quick:
        size = {"model": "resnet11_v2", "px": 64, "batch": 2, "m": 2, "every": 2, "rounds": 1}
    cases, found = [Case("single", 1, **size), Case("master", 2, **size)], []
    for case in cases:
        OUT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=OUT) as folder:  # the disk that a run would write to, not one in memory
            threads = max(1, torch.get_num_threads() // case.ranks)
            argument = {"case": dataclasses.asdict(case), "folder": folder, "threads": threads}
            found.append(run_on_ranks(case.ranks, "benchmarks.overlap.checkpoints:measure", argument)[0])
    about = (
        f"One checkpoint in {cases[0].every} steps, {cases[0].rounds} periods of each kind ({', '.join(KINDS)}) in "
        "turn; seconds are medians, of periods also the shortest and the longest.\n"
    )
    table = markdown_table(HEADER, map(row, cases, found))
    text = results(about, table)
    write_json(
        "checkpoint_stall", [{**dataclasses.asdict(case), **each} for case, each in zip(cases, found, strict=True)]
    )
    publish(__file__, text, arguments.write, "checkpoints")
    worst = max(added(each, "two-phase") for each in found)
    print(f"two-phase: {worst:.1%} at most (asked: {ASKED:.1%})")
    finish([f"two-phase checkpoints add {worst:.1%}, asked {ASKED:.1%}"] if worst > ASKED else ())


if __name__ == "__main__":
    main()
