"""What a rank says it sends in a step is what its messages and sums hold."""

from __future__ import annotations

import torch

from benchmarks.whole_engine import whole_engine
from parallel.comm.communicator import Communicator, sum_bytes
from parallel.comm.thread_comm import run_on_threads
from parallel.strategy import Strategy
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
