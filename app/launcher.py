"""What started this process: nothing, torchrun, or an MPI launcher such as mpirun or srun; read from its environment.

No torch and no MPI is loaded here: settings are checked against the number of ranks before anything else happens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


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
    # srun without its own PMI variables: PMIX_RANK says that MPI processes were started, Slurm says how many.
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
)
"""Variables that hold rank, world, local rank and local world: Open MPI, MPICH and its kin, Slurm with PMIx."""


def find_launch() -> Launch | None:
    """How this process was launched; None when a user started it alone."""
    for names in (TORCHRUN, *MPI):
        rank, world, local_rank, local_world = (os.environ.get(name) for name in names)
        if rank is not None and world is not None:
            return Launch(
                int(rank),
                int(world),
                int(local_rank or 0),
                int((local_world or world).split("(")[0]),  # Slurm writes 4(x2) for two nodes of four
                names is not TORCHRUN,
            )
    return None
