"""Ranks, device and communicator of this process, from the command line and from what started it.

Under torchrun its environment says which rank this is. Without a launcher ``--ranks N`` starts the ranks itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import torch

from app.cli import RunError
from app.config import StrategySettings
from app.machine import usable_cores
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator

STARTED_BY_US = "MEGATILE_RANK"
"""Set for ranks whose starter has already prepared the data, so that they neither do nor say it again."""


@dataclass(frozen=True)
class Placement:
    """Where this process stands and computes.

    Attributes:
        autocast: mixed-precision type, None for float32.
    """

    communicator: Communicator
    device: torch.device
    autocast: torch.dtype | None
    strategy: str


def under_launcher() -> bool:
    """True when torchrun, or something that sets the same environment, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_by_us() -> bool:
    """True when ``start_ranks`` started this process."""
    return STARTED_BY_US in os.environ


def world_size(settings: StrategySettings) -> int:
    """Ranks this run has: what the launcher started, else ``--ranks``."""
    return int(os.environ["WORLD_SIZE"]) if under_launcher() else settings.ranks


def start_ranks(ranks: int, argv: Sequence[str]) -> int:
    """Run ``app.train`` with ``argv`` in ``ranks`` processes; the exit code is the first failing rank's."""
    from parallel.comm.torch_launch import launch_ranks

    os.environ[STARTED_BY_US] = "1"
    return launch_ranks(ranks, [sys.executable, "-m", "app.train", *argv])


def place(settings: StrategySettings) -> Placement:
    """Choose device and precision, share the cores among the ranks of this machine, join the other ranks.

    Raises:
        ValueError: a strategy that does not fit the number of ranks, or a device that is not there.
        RunError: the other ranks did not arrive.
    """
    world = world_size(settings)
    if settings.parallel == "single" and world > 1:
        raise ValueError(f"--parallel single uses one process; the launcher started {world}")
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = _device(settings.device, int(os.environ.get("LOCAL_RANK", 0)))
    if "OMP_NUM_THREADS" not in os.environ:  # what the user set is the user's
        torch.set_num_threads(rank_cores(local_world))
    cv2.setNumThreads(1)  # its own threads would compete with those that read tiles
    strategy = ("ddp" if world > 1 else "single") if settings.parallel == "auto" else settings.parallel
    return Placement(_communicator(settings, world, device), device, _autocast(settings.precision, device), strategy)


def rank_cores(local_world: int | None = None) -> int:
    """Cores this rank may use for decoding and computing, when ``local_world`` ranks share this machine."""
    return max(1, usable_cores() // (local_world or int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def _communicator(settings: StrategySettings, world: int, device: torch.device) -> Communicator:
    if world == 1:
        return LocalCommunicator()
    from parallel.comm.communicator import CommunicationError
    from parallel.comm.torch_comm import TorchCommunicator

    try:
        return TorchCommunicator(device, settings.timeout_s)
    except CommunicationError as fault:
        raise RunError(str(fault)) from fault


def _device(asked: str, local_rank: int) -> torch.device:
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: no usable GPU was found; run `python -m app.doctor`, or use --device cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _autocast(asked: str, device: torch.device) -> torch.dtype | None:
    if asked == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    return torch.bfloat16 if asked == "bf16" else None
