"""A step's microbatches, the ranks that sum its gradients, what it sends, its timeline, and its optimizer step."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from parallel.build import assemble
from parallel.comm.communicator import Communicator, sum_bytes
from parallel.comm.sharded_reducer import ShardedReducer
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.engine.optimizer_step import OptimizerStep
from parallel.engine.rank_program import StageGroups
from parallel.engine.recorded import gather_timeline, measured_costs
from parallel.engine.step import Microbatch, StepBatches
from parallel.graph.layers import RANDOM_STATE
from parallel.graph.partition import partition_equal
from parallel.offload.rng import get_random_state
from parallel.schedule.action import Action, Kind
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import lower
from parallel.schedule.registry import SCHEDULES, build_schedule
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import LinkCost, Span, StageCost
from parallel.strategy import Strategy
from parallel.trace.stage_module import as_tensor
from parallel.trace.trace import trace
from tests.helpers.engine_runs import build, net, train
from tests.helpers.plain_step import Batch
from tests.helpers.small_nets import batch_of
from tests.helpers.watched_comm import WatchedCommunicator


class Source:
    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[Microbatch]:
        while True:
            self.drawn += 1
            yield self._microbatch()  # not held by a variable here

    def _microbatch(self) -> Microbatch:
        shape = (self.drawn, 3, 4, 4)
        return Microbatch(torch.full(shape, float(self.drawn)), torch.tensor([self.drawn]), shape)


def test_microbatches_are_drawn_as_far_as_is_asked_for_and_handed_out_in_any_order() -> None:
    source = Source()
    feed = StepBatches(source, range(3, 6))
    assert source.drawn == 0
    assert feed.shape(4) == (2, 3, 4, 4)
    assert source.drawn == 2
    assert feed.shape(5) == (3, 3, 4, 4)
    assert [feed.images(i).unique().tolist() for i in (5, 3, 4)] == [[3.0], [1.0], [2.0]]
    assert [feed.targets(i).item() for i in (4, 5, 3)] == [2, 3, 1]
    assert source.drawn == 3


def test_images_that_were_handed_out_are_not_held() -> None:
    feed = StepBatches(Source(), range(2))
    feed.shape(0)
    reference = weakref.ref(feed.images(0))
    gc.collect()
    assert reference() is None
    assert feed.shape(0) == (1, 3, 4, 4), "messages of later stages still ask for it"


def test_images_of_another_shape_than_announced_are_refused() -> None:
    feed = StepBatches([Microbatch(torch.zeros(2, 3, 4, 8), None, (2, 3, 8, 4))], range(1))
    feed.shape(0)
    with pytest.raises(
        ValueError, match=r"microbatch 0 was announced as \(2, 3, 8, 4\) and holds images \(2, 3, 4, 8\)"
    ):
        feed.images(0)


def test_too_few_microbatches_and_targets_of_several_parts_are_refused() -> None:
    targets: Any = torch.zeros(1), torch.zeros(1)
    feed = StepBatches([Microbatch(None, targets, (1, 3, 4, 4))], range(2))
    feed.shape(0)
    with pytest.raises(ValueError, match="one tensor each, got a tuple: join its parts"):
        as_tensor(feed.targets(0))
    with pytest.raises(ValueError, match=r"microbatch 1 is missing: .* engine\.share"):
        feed.shape(1)


def test_the_same_ranks_share_one_communicator() -> None:
    """Each subgroup costs a communicator of the backend, and all ranks take part in making it."""

    def rank(communicator: Communicator, _: Any) -> tuple[int, int]:
        asked: list[str] = []
        counting: Any = WatchedCommunicator(communicator, lambda name, *_: asked.append(name))
        holders = StageGroups(counting, Mesh(1, (0, 1, 2, 3), 2))
        return asked.count("subgroup"), len({id(each) for each in holders.of_stage.values()})

    assert run_on_threads(4, rank, timeout_s=20) == [(2, 1)] * 4


COSTS = [StageCost(1.0, 2.0, 1.25, 0.75, 0), StageCost(3.0, 4.0, 2.5, 1.5, 0), StageCost(0.5, 1.0, 0.5, 0.5, 0)]
LINKS = {(0, 1): True, (1, 2): True, (0, 2): True}


def test_every_rank_s_spans_come_together_from_the_first_action_on() -> None:
    def tell(communicator: Communicator, _: Any) -> Any:
        begun = 100.0 + communicator.rank
        spans = [Span(Action(Kind.FORWARD, communicator.rank, 0), begun, begun + 0.5)]
        return gather_timeline(communicator, spans)

    first, *others = run_on_threads(3, tell, timeout_s=30)
    assert others == [None, None]
    assert [first.spans[rank][0].start_s for rank in range(3)] == [0.0, 1.0, 2.0]
    assert str(first.spans[2][0].action) == "2F0"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "master"])
def test_the_costs_of_a_step_simulate_to_the_same_step(name: str) -> None:
    mesh = Mesh(1, (0, 1, 2), 2 if name == "master" else 1)
    schedule = lower(build_schedule(name, mesh, 5), mesh, LINKS)
    step = simulate(schedule, mesh, COSTS, dict.fromkeys(LINKS, LinkCost(0.0, 0.0)))
    again = simulate(schedule, mesh, measured_costs(step, 3))
    assert again.makespan_s == pytest.approx(step.makespan_s)


SGD = functools.partial(torch.optim.SGD, lr=99.0)
"""With a rate that every step replaces."""


def parameter(value: float, gradient: float | None = None) -> nn.Parameter:
    made = nn.Parameter(torch.tensor([value]))
    made.grad = None if gradient is None else torch.tensor([gradient])
    return made


def test_a_step_uses_the_learning_rate_it_is_given() -> None:
    weight = parameter(1.0, 2.0)
    update = OptimizerStep(SGD, owned={"weight": weight}, unshared=[], held={"weight": weight})
    update.apply(0.25, scale=1)
    assert weight.item() == 0.5
    update.apply(0.125, scale=1)
    assert weight.item() == 0.25


def test_all_gradients_held_are_scaled_also_those_another_rank_updates() -> None:
    own, other, without = parameter(1.0, 2.0), parameter(1.0, 4.0), parameter(1.0)
    owned = {"own": own, "without": without}
    update = OptimizerStep(SGD, owned=owned, unshared=[], held={**owned, "other": other})
    update.apply(0.5, scale=0.5)
    assert (own.grad, other.grad, without.grad) == (torch.tensor([1.0]), torch.tensor([2.0]), None)
    assert [own.item(), other.item(), without.item()] == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("trained", [True, False])
def test_parameters_frozen_or_unfrozen_after_assembly_are_refused_by_name(trained: bool) -> None:
    weight = parameter(1.0).requires_grad_(trained)
    update = OptimizerStep(SGD, owned={"weight": weight}, unshared=[], held={"weight": weight})
    update.begin_step()
    weight.requires_grad_(not trained)
    with pytest.raises(ValueError, match=f"requires_grad of weight is {not trained}.*: assemble the engine again"):
        update.begin_step()


def grouped(pairs: Any, *options: dict[str, float]) -> torch.optim.Optimizer:
    return SGD([{"params": [pair], **own} for pair, own in zip(pairs, options, strict=True)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda pairs: SGD([each for _, each in pairs]), "lacks or renames 2 of the 2 parameters .* such as first"),
        (lambda pairs: SGD(pairs[:1]), "lacks or renames 1 of the 2 parameters .* such as second"),
        (lambda pairs: grouped(pairs, {"lr": 1e-5}, {"lr": 1e-3}), "learning rate 1e-05, .*'lr_scale'"),
    ],
    ids=["without names", "left out", "rates"],
)
def test_an_optimizer_is_over_all_named_parameters_and_scales_one_rate(make: Any, message: str) -> None:
    held = {"first": parameter(1.0), "second": parameter(1.0)}
    OptimizerStep(lambda pairs: grouped(pairs, {"lr": 1e-5, "lr_scale": 0.01}, {}), owned=held, unshared=[], held=held)
    with pytest.raises(ValueError, match=message):
        OptimizerStep(make, owned=held, unshared=[], held=held)


def refused(loss: Any, strategy: Strategy, autocast: torch.dtype | None = None) -> None:
    form: Any = {"shape": (1, 3, 8, 8), "batch": 1, "device": torch.device("cpu"), "autocast": autocast}
    assemble(nn.Conv2d(3, 2, 1), loss, SGD, LocalCommunicator(), strategy, **form)


def test_what_no_engine_trains_is_refused_by_name() -> None:
    single = Strategy("single", 1, 1, 1)
    with pytest.raises(ValueError, match="trained parameter, weight, which no engine updates"):
        refused(nn.Conv2d(2, 1, 1), single)
    with pytest.raises(ValueError, match=r"autocast=torch\.float16 needs a scaled loss"):
        refused(nn.MSELoss(), single, torch.float16)
    with pytest.raises(ValueError, match=r"use parallel\.engine\.fully_sharded\.FullyShardedEngine"):
        refused(nn.MSELoss(), Strategy("fsdp", 1, 1, 1))
    with pytest.raises(ValueError, match="give it pushes=PushRule"):
        refused(nn.MSELoss(), Strategy("async", 1, 1, 1))


def test_an_optimizer_that_may_need_whole_parameters_is_refused() -> None:
    class Lars(torch.optim.SGD):
        """Scales the gradient of each parameter by the norms of both."""

    def rank(communicator: Communicator, _: None) -> None:
        weight = nn.Parameter(torch.ones(4))
        shard = ShardedReducer([weight], communicator, overlap=False)
        (piece,) = shard.pieces
        pieces = {"weight": piece}
        OptimizerStep(
            functools.partial(Lars, lr=0.1),
            owned={name: piece.value for name, piece in pieces.items()},
            unshared=[],
            held={"weight": weight},
            pieces=pieces,
            shards=[shard],
        )

    with pytest.raises(ValueError, match="Lars may need whole ones: use one of SGD, Adam, AdamW, RMSprop, or --zero 0"):
        run_on_threads(2, rank, None)


def steps() -> list[Batch]:
    return [batch_of([2, 2], 12, n, torch.float32) for n in range(2)]


@pytest.mark.parametrize("strategy", [Strategy("master", 2, 2, 2), Strategy("ddp", 2, 1, 2)], ids=str)
def test_messages_and_sums_are_counted_for_one_step(strategy: Strategy) -> None:
    """Two replicas of two stages have as many messages each way; both, as ddp, have a sum of all gradients."""

    def work(communicator: Communicator, _: int) -> tuple[int, int, int, int]:
        engine = build(communicator, "skips", strategy, steps())
        train(engine, steps()[:1])
        first, messages = engine.sent_in_step, sum(engine._work.messenger.bytes_sent.values())
        train(engine, steps()[1:])
        return first, engine.sent_in_step, messages, sum(g.nbytes for g in engine.gradients().values())

    for first, second, messages, gradients in run_on_threads(2, work, timeout_s=60):
        assert first == second
        assert (messages > 0) == (strategy.depth == 2)
        # Buckets hold one number more for each parameter: who had a gradient for it.
        assert 0 < first - messages - sum_bytes(gradients, 2) < 4 * 40


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_value_goes_straight_to_the_stages_that_use_it(name: str) -> None:
    """The net has long skips; a state of the random generator goes along with dropout, forward only."""
    depth, m = 3, 2 if name == "mast" else 4
    strategy = Strategy(name, depth, depth, m, chunks=2 if SCHEDULES[name].chunks else 1)
    batch = batch_of([1] * m, 12, 0, torch.float32)

    def work(communicator: Communicator, _: None) -> dict[int, int]:
        engine = build(communicator, "skips", strategy, [batch])
        train(engine, [batch])
        return dict(engine._work.messenger.bytes_sent)

    partition = partition_equal(trace(net("skips", torch.float32), (1, 3, 12, 12)).graph, strategy.mesh.stages)
    assert any(edge.target > edge.source + 1 for edge in partition.edges)
    assert any(edge.value == RANDOM_STATE for edge in partition.edges)
    state = get_random_state(torch.device("cpu"))

    def size_of(value: str) -> int:
        return state.numel() if value == RANDOM_STATE else partition.graph.by_name[value].output_bytes

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
