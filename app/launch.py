"""Ranks, device and communicator of this process, from the command line and from what started it.

Under torchrun, mpirun or srun the environment says which rank this is. Without a launcher ``--ranks N`` starts the
ranks itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import torch

from app.cli import RunError
from app.launcher import find_launch
from app.machine import usable_cores
from app.slurm import find_task
from app.strategy import StrategySettings
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.heap import keep_freed_memory

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


def started_by_us() -> bool:
    """True when ``start_ranks`` started this process."""
    return STARTED_BY_US in os.environ


def start_ranks(ranks: int, module: str, argv: Sequence[str], max_restarts: int = 0) -> int:
    """Run ``python -m module`` with ``argv`` in ``ranks`` processes; the exit code is the first failing rank's.

    Args:
        max_restarts: how often all of them are started again after one has failed.
    """
    from parallel.comm.torch_launch import launch_ranks

    os.environ[STARTED_BY_US] = "1"
    return launch_ranks(ranks, [sys.executable, "-m", module, *argv], max_restarts)


def place(settings: StrategySettings) -> Placement:
    """Choose device and precision, share the cores among the ranks of this machine, join the other ranks.

    Raises:
        ValueError: a device that is not there.
        RunError: the other ranks did not arrive.
    """
    launch = find_launch()
    device = choose_device(settings.device, launch.local_rank if launch else 0)
    if "OMP_NUM_THREADS" not in os.environ:  # what the user set is the user's
        torch.set_num_threads(rank_cores())
    if device.type == "cpu":
        keep_freed_memory()
    cv2.setNumThreads(1)  # its own threads would compete with those that read tiles
    return Placement(connect(settings, device), device, choose_autocast(settings.precision, device))


def rank_cores() -> int:
    """Cores this rank may use for decoding and computing: the ranks of this machine share them."""
    launch = find_launch()
    return max(1, usable_cores() // (launch.local_world if launch else 1))


def connect(settings: StrategySettings, device: torch.device) -> Communicator:
    """Join the other ranks, over what they were started with.

    Raises:
        RunError: they did not arrive.
    """
    launch = find_launch()
    if settings.world == 1:
        return LocalCommunicator()
    from parallel.comm.communicator import CommunicationError

    try:
        if launch and launch.mpi:
            from parallel.comm.mpi_comm import MpiCommunicator

            return MpiCommunicator(settings.timeout_s)
        from parallel.comm.torch_comm import TorchCommunicator

        if "RANK" not in os.environ and (task := find_task()):
            os.environ.update(task.variables)
        return TorchCommunicator(device, settings.timeout_s)
    except CommunicationError as fault:
        raise RunError(str(fault)) from fault


def choose_device(asked: str, local_rank: int) -> torch.device:
    """The device of rank ``local_rank`` of this machine, made the current one.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: no usable GPU was found; run `python -m app.doctor`, or use --device cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def choose_autocast(asked: str, device: torch.device) -> torch.dtype | None:
    """Type for mixed precision, as ``--precision`` asks; None computes in float32."""
    if asked == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    return torch.bfloat16 if asked == "bf16" else None
