"""Seconds of a forward and backward pass by a team of 2 ranks of a thread each, compared with one process of 2 threads.

Takes nothing; gives the table of the README. Both compute the same weights, tile, targets and loss, and take turns
within one run, so that a busy machine slows them alike. Exit code 1 if a team is slower than asked.

    python -m benchmarks.teams.run [--rounds 5] [--models resnet50:1024 unet:512] [--write]
"""

from __future__ import annotations

import copy
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.launch.place import take_cores
from benchmarks.ranks import run_on_ranks
from benchmarks.results import finish, markdown_table, parser_of, publish, results, spread, write_json
from benchmarks.timing import in_turns
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.graph.partition import Partition
from parallel.space.team import TeamGrid
from parallel.streaming.box_sums import BoxSums
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import team_plans
from parallel.team.team_stages import team_stages
from parallel.trace.trace import trace_exclusively

CLASSES, GRID, ASKED = 3, TeamGrid(2, 1), 1.0


def on_rank(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of all rounds by the clock, and of this rank's processor: of the team, and of rank 0 alone with as
    many threads as the team has ranks."""
    take_cores(torch.device("cpu"))  # as app.train does
    torch.manual_seed(0)
    model: nn.Module = build_model(argument["model"], classes=CLASSES).train()
    model.to(memory_format=torch.channels_last)
    side, shape = argument["side"], (1, 3, argument["side"], argument["side"])
    images = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        pixels = copy.deepcopy(model)(torch.zeros(2, 3, 64, 64)).dim() == 4
    targets = torch.randint(CLASSES, (1, side, side) if pixels else (1,))
    traced, link = trace_exclusively(copy.deepcopy(model), shape, communicator), TeamComm(communicator)
    partition, plans = Partition(traced.graph, (0,)), team_plans(traced, GRID)
    stage: Any = team_stages(traced, partition, [0], GRID, link, plans, torch.device("cpu"))[0].train()

    def plain_pass() -> None:
        model.zero_grad()
        (_sums(model(images), targets).sum() / targets.numel()).backward()

    def team_pass() -> None:
        stage.zero_grad()
        tiles = stage.tiles(images, shape)
        with stage.context(shape):
            if pixels:
                loss = stage.sums_in_parts([tiles], BoxSums(_sums, targets))
            else:
                (output,) = stage(tiles)
                loss = _sums(output, targets) if stage.counts else output
        (loss.sum() * (stage.counts / targets.numel())).backward()
        link.finish()
        communicator.barrier()

    def alone() -> None:
        if communicator.rank == 0:
            torch.set_num_threads(communicator.world)
            plain_pass()
            torch.set_num_threads(1)

    took = in_turns({"team": team_pass, "alone": alone}, argument["rounds"], communicator.barrier)
    return {way: list(zip(*of_way, strict=True)) for way, of_way in took.items()}


def _sums(output: Any, targets: Tensor) -> Tensor:
    """Return (n, 1): cross entropy of all that is labelled."""
    return F.cross_entropy(output, targets, reduction="none").flatten(1 if targets.dim() > 1 else 0).sum(-1, True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up")
    parser.add_argument("--models", nargs="+", default=["resnet50:1024", "unet:512"], help="NAME:SIDE, px")
    asked = parser.parse_args()
    lines, found, missed = [], {}, []
    for each in asked.models:
        model, _, side = each.rpartition(":")
        argument = {"model": model, "side": int(side), "rounds": asked.rounds}
        ranks = found[each] = run_on_ranks(GRID.members, "benchmarks.teams.run:on_rank", argument)
        (alone, alone_cpu), team = ranks[0]["alone"], ranks[0]["team"][0]
        cpu = [sum(both) for both in zip(*(rank["team"][1] for rank in ranks), strict=True)]
        ratio, of_cpu = median(alone) / median(team), median(alone_cpu) / median(cpu)
        shown = [spread(alone), spread(team), f"**{ratio:.2f}**", spread(alone_cpu)]
        lines.append([f"{model}, {int(side):,} px", *shown, spread(cpu), f"{of_cpu:.2f}"])
        if min(ratio, of_cpu) < ASKED:
            missed.append(f"{model}: {ratio:.2f}x by the clock, {of_cpu:.2f}x of processor time, asked {ASKED}x")
        print(*lines[-1], sep=" | ", flush=True)
    write_json("teams", found)
    header = ["", "1 process x 2 threads, s", "2 ranks x 1 thread, s", "x as fast", "its processor s", "theirs", "x"]
    publish(__file__, results(markdown_table(header, lines)), asked.write, "speed")
    finish(missed)


if __name__ == "__main__":
    main()
