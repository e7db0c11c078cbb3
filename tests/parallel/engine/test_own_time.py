"""A rank's own seconds leave out what it waits for others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.whole_engine import whole_engine
from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch
from tests.helpers.engine_runs import SGD
from tests.helpers.ranks import run_on_ranks

LATE_S = 0.2


class Sleeping(nn.Module):
    """Takes ``seconds`` for a backward pass: forward passes of threads draw random numbers in turn."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.mean(dim=(2, 3)))
        output.register_hook(lambda _: time.sleep(self.seconds))
        return output


def step_beside_a_late_rank(communicator: Communicator, _: Any) -> dict[str, Any]:
    """The second of two steps, of four microbatches; the last rank takes ``LATE_S`` for each of its own."""
    torch.manual_seed(0)
    model = Sleeping(LATE_S * (communicator.rank == communicator.world - 1))
    engine = whole_engine(model, F.cross_entropy, SGD, communicator, batch=4, m=4, shape=(1, 3, 4, 4))
    for number in range(2):
        one = Microbatch(torch.zeros(1, 3, 4, 4), torch.zeros(1, dtype=torch.int64), (1, 3, 4, 4))
        result = engine.step((one for _ in engine.share), number, 0.1)
    return {"seconds": result.seconds, "waited_s": result.waited_s}


@pytest.mark.parametrize("launcher", ["threads", pytest.param("forked", marks=pytest.mark.process)])
def test_own_seconds_leave_out_the_wait_for_others(launcher: Any, tmp_path: Path) -> None:
    target = "tests.parallel.engine.test_own_time:step_beside_a_late_rank"
    early, late = run_on_ranks(2, target, tmp_path, launcher=launcher)
    assert [i for i, _ in early["seconds"]] == [0, 1]
    assert [i for i, _ in late["seconds"]] == [2, 3]
    assert all(seconds >= LATE_S for _, seconds in late["seconds"])
    assert early["waited_s"] > LATE_S, "the late rank is still at its second microbatch"
    assert sum(seconds for _, seconds in early["seconds"]) < early["waited_s"]
    assert late["waited_s"] < LATE_S


def test_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    (alone,) = run_on_ranks(
        1, "tests.parallel.engine.test_own_time:step_beside_a_late_rank", tmp_path, launcher="threads"
    )
    assert alone == {"seconds": (), "waited_s": None}
