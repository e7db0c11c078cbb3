"""The launcher of this process (none, torchrun, srun, or an MPI launcher such as mpirun), and its earlier attempts.

Read from the environment; no torch and no MPI is loaded: settings are checked against the number of ranks before
anything else happens. A launcher that starts ranks again is known by its process (torchrun, ``--ranks``) or by the
number of its job (Slurm), not by the counters it hands out: each of several torchrun agents counts the failures of its
own node alone. An attempt may have fewer ranks than the one before, or more.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.comm.launch import STARTED_BY_US

PORTS = range(20000, 30000)
"""Where the ranks of a step meet: below the ports that Linux hands out by itself."""
STEP_NUMBERS = 31
"""Ports between two consecutive jobs, so that their first steps do not meet where the other's do."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # srun --mpi=pmix: PMIX_RANK says that MPI processes were started, Slurm says how many.
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
"""Variables that hold rank, world, local rank and local world: Open MPI, MPICH and its kin, Slurm with PMIx."""
AGENTS = frozenset({"TORCHELASTIC_RUN_ID", STARTED_BY_US})
"""Variables of ranks whose parent is torchrun or ``--ranks``."""


def slurm_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return the variables that torchrun would set for this task of a step of several; None where it is none.

    MASTER_PORT is the same for all tasks of the step, and for no other step nearby. A value of the user goes first.

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
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_of_node(environment) or world),
        # Within one machine its name may not resolve.
        "MASTER_ADDR": environment.get("MASTER_ADDR") or ("127.0.0.1" if host == hosts else host),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(PORTS[step % len(PORTS)]),
    }


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


def find_launch() -> Launch | None:
    """Return how this process was launched; None when it was launched alone by anything but ``--ranks``.

    Raises:
        ValueError: variables of Slurm that cannot be read, or RANK without LOCAL_RANK and LOCAL_WORLD_SIZE.
    """
    for names in (TORCHRUN, *MPI):
        rank, world, local_rank, local_world = (os.environ.get(name) for name in names)
        mpi = names is not TORCHRUN
        # The only process of a launcher is no rank: as in a Slurm step of one task, --ranks starts some.
        if rank is None or world is None or (mpi and int(world) < 2):
            continue
        if int(world) < 2 and not started_by_us():  # torchrun, or the variables of a pod
            return None
        if mpi and local_world is None:  # mpiexec of HPE Cray and srun have variables of their own
            local_rank = os.environ.get("PMI_LOCAL_RANK") or os.environ.get("SLURM_LOCALID")
            local_world = os.environ.get("PMI_LOCAL_SIZE") or str(tasks_of_node(os.environ) or world)
        if not mpi and (local_rank is None or local_world is None):
            raise ValueError(
                f"RANK={rank} and WORLD_SIZE={world} are set, which needs LOCAL_RANK (got {local_rank}) and "
                f"LOCAL_WORLD_SIZE (got {local_world}), the rank and the number of ranks on this host: with one "
                "process on each host or pod, set LOCAL_RANK=0 LOCAL_WORLD_SIZE=1; or start the ranks with torchrun"
            )
        return Launch(int(rank), int(world), int(local_rank or 0), int(local_world or world), mpi)
    variables = slurm_variables()
    if variables is None:
        return None
    numbers = [int(variables[name]) for name in TORCHRUN]
    return Launch(numbers[0], numbers[1], numbers[2], numbers[3], False)


def started_by_us() -> bool:
    """Return whether ``--ranks`` started this process."""
    return STARTED_BY_US in os.environ


@dataclass(frozen=True, slots=True)
class Launcher:
    """Program that starts, and restarts, the processes of a run.

    Attributes:
        agent: host, process and start of torchrun or of ``--ranks``; None when there is neither.
        job: Slurm's number of the job or of the task of an array, the same after a requeue; None outside of Slurm.
        requeued: Slurm has run this job before.
    """

    agent: str | None = None
    job: str | None = None
    requeued: bool = False

    def has_started(self, agents: Collection[str | None], job: str | None) -> bool:
        """Return whether this started an earlier process of one of ``agents`` or of ``job``. A job that was not
        requeued is no proof: in one allocation a user starts many runs."""
        return (self.agent is not None and self.agent in agents) or (self.requeued and self.job == job)


@dataclass(frozen=True, slots=True)
class Attempts:
    """The record in the run folder: attempts of one start.

    Attributes:
        agents, job: of the starter; of each rank's in the last attempt.
    """

    begun: int
    agents: tuple[str, ...]
    job: str | None
    ranks: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Attempts:
        """The record as it was written.

        Raises:
            KeyError, TypeError: a value lacks or is of another type.
        """
        begun, agents, job, ranks = value["begun"], value["agents"], value["job"], value["ranks"]
        lists = isinstance(agents, list) and isinstance(ranks, list)
        if not (lists and type(begun) is int and all(type(count) is int for count in ranks)):
            raise TypeError(f"begun {begun!r}, agents {agents!r}, ranks {ranks!r}")
        return cls(begun, tuple(agents), job, tuple(ranks))


def find_launcher(environment: Mapping[str, str] = os.environ, *, server: int | None = None) -> Launcher:
    """Return what started this process.

    Args:
        server: process number of the rank server, in the launcher that is about to start the ranks.
    """
    parent = server or (0 if AGENTS.isdisjoint(environment) else os.getppid())
    agent = f"{platform.node()} {parent} {_start_ticks(parent)}" if parent else None
    job = environment.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in environment:
        job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return Launcher(agent, job, int(environment.get("SLURM_RESTART_COUNT", 0)) > 0)


def _start_ticks(pid: int) -> str:
    """Return when a process was started, in ticks since boot: in containers, host names and numbers repeat."""
    with contextlib.suppress(OSError):  # it has ended, or the kernel hides it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def previous_attempts(record: Attempts, starter: Launcher) -> int:
    """Return how many attempts ``starter`` has made; 0 when the folder is new, or holds a run that something else
    started."""
    return record.begun if starter.has_started(record.agents, record.job) else 0


def describe_restart(before: int, step: int, repeated: int, ranks: Sequence[int] = ()) -> str:
    """Return the line for the user.

    Args:
        step: steps that the last checkpoint holds; 0 when there is none.
        repeated: steps after it that an earlier attempt had done.
        ranks: of each attempt, this one's last.
    """
    where = f"continuing from step {step}" if step else "no checkpoint was written yet, starting anew"
    again = f"; {repeated} more {'was' if repeated == 1 else 'were'} done and must be done again" if repeated else ""
    other = ""
    if len(set(ranks[-2:])) > 1:
        other = f" on {ranks[-1]} rank{'s' * (ranks[-1] > 1)} in place of {ranks[-2]}"
    return f"restarted (attempt {before + 1}{other}): {where}{again}"
