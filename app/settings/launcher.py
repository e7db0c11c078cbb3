"""The launcher of this process (none, torchrun, srun, or an MPI launcher such as mpirun), read from the environment.

No torch and no MPI is loaded here: settings are checked against the number of ranks before anything else happens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from app.settings.slurm import find_task, tasks_of_node
from parallel.comm.launch import STARTED_BY_US


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among those that were started together.

    Attributes:
        mpi: they talk over MPI; otherwise over torch.distributed.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    mpi: bool


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # srun --mpi=pmix: PMIX_RANK says that MPI processes were started, Slurm says how many.
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
"""Variables that hold rank, world, local rank and local world: Open MPI, MPICH and its kin, Slurm with PMIx."""


def find_launch() -> Launch | None:
    """Return how this process was launched; None when a user started it alone.

    Raises:
        ValueError: variables of Slurm that cannot be read.
    """
    for names in (TORCHRUN, *MPI):
        rank, world, local_rank, local_world = (os.environ.get(name) for name in names)
        if rank is None or world is None:
            continue
        mpi = names is not TORCHRUN
        if mpi and local_world is None:  # srun says itself what PMI does not
            local_rank = os.environ.get("SLURM_LOCALID")
            local_world = str(tasks_of_node(os.environ) or world)
        return Launch(int(rank), int(world), int(local_rank or 0), int(local_world or world), mpi)
    if task := find_task():
        return Launch(task.rank, task.world, task.local_rank, task.local_world, False)
    return None


def started_by_us() -> bool:
    """Return whether ``--ranks`` started this process."""
    return STARTED_BY_US in os.environ
