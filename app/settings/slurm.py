"""A process among the tasks that ``srun`` started together without MPI: read from what Slurm says in its environment.

Takes the environment; returns rank, world and where to meet, for torch.distributed. A batch script and the shell of
``salloc`` are no tasks of a step, and a step of one task has nobody to meet. No torch is loaded here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PORTS = range(20000, 30000)
"""Where the ranks of a step meet: below the ports that Linux hands out by itself."""

STEP_NUMBERS = 31
"""Ports between two consecutive jobs, so that their first steps do not meet where the other's do."""


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """This task of a step of several.

    Attributes:
        host: of rank 0.
        port: on that host; the same for all tasks of the step, and for no other step nearby.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    port: int

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables that torchrun would set, which torch.distributed reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def find_task(environment: Mapping[str, str] = os.environ) -> SlurmTask | None:
    """This process as a task of a step of several; None when it is none.

    MASTER_ADDR and MASTER_PORT go before what is made of the step's hosts and number.

    Raises:
        ValueError: a variable of Slurm that cannot be read.
    """
    # A batch script has SLURM_PROCID, too, but belongs to no numbered step.
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return None
    world = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if world < 2:
        return None
    hosts = environment["SLURM_STEP_NODELIST"]
    host = first_host(hosts)
    step = int(environment["SLURM_JOB_ID"]) * STEP_NUMBERS + int(environment["SLURM_STEP_ID"])
    return SlurmTask(
        int(environment["SLURM_PROCID"]),
        world,
        int(environment["SLURM_LOCALID"]),
        tasks_of_node(environment) or world,
        # Within one machine its name need not be known to anybody.
        environment.get("MASTER_ADDR") or ("127.0.0.1" if host == hosts else host),
        int(environment.get("MASTER_PORT") or PORTS[step % len(PORTS)]),
    )


def tasks_of_node(environment: Mapping[str, str]) -> int | None:
    """Tasks of this step on this node; None where Slurm does not say.

    Raises:
        ValueError: a list that cannot be read.
    """
    told = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if told is None:
        return None
    counts = list(expand_counts(told))
    node = int(environment.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else counts[0]


def expand_counts(text: str) -> Iterator[int]:
    """A number for each node: ``2(x3),1`` gives 2, 2, 2, 1.

    Raises:
        ValueError: text of another form.
    """
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"tasks per node are written as 2(x3),1; Slurm gave {text!r} in its environment")
        yield from [int(match[1])] * int(match[2] or 1)


def first_host(text: str) -> str:
    """Return the first of a list of hosts: ``a01`` of ``a[01-03,7],b``; brackets may stand several times in a name.

    Raises:
        ValueError: text of another form.
    """
    name = re.match(r"(?:[^,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|$)", text)
    if not name:
        raise ValueError(f"hosts are written as a[01-03,7],b; Slurm gave {text!r} in its environment")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name[0])
