"""The communicator of a run with one process: a group of one rank, whose collective operations are the identity."""

from __future__ import annotations

from parallel.comm.thread_comm import ThreadCommunicator, ThreadGroup


class LocalCommunicator(ThreadCommunicator):
    """Rank 0 of 1."""

    def __init__(self) -> None:
        super().__init__(ThreadGroup(1, timeout_s=0), (), 0, 1, 0)
