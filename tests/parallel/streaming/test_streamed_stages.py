"""Stages in boxes, under schedules: the loss, gradients and running statistics of the plain step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.training.exactness import CroppedImages
from benchmarks.in_boxes import planned_regions
from benchmarks.whole_engine import whole_engine
from models.losses import PixelClassLoss
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.strategy import Strategy
from parallel.streaming.read_region import NothingInBoxes
from parallel.team.boxed_nodes import PlannedRegion
from parallel.trace.stage_module import StageModule
from tests.helpers.tiny_models import classifier

SHAPE, M = (1, 3, 40, 56), 4
CPU = torch.device("cpu")


class Gated(nn.Module):
    """A segmenter whose gate, pooled map and image pass between stages, as do skips."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1), nn.Sigmoid())
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 6, 2, 2)
        self.head = nn.Sequential(nn.BatchNorm2d(15), nn.Conv2d(15, classes, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        y = self.down(skip)
        gate = self.squeeze(y)
        y = self.middle(y) * gate
        logits: Tensor = self.head(torch.cat((skip, self.up(y), x), 1))
        return logits


def gated() -> nn.Module:
    torch.manual_seed(0)
    return Gated().double()


def tile(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    images = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 3, (1, *SHAPE[2:]), generator=generator, dtype=torch.uint8)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def strategy_of(name: str, ranks: int, box: int = 16, **more: Any) -> Strategy:
    chunks = 2 if name == "interleaved" else 1
    return Strategy(name, ranks, 2, M, chunks, policy=ActivationPolicy(stream=box, **more.pop("policy", {})), **more)


Result = tuple[float, dict[str, Tensor], dict[str, Tensor], list[Tensor]]


def steps(engine: Any, made: Callable[[Tensor], Any]) -> Result:
    """Loss of the second step, gradients of the first, then the state, and what is predicted with it.

    Args:
        made: of images and targets, what the engine is given.
    """
    gradients: dict[str, Tensor] = {}
    for number in range(2):
        given = [Microbatch(*map(made, tile(M * number + i)), SHAPE) for i in engine.share]
        loss = engine.step(given, number, 0.1).loss
        gradients = gradients or {name: gradient.clone() for name, gradient in engine.gradients().items()}
    loss_of = PixelClassLoss()
    held_out = Microbatch(*map(made, tile(9)), SHAPE)
    sums = [engine.predict(held_out, wanted) for wanted in (None, loss_of.sums)]
    return loss, gradients, engine.state_dict().get("model", {}), [value for value in sums if value is not None]


def rank_steps(communicator: Communicator, given: tuple[Strategy, dict[str, Tensor]]) -> Result:
    strategy, state = given
    module = gated()
    module.load_state_dict(state)
    engine = engine_of(module, communicator, strategy)
    result = steps(engine, CroppedImages)
    last = engine._work.stages.get(engine.mesh.stages - 1)
    if last is not None:
        assert any(getattr(plan, "sums", False) for plan in planned_regions(last.module, SHAPE))
    return result


def engine_of(module: nn.Module, communicator: Communicator, strategy: Strategy, shape: Any = SHAPE) -> Engine:
    return assemble(module, PixelClassLoss(), sgd, communicator, strategy, shape=shape, batch=M, device=CPU)


@pytest.fixture(scope="module")
def plain() -> Result:
    module = gated()
    engine = whole_engine(module, PixelClassLoss(), sgd, LocalCommunicator(), batch=M, m=M, shape=SHAPE)
    return steps(engine, lambda tensor: tensor)


@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        ("1f1b", 2, {"cuts": ("squeeze.1",)}),
        pytest.param("1f1b", 2, {"cuts": ("mul",)}, marks=pytest.mark.long),
        pytest.param("gpipe", 4, {"cuts": ("middle",)}, marks=pytest.mark.long),
        ("master", 2, {"shard_optimizer": True}),
        ("bidirectional", 2, {}),
        pytest.param("interleaved", 2, {}, marks=pytest.mark.long),
    ],
    ids=["gate from a pooled map", "gate and map", "two groups", "master", "bidirectional", "interleaved"],
)
def test_stages_give_the_plain_step(name: str, ranks: int, more: dict[str, Any], plain: Result) -> None:
    results = run_on_threads(ranks, rank_steps, (strategy_of(name, ranks, **more), gated().state_dict()))
    loss, gradients, state, predicted = plain
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    found: dict[str, Tensor] = {}
    for ours in results:
        assert ours[0] == pytest.approx(loss, rel=1e-10)
        for key, gradient in ours[1].items():
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-10, atol=1e-10 * largest)
        found |= ours[1]
    assert found.keys() == gradients.keys()
    torch.testing.assert_close(results[0][2], state, rtol=1e-9, atol=1e-11)
    given = [ours[3] for ours in results if ours[3]]
    assert given
    for output, sums in given:
        torch.testing.assert_close(output, predicted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums, predicted[1], rtol=1e-6, atol=1e-5)


def alone(*cuts: str) -> Strategy:
    """Two stages on one rank."""
    return Strategy("interleaved", 1, 1, M, 2, cuts, policy=ActivationPolicy(stream=16))


def stages_of(module: nn.Module, strategy: Strategy) -> list[StageModule]:
    engine = engine_of(module, LocalCommunicator(), strategy)
    return [stage.module for _, stage in sorted(engine._work.stages.items())]


def test_a_stage_without_anything_for_boxes_is_computed_whole() -> None:
    first, last = (planned_regions(stage, SHAPE) for stage in stages_of(classifier(3).double(), alone("7")))
    assert isinstance(first[0], PlannedRegion)
    assert isinstance(last[0], NothingInBoxes)


def test_no_stage_at_all_is_an_error() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 40 * 56, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match=r"finds nothing to compute box by box: .*Leave --stream out"):
        engine_of(net, LocalCommunicator(), alone())


def test_split_backward_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot split it as zero-bubble does"):
        engine_of(gated(), LocalCommunicator(), Strategy("zero-bubble", 1, 1, M, policy=ActivationPolicy(stream=16)))


def test_boxes_are_those_of_the_tile_in_stages_of_smaller_maps() -> None:
    """A box of 16 px of the tile is one of 8 px of maps half as large."""
    plans = [planned_regions(stage, SHAPE)[0] for stage in stages_of(gated(), alone("middle"))]
    for plan in plans:
        assert isinstance(plan, PlannedRegion)
        assert plan.run.boxes.model.side == SHAPE[2:]
        assert len(plan.run.phases[0].parts[0].places) == 3 * 4


def test_maps_of_all_microbatches_in_flight_share_the_budget_of_the_host() -> None:
    (stage,) = stages_of(gated(), Strategy("gpipe", 1, 1, M, policy=ActivationPolicy(stream=16, host_bytes=1000 * M)))
    assert stage._run_training.nodes._boxed.stored_bytes == 1000  # type: ignore[union-attr]
