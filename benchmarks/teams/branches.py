"""Branches shared by the ranks of a team, and data parallelism: images/s in turns, bytes sent, and a simulated curve.

Takes nothing; gives the table of branches of the README. The curve is the planner's forecast for V100s of a data sheet.

    python -m benchmarks.teams.branches [--ranks 2 4] [--rounds 5] [--models torchvision:googlenet:128] [--write]
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from app.launch.place import take_cores
from app.planning.machine import named_machine
from app.planning.workload import Workload
from benchmarks.ranks import run_on_ranks
from benchmarks.results import markdown_table, parser_of, results, write_results
from models.registry import build_model
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch
from parallel.plan.search import Planner
from parallel.strategy import Strategy

README = Path(__file__).with_name("README.md")
COMMAND = "python -m benchmarks.teams.branches"
STRONG, WEAK = 8, 4
"""Tiles of a step over all ranks, and of each rank."""
RULE = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
DEVICE, LINK, NETWORK, PER_NODE = "v100-16gb", "nvlink2", "edr-infiniband", 4
WAYS, RANKS = (2, 4, 8), (8, 16, 32, 64, 128, 256, 512, 1024)
PUBLISHED = "up to 3.05x at 1,024 V100 (SUPER, Jain et al., IPDPS 2021: T5-Large-Mod on WMT)"


def on_rank(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of each round, and bytes that this rank sent in a step, by strategy."""
    take_cores(torch.device("cpu"))
    torch.manual_seed(0)
    model = build_model(argument["model"], classes=2).to(memory_format=torch.channels_last)
    world, batch, side = communicator.world, argument["batch"], argument["side"]
    engines = {
        strategy.name: assemble(
            copy.deepcopy(model),
            F.cross_entropy,
            RULE,
            communicator,
            strategy,
            shape=(batch // strategy.m, 3, side, side),
            batch=batch,
            device=torch.device("cpu"),
        )
        for strategy in (Strategy("ddp", world, 1, world), Strategy("subgraph", world, 1, 1, ways=world))
    }
    took: dict[str, list[float]] = {name: [] for name in engines}
    for k in range(argument["rounds"] + 1):
        for name in sorted(engines, reverse=bool(k % 2)):
            engine = engines[name]
            tiles = batch // (world if name == "ddp" else 1)
            images = torch.randn(tiles, 3, side, side).to(memory_format=torch.channels_last)
            microbatches = [Microbatch(images, torch.zeros(tiles, dtype=torch.int64), tuple(images.shape))]
            communicator.barrier()
            start = time.perf_counter()
            engine.step(microbatches, k, 1e-3)
            communicator.barrier()
            if k:  # the first round warms up
                took[name].append(time.perf_counter() - start)
    return {"took": took, "sent": {name: engine.sent_in_step for name, engine in engines.items()}}


def measured(models: Sequence[tuple[str, int]], ranks: Sequence[int], rounds: int) -> Iterator[list[str]]:
    """Yield a row for each model, number of ranks and kind of batch."""
    for model, side in models:
        for world in ranks:
            for kind, batch in (("strong", STRONG), ("weak", WEAK * world)):
                argument = {"model": model, "side": side, "batch": batch, "rounds": rounds}
                found = run_on_ranks(world, "benchmarks.teams.branches:on_rank", argument)
                took = found[0]["took"]
                ratio = median(a / b for a, b in zip(took["ddp"], took["subgraph"], strict=True))
                sent = [f"{max(each['sent'][name] for each in found) / 2**20:.1f}" for name in ("ddp", "subgraph")]
                speeds = [f"{batch / median(took[name]):.2f}" for name in ("ddp", "subgraph")]
                yield [f"{model}, {side} px", str(world), f"{kind}, {batch}", *speeds, f"**{ratio:.2f}**", *sent]


def simulated(model: str, side: int, tiles: int) -> Iterator[list[str]]:
    """Yield a row for each number of ranks: images/s of data parallelism, and those of each number of ways over them.

    Args:
        tiles: of each rank.
    """
    machine = named_machine(DEVICE, max(RANKS), per_node=PER_NODE, link=LINK, network=NETWORK)
    task = Workload(model, side, 1000, optimizer="sgd").task(tiles, machine.estimate)
    for ranks in RANKS:
        planner = Planner(dataclasses.replace(task, batch=tiles * ranks), machine.cluster)
        rows = [planner.forecast(Strategy("ddp", ranks, 1, ranks))]
        rows += [planner.forecast(Strategy("subgraph", ranks, 1, ranks // ways, ways=ways)) for ways in WAYS]
        speeds = [row.images_per_second for row in rows if row and row.images_per_second]
        assert len(speeds) == len(rows)
        yield [f"{ranks:,}", f"{speeds[0]:,.0f}", *(f"{speed / speeds[0]:.2f}" for speed in speeds[1:])]


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up; 0: the curve alone")
    parser.add_argument("--models", nargs="+", default=["torchvision:googlenet:128", "amoebanet(6,64):128"])
    parser.add_argument("--curve", nargs="+", default=["amoebanet(18,208):224:2"], help="NAME:SIDE:TILES of a rank")
    asked = parser.parse_args(argv)
    models = [(name, int(side)) for name, _, side in (each.rpartition(":") for each in asked.models)]
    parts = []
    if asked.rounds:
        header = ["", "ranks", "batch", "ddp, images/s", "subgraph", "x", "ddp sends, MiB", "subgraph"]
        parts.append(markdown_table(header, measured(models, asked.ranks, asked.rounds)))
    for name, side, tiles in (each.rsplit(":", 2) for each in asked.curve):
        parts.append(f"Simulated, {name} on {side} px, {tiles} tiles of a rank; published: {PUBLISHED}.\n")
        header = ["ranks", "ddp, images/s", *(f"{ways}-way, x" for ways in WAYS)]
        parts.append(markdown_table(header, simulated(name, int(side), int(tiles))))
    text = results(f"{COMMAND} --rounds {asked.rounds} --write", *parts)
    print(text)
    if asked.write:
        write_results(README, text, "branches")


if __name__ == "__main__":
    main()
