"""Steps do not wait for their device once per norm, box, layer or microbatch: the host would queue nothing meanwhile;
an action's seconds are those between its events, and a rank's leave out its wait for others.

Simulated GPUs count kernels and waits.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.whole_engine import whole_engine
from parallel.comm.communicator import Communicator
from parallel.comm.grad_reducer import GradReducer
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.engine import step
from parallel.engine.step import Microbatch, StepResult
from parallel.memory.policy import ActivationPolicy
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy
from tests.helpers.engine_runs import SGD, build, steps_of, train
from tests.helpers.sim_gpu import simulated
from tests.helpers.sim_gpu.ranks import run_ranks
from tests.helpers.small_nets import Made, batch_of
from tests.helpers.streaming import in_boxes

CUDA = torch.device("cuda", 0)


def test_losses_are_read_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Tensor] = []
    cpu: Callable[[Tensor], Tensor] = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: copies.append(tensor) or cpu(tensor))
    table = step.read_losses({i: (torch.tensor(0.1 * i), i) for i in (3, 0, 2)}, 5)
    assert len(copies) == 1
    assert table.dtype == torch.float64
    expected = [float(torch.tensor(0.1 * i)) for i in range(4)]
    assert table.tolist() == [[0, 0, expected[2], expected[3], 0], [0, 0, 2, 3, 0]]


def test_hooks_of_gradients_start_nothing_on_the_device() -> None:
    """Which parameters a rank has gradients for is counted once a step, with one operation on all of a bucket."""
    launches = []
    for reduced in (False, True):
        with simulated() as gpus:
            layer, images = nn.Linear(3, 3).to(CUDA), torch.ones(2, 3, device=CUDA)
            if reduced:
                reducer = GradReducer(layer.parameters(), LocalCommunicator(), overlap=False)
                reducer.begin_step()
            for parameter in layer.parameters():
                parameter.grad = parameter.grad if reduced else torch.zeros_like(parameter)
            before = gpus.process.launches
            layer(images).sum().backward()
            launches.append(gpus.process.launches - before)
    assert launches[0] == launches[1] > 3


def by_file(waits: Counter[str]) -> Counter[str]:
    """Return how often the host waited in each file."""
    files: Counter[str] = Counter()
    for place, number in waits.items():
        files[re.findall(r"(\w+\.py):", place)[-1]] += number
    return files


WAITING = {
    "ddp": Strategy("ddp", 2, 1, 2),
    "master": Strategy("master", 2, 2, 2),
    "spatial": Strategy("spatial", 2, 1, 2, grid=TeamGrid(2, 1)),
    "streaming": Strategy("single", 1, 1, 2, policy=ActivationPolicy(stream=8)),
    "deferred statistics": Strategy("1f1b", 4, 2, 2, statistics="deferred"),
    "zero-bubble": Strategy("zero-bubble", 2, 2, 2),
}


@pytest.mark.parametrize("name", WAITING)
def test_waits_of_a_step_do_not_grow_with_its_microbatches(name: str) -> None:
    """Each rank waits for the losses of a step, for which parameters had no gradient, and for its own seconds."""
    waits = []
    for m in (2, 4):
        strategy = dataclasses.replace(WAITING[name], m=m)
        steps = steps_of(m, torch.float32)
        with simulated(strategy.ranks) as gpus:

            def second_step(communicator: Communicator) -> Counter[str]:
                device = torch.device("cuda", communicator.rank)
                engine = build(communicator, "skips", strategy, steps, device)  # noqa: B023
                train(engine, steps[:1], device=device)  # noqa: B023
                before = Counter(gpus.process.hazards.syncs)
                train(engine, steps[1:], 1, device)  # noqa: B023
                return by_file(gpus.process.hazards.syncs - before)

            waits.append(sum(run_ranks(gpus, strategy.ranks, second_step), Counter()))
        del waits[-1]["test_host_waits.py"]  # tiles that ``train`` copies
    assert waits[0] == waits[1]
    assert waits[0].keys() <= {"step.py", "engine.py", "recorded.py", "grad_reducer.py"}
    assert 0 < sum(waits[0].values()) <= 3 * strategy.ranks


OPERATIONS = {
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "corners": nn.Upsample(size=(29, 31), mode="bilinear", align_corners=True),
    "nearest": nn.Upsample(scale_factor=1.7, mode="nearest"),
    "average pool": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "reflection": nn.ReflectionPad2d(3),
    "replication": nn.Conv2d(4, 4, 5, padding=2, padding_mode="replicate"),
    "batch norm": nn.BatchNorm2d(4),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_boxes_of_an_operation_wait_for_nothing(name: str) -> None:
    with simulated() as gpus:
        module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), OPERATIONS[name], nn.Conv2d(4, 3, 2)).to(CUDA)
        images = torch.randn(1, 2, 23, 19).to(CUDA).requires_grad_()
        run = in_boxes(module, 8, CUDA)
        run(module, images)  # constants go to a device once
        before = Counter(gpus.process.hazards.syncs), gpus.process.launches
        run(module, images)[0].sum().backward()
        assert gpus.process.launches - before[1] > 20
        assert gpus.process.hazards.syncs - before[0] == Counter()


def test_spans_come_from_events_that_only_who_asks_waits_for() -> None:
    steps = [batch_of([2, 2, 2], 12, 1, torch.float32)] * 2
    with simulated() as gpus:
        engine = build(LocalCommunicator(), "skips", Strategy("1f1b", 1, 1, 3), steps, CUDA)
        train(engine, steps, device=CUDA)
        before = gpus.process.hazards.syncs.total()
        spans = engine.spans()
        assert gpus.process.hazards.syncs.total() > before
    assert [str(span.action) for span in spans] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    assert all(span.duration_s > 0 for span in spans)
    assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(spans))
    assert spans[-1].end_s == pytest.approx(time.perf_counter(), abs=0.5), "in the host's seconds"


def test_own_seconds_come_from_events() -> None:
    """Each microbatch begins and ends with an event, a simulated ms apart; the wait for the sums begins with the last
    one's end."""
    batch = batch_of([2, 2], 12, 1, torch.float32)

    def step(communicator: Communicator) -> StepResult:
        device = torch.device("cuda", communicator.rank)
        engine = build(communicator, "skips", Strategy("ddp", 2, 1, 2), [batch], device)
        (i,) = engine.share
        images, targets = (tensor.to(device) for tensor in batch[i])
        return engine.step([Microbatch(images, targets, tuple(images.shape))], 0, 0.1)

    with simulated(2) as gpus:
        results = run_ranks(gpus, 2, step)
    for rank, result in enumerate(results):
        assert [i for i, _ in result.seconds] == [rank]
        assert result.seconds[0][1] >= 3e-3, "forward and backward, an event before and after each"
        assert result.waited_s >= 1e-3


LATE_S = 0.2


def asleep(m: Any, x: Tensor) -> Tensor:
    output: Tensor = m.layer(x.mean(dim=(2, 3)))
    output.register_hook(lambda _: time.sleep(m.seconds))
    return output


def step_beside_a_late_rank(communicator: Communicator, _: Any) -> dict[str, Any]:
    """The second of two steps, of four microbatches; the last rank takes ``LATE_S`` for each of its own."""
    torch.manual_seed(0)
    model = Made(asleep, layer=nn.Linear(3, 2), seconds=LATE_S * (communicator.rank == communicator.world - 1))
    engine = whole_engine(model, F.cross_entropy, SGD, communicator, batch=4, m=4, shape=(1, 3, 4, 4))
    for number in range(2):
        one = Microbatch(torch.zeros(1, 3, 4, 4), torch.zeros(1, dtype=torch.int64), (1, 3, 4, 4))
        result = engine.step((one for _ in engine.share), number, 0.1)
    return {"seconds": result.seconds, "waited_s": result.waited_s}


def test_own_seconds_leave_out_the_wait_for_others() -> None:
    early, late = run_on_threads(2, step_beside_a_late_rank)
    assert [i for i, _ in early["seconds"]] == [0, 1]
    assert [i for i, _ in late["seconds"]] == [2, 3]
    assert all(seconds >= LATE_S for _, seconds in late["seconds"])
    assert early["waited_s"] > LATE_S, "the late rank is still at its second microbatch"
    assert sum(seconds for _, seconds in early["seconds"]) < early["waited_s"]
    assert late["waited_s"] < LATE_S
    assert run_on_threads(1, step_beside_a_late_rank) == [{"seconds": (), "waited_s": None}]
