"""What a rank says it sends in a step is what its messages and sums hold."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from benchmarks.whole_engine import whole_engine
from models.registry import build_model
from parallel.build import assemble
from parallel.comm.communicator import Communicator, sum_bytes
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Microbatch
from parallel.graph.layers import RANDOM_STATE
from parallel.graph.partition import partition_equal
from parallel.offload.rng import state_size
from parallel.schedule.action import Kind
from parallel.schedule.registry import SCHEDULES, build_schedule
from parallel.strategy import Strategy
from parallel.trace.trace import trace
from tests.helpers.engine_runs import SGD, build, net, train
from tests.helpers.plain_step import Batch
from tests.helpers.small_nets import batch_of, pixel_loss


def steps() -> list[Batch]:
    return [batch_of([2, 2], 12, n, torch.float32) for n in range(2)]


def test_messages_are_counted_for_one_step() -> None:
    """Two replicas of two stages: as many messages each way, and a sum of all gradients, which both ranks hold."""

    def work(communicator: Communicator, _: int) -> tuple[int, int, int, int]:
        engine = build(communicator, "skips", Strategy("master", 2, 2, 2), steps())
        train(engine, steps()[:1])
        first, messages = engine.sent_in_step, sum(engine.bytes_sent.values())
        train(engine, steps()[1:])
        return first, engine.sent_in_step, messages, sum(g.nbytes for g in engine.gradients().values())

    for first, second, messages, gradients in run_on_threads(2, work, timeout_s=60):
        assert first == second
        assert messages > 0
        # Buckets hold one number more for each parameter: who had a gradient for it.
        assert 0 < first - messages - sum_bytes(gradients, 2) < 4 * 40


def test_data_parallel_ranks_send_gradients() -> None:
    def work(communicator: Communicator, _: int) -> tuple[int, int]:
        model = net("skips", torch.float32)
        engine = whole_engine(model, pixel_loss, SGD, communicator, batch=4, m=2)
        train(engine, steps()[:1])
        return engine.sent_in_step, sum(p.nbytes for p in model.parameters())

    for sent, size in run_on_threads(2, work, timeout_s=60):
        assert 0 <= sent - size < 4 * 40  # a number for each parameter comes with it


@pytest.mark.parametrize("model", ["unet_w4", "unet(2,8)"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_value_goes_straight_to_the_stages_that_use_it(name: str, model: str) -> None:
    """U-Nets have long skips; a state of the random generator goes along with dropout, forward only."""
    depth, m, px = 3, 2 if name == "mast" else 4, 64
    strategy, shape = Strategy(name, depth, depth, m, chunks=2 if SCHEDULES[name].chunks else 1), (1, 3, px, px)

    def built() -> torch.nn.Module:
        torch.manual_seed(0)
        return build_model(model, classes=2)

    def work(communicator: Communicator, _: None) -> dict[int, int]:
        engine = assemble(
            built(), F.cross_entropy, SGD, communicator, strategy, shape=shape, batch=m, device=torch.device("cpu")
        )
        targets = torch.zeros(1, px, px, dtype=torch.int64)
        engine.step([Microbatch(torch.randn(shape), targets, shape) for _ in engine.share], 0, 0.0)
        return dict(engine.bytes_sent)

    partition = partition_equal(trace(built(), shape).graph, strategy.mesh.stages)
    assert any(edge.target > edge.source + 1 for edge in partition.edges)

    def size_of(value: str) -> int:
        return state_size(torch.device("cpu")) if value == RANDOM_STATE else partition.graph.by_name[value].output_bytes

    expected: Counter[tuple[int, int]] = Counter()
    actions = (action for own in build_schedule(name, strategy.mesh, m).values() for action in own)
    begun = [action.replica for action in actions if action.kind is Kind.FORWARD and action.stage == 0]
    for replica, edge in itertools.product(begun, partition.edges):
        source, target = (strategy.mesh.team_at(stage, replica) for stage in (edge.source, edge.target))
        if source != target:
            expected[source, target] += size_of(edge.value)
            expected[target, source] += size_of(edge.value) * edge.differentiable
    sent = run_on_threads(depth, work, timeout_s=60)
    assert +Counter({(a, b): size for a, own in enumerate(sent) for b, size in own.items()}) == +expected
