"""Attempts of one start: whether this process continues with a run that an earlier attempt began.

Takes the environment, the process that started this one, and the record that attempts leave in the run folder; returns
how many attempts there were before. What starts ranks again is known by its process (torchrun, ``--ranks``) or by the
number of its job (Slurm), not by the counters it hands out: of several torchrun agents, each counts the failures of its
own node alone, so that after one rank's death the others are told that this is their first start. An attempt may have
fewer ranks than the one before, or more, and another agent's rank may be its first: all agents are in the record.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel.comm.launch import STARTED_BY_US

AGENTS = frozenset({"TORCHELASTIC_RUN_ID", STARTED_BY_US})
"""Variables of ranks whose parent is torchrun or ``--ranks``."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """Program that starts the processes of a run, and would start them again.

    Attributes:
        agent: host and process of torchrun or of ``--ranks``; None when there is neither.
        job: Slurm's number of the job or of the task of an array, the same after a requeue; None outside of Slurm.
        requeued: Slurm has run this job before.
    """

    agent: str | None = None
    job: str | None = None
    requeued: bool = False


@dataclass(frozen=True, slots=True)
class Attempts:
    """The record in the run folder: attempts of one start.

    Attributes:
        begun: how many, so far.
        agents, job: of the starter; of each rank's in the last attempt.
        ranks: of each attempt.
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
    agent = None
    if server or not AGENTS.isdisjoint(environment):
        agent = f"{platform.node()} {server or os.getppid()}"
    job = environment.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in environment:
        job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return Launcher(agent, job, int(environment.get("SLURM_RESTART_COUNT", 0)) > 0)


def previous_attempts(record: Attempts | None, starter: Launcher) -> int:
    """Return how many attempts ``starter`` has made; 0 when the folder is new, or holds a run that something else
    started.

    A job that was not requeued is no proof: in one allocation a user starts many runs.
    """
    if record is None:
        return 0
    same_agent = starter.agent is not None and starter.agent in record.agents
    same_job = starter.requeued and starter.job == record.job
    return record.begun if same_agent or same_job else 0


def describe_restart(before: int, step: int, repeated: int, ranks: Sequence[int] = ()) -> str:
    """Return the line that tells the user.

    Args:
        before: attempts before this one.
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
