"""Ranks as threads: the failure of one is the failure of all, at once, and the first one's error comes out."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from parallel.comm.communicator import CommunicationError, Communicator
from parallel.comm.thread_comm import ThreadCommunicator, run_on_threads


def test_results_come_in_order_of_rank() -> None:
    assert run_on_threads(3, lambda c, argument: (c.rank, argument), "x") == [(0, "x"), (1, "x"), (2, "x")]


def test_first_failure_ends_the_others_at_once_and_is_raised() -> None:
    told: list[str] = []

    def one_fails(communicator: Communicator, _: Any) -> None:
        if communicator.rank == 1:
            raise ValueError("tile 7 is broken")
        try:
            communicator.irecv(torch.zeros(1), 1, 0).wait()
        except CommunicationError as fault:
            told.append(str(fault))
            raise

    begun = time.monotonic()
    with pytest.raises(ValueError, match="tile 7 is broken"):
        run_on_threads(3, one_fails, timeout_s=60)
    assert time.monotonic() - begun < 20
    assert len(told) == 2
    assert all("rank 1 failed: ValueError: tile 7 is broken" in text for text in told)


def test_rank_that_still_computes_long_after_a_failure_is_named() -> None:
    release = threading.Event()

    def one_fails(communicator: Communicator, _: Any) -> None:
        if communicator.rank == 0:
            raise ValueError("no")
        release.wait(30)

    try:
        with pytest.raises(CommunicationError, match=r"ranks \[1\] still compute"):
            run_on_threads(2, one_fails, timeout_s=0.2)
    finally:
        release.set()


def test_messages_that_do_not_fit_are_a_fault_of_the_sender_or_receiver() -> None:
    def sizes_differ(communicator: Communicator, _: Any) -> None:
        tensor = torch.zeros(2 + communicator.rank)
        act = communicator.irecv if communicator.rank else communicator.isend
        act(tensor, 1 - communicator.rank, 0).wait()

    with pytest.raises(AssertionError, match="2 numbers sent, 3 expected"):
        run_on_threads(2, sizes_differ, timeout_s=10)


def test_abort_stops_the_ranks_that_wait() -> None:
    def stop(communicator: Communicator, _: Any) -> None:
        if communicator.rank:
            communicator.abort()
        else:
            communicator.barrier()

    with pytest.raises(CommunicationError, match="rank 1 asked all to stop"):
        run_on_threads(2, stop, timeout_s=10)


def test_nothing_is_left_of_messages_that_have_arrived() -> None:
    def chat(communicator: Communicator, _: Any) -> int:
        other = 1 - communicator.rank
        begin = communicator.isend if communicator.rank else communicator.irecv
        for tag in range(5):
            begin(torch.ones(2), other, tag).wait()
        communicator.barrier()
        assert isinstance(communicator, ThreadCommunicator)
        return len(communicator._group.waiting)

    assert run_on_threads(2, chat) == [0, 0]
