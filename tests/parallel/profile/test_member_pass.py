"""The pass that exchanges are timed with is a team's, and as many of its exchanges are counted as it has."""

from __future__ import annotations

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.profile.link_worker import MEMBER_LAYERS, MemberPass


def test_a_pass_counts_its_exchanges() -> None:
    def passes(communicator: Communicator, _: None) -> list[int]:
        member = MemberPass(communicator)
        member.alone()
        return [member.in_team(), member.in_team()]

    # Moments and their gradients at each norm, the pool's sum and its gradient, halos of each convolution and their
    # gradients, except those of the tile.
    assert run_on_threads(2, passes, [None, None]) == [[4 * MEMBER_LAYERS + 1] * 2] * 2
