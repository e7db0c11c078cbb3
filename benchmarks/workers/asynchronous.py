"""Asynchronous updates with a worker that takes twice as long, next to synchronous training and the fast rank alone.

Takes nothing; gives the held-out loss over seconds and over tiles, of five seeds. Ranks are real, over Gloo; next to a
small model they sleep, so that their speeds are known and no core is shared.

    python -m benchmarks.workers.asynchronous [--seeds 5] [--unit 0.02] [--write]
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ranks import run_on_ranks
from benchmarks.results import measured_on, parser_of, publish, results, write_json
from benchmarks.whole_engine import cpu_engine
from benchmarks.workers.looks import Run, loss_table
from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch, TrainingEngine
from parallel.schedule.shares import consecutive
from parallel.schedule.text import PushRule
from parallel.strategy import Strategy

M, SIZE, SIDE, CLASSES = 12, 4, 8, 4
"""Minibatches of a window, tiles of each, px, classes."""
SLOWNESS = (1, 2)
RATES = (0.03, 0.1, 0.3, 1.0)
TUNING_SEED = 100
POINTS = (0.25, 0.5, 1.0)
"""Parts of the time of the slowest way, and of the tiles, at which losses are read."""


class Way(NamedTuple):
    """One way to train.

    Attributes:
        staleness: of async; None: synchronous.
        m: microbatches of a step.
        shares: of them; empty: one rank computes all.
    """

    name: str
    staleness: int | None
    m: int
    shares: tuple[int, ...]

    def strategy(self) -> Strategy:
        ranks = max(1, len(self.shares))
        rule = None if self.staleness is None else PushRule(self.staleness)
        name = "async" if rule else "ddp" if ranks > 1 else "single"
        shares = consecutive(self.shares) if self.shares else ()
        return Strategy(name, ranks, 1, self.m, shares=shares, pushes=rule)


WAYS = (
    Way("fast rank alone, an update a minibatch", 0, M, ()),
    Way("ddp, shares 8,4: an update of 12 minibatches", None, M, (8, 4)),
    Way("ddp, shares 2,1: an update of 3 minibatches", None, 3, (2, 1)),
    Way("async, S = 0, equal shares", 0, M, (6, 6)),
    Way("async, S = 1, shares 8,4", 1, M, (8, 4)),
    Way("async, S = 4, shares 8,4", 4, M, (8, 4)),
    Way("async, no bound, shares 8,4", M, M, (8, 4)),
)


class Task:
    """Tiles of Gaussian noise, whose class a network drawn from ``seed`` tells."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._teacher = _network(16)
        torch.manual_seed(seed + 1)
        self.model = _network(32)
        self.held_out = self.tiles(1000, -1)

    def tiles(self, count: int, number: int) -> tuple[Tensor, Tensor]:
        """(count, 3, px, px) and classes (count,) of minibatch ``number``."""
        generator = torch.Generator().manual_seed(number + 7)
        images = torch.randn(count, 3, SIDE, SIDE, generator=generator)
        with torch.no_grad():
            logits: Tensor = self._teacher(images)
        return images, (logits - logits.mean(0)).argmax(1)


def _network(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(9 * width, width), nn.ReLU(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip


def train(communicator: Communicator, argument: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of training before each look at the held-out loss, and these losses."""
    way, task = WAYS[argument["way"]], Task(argument["seed"])
    rule = functools.partial(torch.optim.SGD, lr=argument["rate"])
    shape, batch = (SIZE, 3, SIDE, SIDE), way.m * SIZE
    engine = cpu_engine(task.model, F.cross_entropy, rule, communicator, way.strategy(), shape, batch)
    unit_s, steps = argument["unit_s"] * SLOWNESS[communicator.rank], argument["windows"] * M // way.m
    seconds, losses, trained_s = [0.0], [_loss(engine, task)], 0.0
    for step in range(steps):
        communicator.barrier()
        begun_s = time.perf_counter()
        engine.step(_slowly(engine, task, step * way.m, unit_s), step, argument["rate"])
        communicator.barrier()
        trained_s += time.perf_counter() - begun_s
        if (step + 1) * way.m % M == 0:
            seconds.append(trained_s)
            losses.append(_loss(engine, task))
    return {"seconds": seconds, "losses": losses}


def _slowly(engine: TrainingEngine, task: Task, first: int, unit_s: float) -> Iterator[Microbatch]:
    """Yield the minibatches of this rank, each once it has slept for what it takes."""
    for i in engine.share:
        images, classes = task.tiles(SIZE, first + i)
        time.sleep(unit_s)
        yield Microbatch(images, classes, tuple(images.shape))


def _loss(engine: TrainingEngine, task: Task) -> float:
    images, classes = task.held_out
    logits = engine.predict(Microbatch(images, None, tuple(images.shape)))
    return float(F.cross_entropy(logits, classes))


def measure(way: int, seeds: int, windows: int, unit_s: float) -> tuple[str, list[Run]]:
    """Train with the best of ``RATES`` on a seed of its own, then on ``seeds`` others; return the rate and the runs."""
    argument = {"way": way, "windows": windows}
    ranks = max(1, len(WAYS[way].shares))
    run = functools.partial(run_on_ranks, ranks, "benchmarks.workers.asynchronous:train_all")
    tuned = run([argument | {"seed": TUNING_SEED, "rate": rate, "unit_s": 0.0} for rate in RATES])[0]
    ends = [result["losses"][-1] for result in tuned]
    rate = RATES[ends.index(min(ends))]
    runs = run([argument | {"seed": seed, "rate": rate, "unit_s": unit_s} for seed in range(seeds)])[0]
    return f"{rate:g}", [Run(**result) for result in runs]


def train_all(communicator: Communicator, arguments: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """One start of the ranks for all."""
    return [train(communicator, argument) for argument in arguments]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--unit", type=float, default=0.02, help="seconds of a minibatch of the fast worker")
    asked = parser.parse_args()
    found = {way.name: measure(k, asked.seeds, asked.windows, asked.unit) for k, way in enumerate(WAYS)}
    write_json("asynchronous", {"ways": found, "environment": measured_on()})
    about = (
        f"Two ranks over Gloo that sleep {asked.unit * 1000:g} and {2 * asked.unit * 1000:g} ms a minibatch of {SIZE} "
        f"tiles; {asked.windows} windows of {M} minibatches; SGD. Held-out loss, median and range of {asked.seeds} "
        "seeds. A way that has ended keeps its last loss.\n"
    )
    table = loss_table(found, POINTS, asked.windows, M, "minibatches")
    text = results(about, table)
    publish(__file__, text, asked.write, "asynchronous")


if __name__ == "__main__":
    main()
