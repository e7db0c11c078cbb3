"""Ranks that measure how fast they talk to each other, for ``link_speed``.

``measure_by_ranks`` starts the ranks, each of which is this module as a program with its settings as JSON.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.comm.grad_reducer import GradReducer
from parallel.comm.launch import RankServer
from parallel.comm.objects import gather_objects
from parallel.comm.torch_comm import TorchCommunicator
from parallel.comm.torch_shard import shard_module
from parallel.graph.partition import Partition
from parallel.profile.cache import keep_freed_memory
from parallel.space.team import TeamGrid
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import team_plans
from parallel.team.team_stages import team_stages
from parallel.trace.trace import trace_exclusively

WAITS_S = 60.0
"""A rank for another."""
CPU = torch.device("cpu")
MESSAGE_BYTES = 16 << 20
"""Of a large tile's activations."""
SUM_BYTES = 24 << 20
"""About a bucket of gradients."""
GPU_BYTES = 64 << 20
"""Of a message and of a sum between GPUs."""
SIDE_BY_SIDE = 8
"""Messages there and back, or sums, that GPUs are given before the clock is read."""
CONVOLUTIONS, CHANNELS, SIDE, TILES = 3, 512, 7, 4
"""A net whose weights are many beside its arithmetic, as at the end of a ResNet."""
MEMBER_LAYERS, MEMBER_CHANNELS = 8, 64
PART = 32, 64
"""Rows and columns of a member's part of a tile: a convolution of some milliseconds."""
WARM_UP = 2


def measure(communicator: Communicator, rounds: int) -> dict[str, float]:
    """Return median seconds of each thing that is timed, and the bytes of it; every rank calls it."""
    message, summed = torch.ones(MESSAGE_BYTES // 4), torch.zeros(SUM_BYTES // 4)
    word = torch.zeros(1)
    images = torch.randn(TILES, CHANNELS, SIDE, SIDE).to(memory_format=torch.channels_last)
    plain, shared, sharded = _net(), _net(), _net()
    net_bytes = sum(parameter.nbytes for parameter in plain.parameters())
    reducer = GradReducer(shared.parameters(), communicator, overlap=True)
    shard_module(sharded, [[layer] for layer in sharded], communicator, CPU)
    member = MemberPass(_pair(communicator))
    exchanges: list[int] = []
    timed: dict[str, Callable[[], None]] = {
        "member_alone": member.without_team,
        "member": lambda: exchanges.append(member.in_team()),
        "empty_message": lambda: _round_trips(communicator, word, communicator.rank ^ 1),
        "message": lambda: _round_trips(communicator, message, communicator.rank ^ 1),
        "empty_sum": lambda: communicator.all_reduce(word),
        "sum": lambda: communicator.all_reduce(summed),
        "alone": lambda: _step(plain, images),
        "replicated": lambda: _summed_step(shared, reducer, images),
        "sharded": lambda: _step(sharded, images),
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(-WARM_UP, rounds):
        for name, run in timed.items():
            communicator.barrier()
            begun = time.perf_counter()
            run()
            if number >= 0:
                seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name in ("empty_message", "message"):
        medians[name] /= 2  # one way
    counts = {"message_bytes": MESSAGE_BYTES, "sum_bytes": SUM_BYTES, "net_bytes": net_bytes}
    return medians | counts | {"exchanges": exchanges[0]}


def measure_gpus(communicator: Communicator, device: torch.device, rounds: int) -> dict[str, float] | None:
    """Return, on rank 0, median seconds of messages between neighbours and of sums, and the bytes that NCCL allocates
    for a link and for a communicator that sums: the most that a rank has measured. Every rank calls it."""
    rank, world = communicator.rank, communicator.world
    word, large = (torch.zeros(count, device=device) for count in (1, GPU_BYTES // 4))
    chain = [(first, first + 1) for first in range(world - 1)]
    free = [_free_bytes(device)]
    communicator.connect([*chain, *(pair[::-1] for pair in chain)])
    free.append(_free_bytes(device))
    communicator.all_reduce(word)
    free.append(_free_bytes(device))
    found = {
        "link_bytes": max(0, free[0] - free[1]) / (2 * sum(rank in pair for pair in chain)),
        "communicator_bytes": float(max(0, free[1] - free[2])),
    }
    for name, tensor in (("empty_", word), ("", large)):
        runs = [functools.partial(_sums, communicator, tensor)]
        # Neighbours talk two by two: 0 and 1, 2 and 3, then 1 and 2, 3 and 4.
        for first in (0, 1):
            peer = rank + 1 if rank % 2 == first else rank - 1
            runs.append(functools.partial(_round_trips, communicator, tensor, peer, SIDE_BY_SIDE))
        sum_s, *there_and_back_s = (_median_s(communicator, device, run, rounds) / SIDE_BY_SIDE for run in runs)
        found |= {f"{name}sum": sum_s, f"{name}message": max(there_and_back_s) / 2}
    of_ranks = gather_objects(communicator, found)
    if of_ranks is None:
        return None
    most = {name: max(of_rank[name] for of_rank in of_ranks) for name in found}
    return most | {"message_bytes": GPU_BYTES, "sum_bytes": GPU_BYTES}


def _median_s(communicator: Communicator, device: torch.device, run: Callable[[], None], rounds: int) -> float:
    seconds = []
    for _ in range(WARM_UP + rounds):
        torch.cuda.synchronize(device)
        communicator.barrier()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[WARM_UP:])


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def _sums(communicator: Communicator, tensor: Tensor) -> None:
    for _ in range(SIDE_BY_SIDE):
        communicator.all_reduce(tensor)


def _round_trips(communicator: Communicator, tensor: Tensor, peer: int, count: int = 1) -> None:
    """Send ``tensor`` to ``peer`` and back, one after the other; nothing without a peer."""
    if not 0 <= peer < communicator.world:
        return
    buffer = torch.empty_like(tensor)
    for _ in range(count):
        arriving = communicator.irecv(buffer, peer, 0)
        if communicator.rank > peer:
            arriving.wait()
        leaving = communicator.isend(tensor, peer, 0)
        arriving.wait()
        leaving.wait()


def _pair(communicator: Communicator) -> Communicator:
    """Return that of this rank and its neighbour; the last of an odd number of ranks joins the two before it."""
    pairs = [[rank, rank + 1] for rank in range(0, communicator.world - 1, 2)]
    if communicator.world % 2:
        pairs[-1].append(communicator.world - 1)
    return next(filter(None, [communicator.subgroup(pair) for pair in pairs]))


def _net() -> nn.Sequential:
    layers = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(CONVOLUTIONS)]
    return nn.Sequential(*layers)  # FSDP2 takes dense parameters only


def _summed_step(module: nn.Module, reducer: GradReducer, images: Tensor) -> None:
    reducer.begin_step()
    reducer.expect_final_grads()
    module(images).mean().backward()
    reducer.begin()
    reducer.finish()


def _step(module: nn.Module, images: Tensor) -> None:
    module.zero_grad()
    module(images).mean().backward()


class MemberPass:
    """A pass of a member of a team that divides the rows of a tile, and the same work without a team.

    What lies between them are the exchanges, with all that a rank does for one: rows packed and concatenated, halos
    recomputed, cores that pass messages on while they are wanted for computing, and waiting for the slower one.
    """

    def __init__(self, team: Communicator) -> None:
        shape = (1, 3, PART[0] * team.world, PART[1])
        self._shape = shape
        self._net = _member_net().to(memory_format=torch.channels_last).train()
        self._link = TeamComm(team)
        traced = trace_exclusively(copy.deepcopy(self._net), shape, team)
        grid, partition = TeamGrid(team.world, 1), Partition(traced.graph, (0,))
        plans = team_plans(traced, grid)
        self._stage = team_stages(traced, partition, [0], grid, self._link, plans, CPU)[0]
        self._stage.train()
        self._part = torch.randn((1, 3, *PART)).to(memory_format=torch.channels_last)

    def without_team(self) -> None:
        """Compute forward and backward of this member's part, without a team."""
        _backward(self._net(self._part).sum())

    def in_team(self) -> int:
        """Compute it as a member; return how many exchanges that took."""
        before = self._link.exchanges
        with self._stage.context(self._shape):
            (output,) = self._stage(self._part)
            loss = output.sum() * self._stage.counts
        _backward(loss)
        self._link.finish()
        return self._link.exchanges - before


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _member_net() -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (3, *(MEMBER_CHANNELS,) * (MEMBER_LAYERS - 1)):
        layers += [
            nn.Conv2d(before, MEMBER_CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(MEMBER_CHANNELS),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(MEMBER_CHANNELS, 2))


def measure_by_ranks(settings: dict[str, Any]) -> dict[str, float]:
    """Start ``settings["ranks"]`` ranks, and return the medians of the first one."""
    with tempfile.TemporaryDirectory(prefix="megatile-links-") as name:
        path = Path(name) / "seconds.json"
        text = json.dumps(settings | {"path": str(path)})
        module = "parallel.profile.link_worker"
        with RankServer([module, text], ["parallel.comm.torch_shard", "parallel.team.team_stages"]) as server:
            code = server.launch(settings["ranks"])
        if not path.exists():
            sys.exit(code or 1)
        medians: dict[str, float] = json.loads(path.read_text())
        return medians


def main() -> None:
    """Run one of the ranks."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    keep_freed_memory()  # as ranks do when they are placed
    torch.manual_seed(0)
    device = CPU
    if settings["device"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    communicator = TorchCommunicator(device, WAITS_S, WAITS_S)
    rounds = settings["rounds"]
    medians = measure(communicator, rounds) if device == CPU else measure_gpus(communicator, device, rounds)
    if communicator.rank == 0:
        Path(settings["path"]).write_text(json.dumps(medians))
    communicator.close()


if __name__ == "__main__":
    main()
