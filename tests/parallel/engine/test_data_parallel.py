"""Every number of ranks under ddp gives the plain step: microbatches as uneven as can be, buckets of any size."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import LocalCommunicator
from parallel.strategy import Strategy
from tests.helpers.engine_runs import assert_equal, plain_of, run
from tests.helpers.plain_step import Batch
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import ALL_NETS, SkipNet, batch_of, pixel_loss

CASES = {
    f"{name}, {str(dtype)[6:]}, buckets of {size}": (name, dtype, size)
    for name, dtype, size in (
        *((name, dtype, None) for name in ("skips", "averaging") for dtype in (torch.float64, torch.float32)),
        ("skips", torch.float64, 0),
        ("skips", torch.float64, 1 << 10),
    )
}


def steps_of(dtype: torch.dtype) -> list[Batch]:
    sizes = [3, 2, 2], [1, 5, 1], [1, 5, 1]
    return [batch_of(each, 12 + 4 * (step % 2), 100 + step, dtype) for step, each in enumerate(sizes)]


def all_cases(communicator: Communicator, _: Any) -> dict[str, Any]:
    """Every case in one start of the ranks, because importing torch is what a start costs."""
    ALL_NETS["averaging"] = functools.partial(SkipNet, None), pixel_loss
    name = "ddp" if communicator.world > 1 else "single"
    return {
        case: run(communicator, net, Strategy(name, communicator.world, 1, 3, gradient_bytes=size), steps_of(dtype))
        for case, (net, dtype, size) in CASES.items()
    }


@pytest.fixture(scope="module", params=[1, *(pytest.param(n, marks=pytest.mark.process) for n in (2, 3))])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if request.param == 1:
        return [all_cases(LocalCommunicator(), None)]
    return run_on_ranks(request.param, f"{__name__}:all_cases", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_the_plain_step(case: str, ranks: list[dict[str, Any]]) -> None:
    net, dtype, _ = CASES[case]
    ALL_NETS["averaging"] = functools.partial(SkipNet, None), pixel_loss
    found = [rank[case] for rank in ranks]
    assert_equal(found, plain_of(net, steps_of(dtype)), dtype)
    assert all(torch.equal(found[0]["predicted"], rank["predicted"]) for rank in found), "parameters are the same bits"
