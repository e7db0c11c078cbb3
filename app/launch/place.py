"""Rank, device and communicator of this process, from the command line and from what started it.

Under torchrun, mpirun or srun the environment says which rank this is. Without a launcher ``--ranks N`` starts the
ranks itself.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import cv2
import torch

from app.launch.host import kill_after, memory_bytes, stop_with_launcher, usable_cores
from app.settings.cli import FAILED, USAGE, RunError
from app.settings.launcher import Launch, find_launch, find_launcher, slurm_variables
from app.settings.strategy import StrategySettings
from parallel.comm.communicator import CommunicationError, Communicator, SecondaryError, agree
from parallel.comm.kinds import RankKind, are_mixed, describe_shared_gpu, has_gpu_each
from parallel.comm.thread_comm import LocalCommunicator
from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from parallel.profile.cache import keep_freed_memory
from parallel.profile.gpu import gpu_at, has_bf16, missing_kernels, set_tf32
from pipelines.catalog.table import listed

log = logging.getLogger(__name__)

Precision = Literal["fp32", "tf32", "bf16"]

GPU_RANK_CORES = 2
"""Cores of a rank on a GPU: one to launch kernels, one to read tiles. The ranks on the CPU need the others."""
HARDWARE_QUEUES = "32"
"""Of a GPU, for a rank among others. A receive over NCCL holds its stream until the sender comes, and streams that
share a queue (of 8 by default) would wait behind it."""
MODEL_COPIES = 4
"""Parameters, their gradients, and two moments of an optimizer."""
OTHERS_SPEAK_S = 8.0
"""A launcher that ends all ranks once one has failed does so in less."""


@dataclass(frozen=True)
class RankPlacement:
    """The place of this process in a run, and what it computes on.

    Attributes:
        precision: as ``--precision``, ``auto`` decided.
    """

    communicator: Communicator
    device: torch.device
    precision: Precision = "fp32"


def place(settings: StrategySettings) -> RankPlacement:
    """Choose device and precision, share the cores among the ranks of this machine, join the other ranks;
    ``agree_on_precision`` comes next.

    Raises:
        ValueError: a device that is not there, or a precision that it does not have.
        RunError: the other ranks did not arrive.
    """
    device = device_of(settings)
    precision = precision_of(settings.computed_precision, device)
    set_tf32(precision == "tf32")
    take_cores(device, settings.cpu_ranks)
    return RankPlacement(connect(settings, device), device, precision)


def agree_on_precision(placement: RankPlacement, asked: str) -> RankPlacement:
    """Return ``placement`` with the precision of all ranks: where ``asked`` is auto, fp32 if that is any rank's. Every
    rank calls it."""
    if asked == "auto" and agree(placement.communicator, placement.precision == "fp32"):
        return replace(placement, precision="fp32")
    return placement


def take_cores(device: torch.device, cpu_ranks: int = 0) -> None:
    """Let this process compute on its share of the cores, as fast as the C library and the processor can."""
    if device.type == "cpu":
        # Before there are threads, which take it over. Products of denormal numbers are ten times slower, and gradients
        # in the rims of boxes are such where layers scale their branch by 1e-6, as ConvNeXt's.
        torch.set_flush_denormal(True)
        keep_freed_memory()
    if threads_set() is None:
        torch.set_num_threads(rank_cores(cpu_ranks))
    cv2.setNumThreads(1)  # its own threads would compete with those that read tiles


def threads_set() -> int | None:
    """Return the threads that ranks compute with because the user set them; None: one for each core of a rank."""
    return torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else None


def node_cores() -> int:
    """Return the cores that the ranks of this machine share: those of this process. Where srun has bound each task to
    cores of its own, those of all tasks."""
    # On a node of 16 cores, 4 tasks of 4 cores each are bound; 4 of 16 share them.
    launch, own = find_launch(), len(os.sched_getaffinity(0))
    ranks = launch.local_world if launch else 1
    are_tasks = find_launcher().agent is None  # ranks of torchrun and of --ranks are of one task
    is_bound = are_tasks and own * ranks <= int(os.environ.get("SLURM_CPUS_ON_NODE", 0))
    return usable_cores() * (ranks if is_bound else 1)


def rank_cores(cpu_ranks: int = 0) -> int:
    """Return the cores this rank may use for decoding and computing: the ranks of this machine share ``node_cores``.

    Args:
        cpu_ranks: of a machine's ranks on GPUs and on its CPU, those on the CPU: they share what the others leave.
    """
    launch, cores = find_launch(), node_cores()
    ranks = launch.local_world if launch else 1
    if not cpu_ranks:
        return max(1, cores // ranks)
    on_gpus = max(1, min(GPU_RANK_CORES, cores // ranks))
    if not _on_cpu(launch, cpu_ranks):
        return on_gpus
    left = (cores - (ranks - cpu_ranks) * on_gpus) // cpu_ranks
    return max(1, min(left, usable_cores()))  # a rank that is bound cannot use the cores of others


def _on_cpu(launch: Launch | None, cpu_ranks: int) -> bool:
    """Return whether this rank is one of the last of its machine, which compute on the CPU."""
    return launch is not None and launch.local_rank >= launch.local_world - cpu_ranks


def host_share() -> int:
    """Return the bytes of host memory that this rank may fill by default: the ranks of this machine share half of what
    is free."""
    launch = find_launch()
    return memory_bytes()[1] // (launch.local_world if launch else 1) // 2


def map_share(device: torch.device, limit: int | None, model_bytes: int) -> int:
    """Return the bytes that maps between boxes may take of this rank's GPU by default: half of what the model leaves.

    Args:
        limit: bytes that the rank may use; None: what is free, shared by the ranks of the GPU.
    """
    launch = find_launch()
    ranks = -(-(launch.local_world if launch else 1) // torch.cuda.device_count())
    free = torch.cuda.mem_get_info(device)[0] // ranks
    return max(0, min(free, limit or free) - MODEL_COPIES * model_bytes) // 2


def host_memory(device: torch.device, folder: Path, most_bytes: int | None = None) -> HostMemory:
    """Return what tiles and maps in boxes may take of the host's memory: ``most_bytes``, or ``host_share``. What is
    beyond lies in ``folder``."""
    return HostMemory(Copies.for_device(device), host_share() if most_bytes is None else most_bytes, folder)


def connect(settings: StrategySettings, device: torch.device) -> Communicator:
    """Join the other ranks, over what they were started with.

    Raises:
        RunError: they did not arrive, cannot be reached, or only some found a GPU under ``--device auto``.
        SystemExit: the same, and another rank reports it.
    """
    launch = find_launch()
    stop_with_launcher()
    if settings.world == 1:
        return LocalCommunicator()
    assert launch is not None  # without a launcher, --ranks has been one
    try:
        return _join(settings, device, launch)
    except CommunicationError as fault:
        # What still waits for others, on threads of torch or MPI, must not keep this process.
        atexit.register(os._exit, FAILED)
        if launch.local_rank or isinstance(fault, SecondaryError):
            # The ranks of a host have the same error: one reports it, and a launcher ends the others meanwhile.
            time.sleep(OTHERS_SPEAK_S)
        if isinstance(fault, SecondaryError):
            raise SystemExit(FAILED) from None
        raise RunError(str(fault)) from fault


def _join(settings: StrategySettings, device: torch.device, launch: Launch) -> Communicator:
    if not launch.mpi:
        from parallel.comm.torch_comm import TorchCommunicator

        if "RANK" not in os.environ:
            os.environ.update(slurm_variables() or {})
        joined = TorchCommunicator(device, settings.timeout_s, settings.join_timeout_s)
        if joined.rank == 0 and (shared := describe_shared_gpu(joined.kinds)):
            text = "%s: NCCL is off, and messages go through host memory (Gloo); one rank per GPU is faster"
            log.warning(text, shared)
        on_node = {kind for kind in joined.kinds if kind.kind == "cuda" and kind.node == joined.kinds[0].node}
        if joined.rank == 0 and len(on_node) > (seen := torch.cuda.device_count()):
            text = (
                "ranks see %d of the %d GPUs of their machine, so that plans assume that all share what one sees: "
                "assign GPUs to the node (srun --gpus-per-node), not to each task (--gpus-per-task)"
            )
            log.warning(text, seen, len(on_node))
        if settings.is_mixed:
            return _mixed(joined, joined.kinds, settings, device)
        if are_mixed(joined.kinds):
            raise (SecondaryError if joined.rank else CommunicationError)(_without_gpu(joined.kinds))
        return joined
    own, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if own < cores and not launch.local_rank and "SLURM_CPUS_ON_NODE" not in os.environ:
        text = "ranks of this host divide %d of its %d cores: if Open MPI binds them, start mpirun with --bind-to none"
        log.warning(text, own, cores)
    message = (
        f"rank {launch.rank} of {launch.world} on {socket.gethostname()}: MPI did not start within "
        f"{settings.join_timeout_s:g} s (--join-timeout-s), which it does once all {launch.world} ranks are "
        "there: see what the others say, and whether the hosts reach each other; where starting takes longer, raise "
        "the limit"
    )
    # One rank after the other, so that one reports it and mpirun ends the others.
    with kill_after(message, settings.join_timeout_s + min(launch.rank, 10) * 0.3):
        from parallel.comm.mpi_comm import MpiCommunicator
    return MpiCommunicator(settings.timeout_s, launch.world)


def _without_gpu(kinds: Sequence[RankKind]) -> str:
    on_cpu = {str(rank): kind.node.split()[0] for rank, kind in enumerate(kinds) if kind.kind == "cpu"}
    hosts, ranks = listed(list(dict.fromkeys(on_cpu.values()))), listed(list(on_cpu))
    return (
        f"--device auto: no usable GPU was found on {hosts} (ranks {ranks}), and the other ranks have one: run "
        "`python -m app.doctor` there, start without these hosts, or use --device cpu"
    )


def _mixed(
    joined: Communicator, kinds: Sequence[RankKind], settings: StrategySettings, device: torch.device
) -> Communicator:
    from parallel.comm.mixed_comm import MixedCommunicator

    if not has_gpu_each([kind for kind in kinds if kind.kind == "cuda"]):
        raise CommunicationError(
            "--device mixed: ranks share a GPU, and those that are not on a CPU need one each: start fewer ranks on a "
            "machine, or more of them on its CPU (--cpu-ranks)"
        )
    return MixedCommunicator(joined, kinds, settings.mixed_sums or "device", device)


def device_of(settings: StrategySettings) -> torch.device:
    """Return the device of this rank, made the current one; errors as of ``choose_device``."""
    device = choose_device(settings.device)
    return torch.device("cpu") if settings.is_mixed and _on_cpu(find_launch(), settings.cpu_ranks) else device


def choose_device(asked: str) -> torch.device:
    """Return the device of this rank, made the current one.

    With auto the ranks of a machine are all on its GPUs, or all on its CPU if torch has no kernels for one of them.

    Raises:
        ValueError: a GPU is asked for, and there is none or torch has no kernels for it.
    """
    launch = find_launch()
    if asked != "cpu" and launch and launch.world > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", HARDWARE_QUEUES)  # before anything asks CUDA
    local_rank, local_world = (launch.local_rank, launch.local_world) if launch else (0, 1)

    def missing_on_any() -> str:
        used = min(torch.cuda.device_count(), local_world)
        return next(filter(None, map(missing_kernels, range(used))), "")

    kind, missing = _kind_of(asked, missing_on_any)
    if missing and local_rank == 0:
        log.warning("computing on the CPU: %s", missing)
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def device_kind(asked: str) -> Literal["cpu", "cuda"]:
    """Return the kind of device of the ranks of ``--device``; opens no CUDA context. Errors as of ``choose_device``."""
    return _kind_of(asked, lambda: gpu_at(0).missing_kernels)[0]


def _kind_of(asked: str, missing_kernels: Callable[[], str]) -> tuple[Literal["cpu", "cuda"], str]:
    """Return the kind of device, and why it is not the GPU that is there."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return "cpu", ""
    if not torch.cuda.is_available():
        raise _refused(f"--device {asked}: no usable GPU was found; run `python -m app.doctor`, or use --device cpu")
    missing = missing_kernels()
    if missing and asked != "auto":
        raise _refused(f"--device {asked}: {missing}; or use --device cpu")
    return ("cpu" if missing else "cuda"), missing


def _refused(reason: str) -> BaseException:
    """Return the error of what all ranks of this machine refuse alike: the first of them reports it."""
    launch = find_launch()
    if launch is None or launch.local_rank == 0:
        return ValueError(reason)
    time.sleep(OTHERS_SPEAK_S)
    return SystemExit(USAGE)


def precision_of(asked: str, device: torch.device) -> Precision:
    """Return ``--precision`` of a rank on ``device``; for the rest see ``decide_precision``."""
    name = "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return decide_precision(asked, has_bf16(device), name)


def decide_precision(asked: str, has_bf16: bool, name: str) -> Precision:
    """Return ``--precision`` with auto decided: bf16 on GPUs that compute in it, else fp32. GPUs without bf16 have no
    TF32 either.

    Args:
        name: of the device.

    Raises:
        ValueError: tf32, on a device without it.
    """
    if asked == "auto":
        return "bf16" if has_bf16 else "fp32"
    if asked == "tf32" and not has_bf16:
        raise _refused(
            f"--precision tf32 needs a GPU of compute capability 8.0 or more; got {name}: use --precision fp32"
        )
    return cast(Precision, asked)


def autocast_of(precision: str) -> torch.dtype | None:
    """Return the type for mixed precision of a decided ``--precision``; None computes in float32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
