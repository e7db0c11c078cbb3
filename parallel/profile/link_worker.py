"""Ranks that measure how fast they talk to each other: messages, also between ranks that compute, sums, and both ways
of data parallelism.

Started by ``link_speed``, as ``start`` with its settings as JSON; starts the ranks, of which the first writes the
medians, in seconds, to the path that the settings name.

    python -m parallel.profile.link_worker start '{"ranks": 2, "threads": 1, "rounds": 7, "path": "seconds.json"}'
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.comm.torch_comm import TorchCommunicator
from parallel.comm.torch_launch import launch_ranks
from parallel.profile.malloc import keep_freed_memory
from parallel.profile.member_pass import MemberPass

WAITS_S = 60.0
"""A rank for another."""
CPU = torch.device("cpu")
MESSAGE_BYTES = 16 << 20
"""Of a large tile's activations."""
SUM_BYTES = 24 << 20
"""About a bucket of gradients."""
CONVOLUTIONS, CHANNELS, SIDE, TILES = 3, 512, 7, 4
"""A net whose weights are many beside its arithmetic, as at the end of a ResNet."""
WARM_UP = 2


def measure(communicator: Communicator, rounds: int) -> dict[str, float]:
    """Return median seconds of each thing that is timed, and the bytes of it; every rank calls it.

    Args:
        rounds: that count, after ``WARM_UP``.
    """
    message, summed = torch.ones(MESSAGE_BYTES // 4), torch.zeros(SUM_BYTES // 4)
    word = torch.zeros(1)
    images = torch.randn(TILES, CHANNELS, SIDE, SIDE).to(memory_format=torch.channels_last)
    plain, shared, sharded = _net(), _net(), _net()
    net_bytes = sum(parameter.nbytes for parameter in plain.parameters())
    replica = communicator.replicate(shared)
    shards = communicator.shard(sharded, [[layer] for layer in sharded], CPU)
    member = MemberPass(_pair(communicator))
    exchanges: list[int] = []
    timed: dict[str, Callable[[], None]] = {
        "member_alone": member.alone,
        "member": lambda: exchanges.append(member.in_team()),
        "empty_message": lambda: _there_and_back(communicator, word),
        "message": lambda: _there_and_back(communicator, message),
        "empty_sum": lambda: communicator.all_reduce(word),
        "sum": lambda: communicator.all_reduce(summed),
        "alone": lambda: _step(plain, plain, images),
        "replicated": lambda: _step(replica, shared, images),
        "sharded": lambda: _step(shards.forward, sharded, images),
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


def _there_and_back(communicator: Communicator, tensor: Tensor) -> None:
    """Send ``tensor`` and back between every two neighbours at once; the last of an odd number of ranks has none."""
    rank, peer = communicator.rank, communicator.rank ^ 1
    if peer >= communicator.world:
        return
    buffer = torch.empty_like(tensor)
    arriving = communicator.irecv(buffer, peer, 0)
    if rank > peer:
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


def _step(forward: Callable[[Tensor], Tensor], module: nn.Module, images: Tensor) -> None:
    module.zero_grad()
    forward(images).mean().backward()  # type: ignore[no-untyped-call]


def main() -> int:
    """Start the ranks, or be one of them; return the exit code."""
    what, text = sys.argv[1:3]
    settings = json.loads(text)
    if what == "start":
        return launch_ranks(settings["ranks"], [sys.executable, "-m", "parallel.profile.link_worker", "rank", text])
    torch.set_num_threads(settings["threads"])
    keep_freed_memory()  # as ranks do when they are placed
    torch.manual_seed(0)
    communicator = TorchCommunicator(CPU, WAITS_S, WAITS_S)
    medians = measure(communicator, settings["rounds"])
    if communicator.rank == 0:
        Path(settings["path"]).write_text(json.dumps(medians))
    communicator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
