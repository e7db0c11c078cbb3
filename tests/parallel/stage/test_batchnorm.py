"""Running statistics equal those of a plain loop, or of the whole batch, whoever computes which microbatch when."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.stage.batchnorm import DeferredStatistics, RunningStatistics, running_statistics
from tests.helpers.sim_gpu import simulated
from tests.helpers.sim_gpu.ranks import run_ranks

SIZES = (3, 1, 4, 2)
M = len(SIZES)


class Net(nn.Module):
    def __init__(self, momentum: float | None, instance: bool) -> None:
        super().__init__()
        self.twice = nn.BatchNorm2d(2, momentum=momentum)
        self.second = nn.InstanceNorm2d(2, 0.1, momentum, track_running_stats=True) if instance else nn.Identity()
        self.frozen = nn.BatchNorm2d(2, momentum=momentum)
        self.untracked = nn.BatchNorm2d(2, track_running_stats=False)
        self.last = nn.BatchNorm2d(2, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x * 3 + 1).exp())
        return self.last(self.frozen(self.untracked(self.second(x))).square())


def net(momentum: float | None, instance: bool = False) -> Net:
    module = Net(momentum, instance).double()
    module.frozen.eval()
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.add_(0.25)
    return module


def batches(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [100 + torch.randn(n, 2, 3, 3, generator=generator, dtype=torch.float64) for n in SIZES]


def walk(module: nn.Module, statistics: RunningStatistics, order: Sequence[int], share: Sequence[int]) -> None:
    """Two steps, each forward recomputed; the backward passes come last, so that buffers change before them."""
    for step in range(2):
        parts = batches(step)
        statistics.begin_step(M)
        outputs = []
        for i in (i for i in order if i in share):
            with statistics.microbatch(i):
                output = module(parts[i].requires_grad_())
            with statistics.frozen():
                assert torch.equal(module(parts[i]), output)
            outputs.append(output)
        for output in outputs:
            output.sum().backward()
        statistics.end_step()


def run(module: nn.Module, mode: Any, order: Sequence[int], world: int) -> list[nn.Module]:
    def rank(communicator: Communicator, _: None) -> nn.Module:
        own = copy.deepcopy(module)
        walk(own, running_statistics(own, communicator, mode), order, range(communicator.rank, M, world))
        return own

    return run_on_threads(world, rank)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("kind", ["batch norms", "instance norms too", "deferred"])
def test_statistics_are_those_of_the_plain_loop_or_of_the_whole_batch(
    world: int, order: tuple[int, ...], momentum: float | None, kind: str
) -> None:
    deferred = kind == "deferred"
    plain = nn.BatchNorm2d(2, momentum=momentum).double() if deferred else net(momentum, kind == "instance norms too")
    found = run(plain, "deferred" if deferred else "per-microbatch", order, world)
    for step in range(2):
        for part in [torch.cat(batches(step))] if deferred else batches(step):
            plain(part)
    for module in found:
        torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-10, atol=1e-12)
        assert not deferred or module.momentum == momentum


def test_deferred_counts_every_use_of_a_layer() -> None:
    module = net(0.3)
    reference = copy.deepcopy(module)
    seen: list[Tensor] = []
    reference.twice.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0].detach()))
    statistics = DeferredStatistics(module, LocalCommunicator())
    statistics.begin_step(M)
    for i, part in enumerate(batches(0)):
        with statistics.microbatch(i):
            output = module(part)
        assert torch.equal(output, reference(part))
    statistics.end_step()
    values = torch.cat(seen).transpose(0, 1).flatten(1)
    assert torch.allclose(module.twice.running_mean, 0.7 * 0.25 + 0.3 * values.mean(1), rtol=1e-10)
    assert torch.allclose(module.twice.running_var, 0.7 * 1.25 + 0.3 * values.var(1), rtol=1e-10)
    assert module.twice.num_batches_tracked == 1
    assert module.frozen.num_batches_tracked == 0


@pytest.mark.parametrize("mode", ["per-microbatch", "deferred"])
def test_an_error_in_a_pass_leaves_the_layer_as_it_was(mode: Any) -> None:
    module = nn.BatchNorm2d(2)
    before = copy.deepcopy(module.state_dict())
    statistics = running_statistics(module, LocalCommunicator(), mode)
    statistics.begin_step(2)
    both = nn.Sequential(module, nn.Flatten(), nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="shapes"), statistics.microbatch(1):
        both(torch.randn(2, 2, 3, 3))
    assert module.momentum == 0.1
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    others = nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True), nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match="got InstanceNorm2d, SyncBatchNorm"):
        running_statistics(others, LocalCommunicator(), "deferred")


def counted_step(layers: int, momentum: float | None, mode: Any, forward: bool) -> tuple[Counter[str], int]:
    """Return waits and kernels of rank 0 in the second step of two ranks: constants go to a device once."""

    def rank(communicator: Communicator) -> tuple[Counter[str], int]:
        device = torch.device("cuda", communicator.rank)
        own = nn.Sequential(*(nn.BatchNorm2d(2, momentum=momentum) for _ in range(layers))).double().to(device)
        statistics, image = running_statistics(own, communicator, mode), torch.ones(2, 2, 3, 3, dtype=torch.float64)
        tiles = [(image + i).to(device) for i in range(M)]
        for _ in range(2):
            before = Counter(gpus.process.hazards.syncs), gpus.process.launches
            statistics.begin_step(M)
            for i in range(communicator.rank, M, 2):
                with statistics.microbatch(i):
                    if forward:
                        own(tiles[i])
            statistics.end_step()
        return gpus.process.hazards.syncs - before[0], gpus.process.launches - before[1]

    with simulated(2) as gpus:
        waits, launches = run_ranks(gpus, 2, rank)[0]
    return waits, launches


@pytest.mark.parametrize("mode", ["per-microbatch", "deferred"])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_statistics_do_not_wait_for_a_device(mode: Any, momentum: float | None) -> None:
    waits, _ = counted_step(3, momentum, mode, forward=True)
    # torch's own layer reads its number of updates where momentum is None, but for deferred statistics, which set it.
    assert all("_local_scalar_dense" in place and "test_batchnorm.py" in place for place in waits)
    assert not waits or momentum is None
    if mode == "per-microbatch":  # kernels do not grow with the number of layers
        few, many = (counted_step(n, 0.1, mode, forward=False)[1] for n in (2, 20))
        assert few == many <= 30 * M
