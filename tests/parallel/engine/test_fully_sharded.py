"""Fully sharded data parallelism gives what the plain step gives, and keeps a share of the model on each rank.

Ranks are processes over Gloo, started once for all checks: importing torch is what a start costs.
"""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from app.training.outcome import MemoryLimit
from benchmarks.out_of_core.problem import BATCH, planner
from benchmarks.whole_engine import whole_engine
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.engine.fully_sharded import FullyShardedEngine
from parallel.engine.sharding_units import recomputed_modules, sharding_units
from parallel.engine.step import Microbatch, NonFiniteLoss
from parallel.memory.policy import Recompute
from parallel.offload.live_bytes import LiveBytes
from parallel.plan.candidates import MemoryOptions
from parallel.stage.stage import Loss
from tests.helpers.engine_runs import assert_same_state
from tests.helpers.plain_step import TOLERANCE, Batch, largest_error, plain_run
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import Made, SkipNet, TwoOutputs, batch_of, pixel_loss, two_losses

pytestmark = pytest.mark.process

RANKS, PX, SEED, LR = 2, 8, 3, 0.05
DEVICE = torch.device("cpu")
SHAPE = (1, 3, PX, PX)


class Recurring(nn.Module):
    """Units called twice: one whose first call sees the images, and one of several modules, of which one is called
    again. Two blocks share a weight, so that neither is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.Tanh()))
        self.blocks = nn.ModuleList(
            nn.Sequential(self._narrow(3, 6), nn.BatchNorm2d(6), nn.Dropout(0.2), self._narrow(6, 3)) for _ in range(3)
        )
        self.blocks[2][3].weight = self.blocks[0][3].weight
        self.small = nn.Sequential(*(nn.Sequential(nn.BatchNorm2d(3), nn.Tanh()) for _ in range(4)))
        self.head = nn.Conv2d(3, 3, 9, padding=4)
        names = {module: name for name, module in self.named_modules()}
        units = [[names[member] for member in unit] for unit in sharding_units(self)]
        assert units == [["stem.0"], ["blocks.1"], ["small.0", "small.1", "small.2"]]

    @staticmethod
    def _narrow(inputs: int, outputs: int) -> nn.Conv2d:
        return nn.Conv2d(inputs, outputs, 1, bias=False)  # before a norm it would have no gradient but rounding

    def forward(self, images: Tensor) -> Tensor:
        values = self.stem(self.stem(images))
        for block in (*self.blocks, self.blocks[1]):
            values = values + block(values)
        logits: Tensor = self.head(self.small[1](self.small(values)))
        return logits


class Residual(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        first, last = nn.Conv2d(3, hidden, 3, padding=1, bias=False), nn.Conv2d(hidden, 3, 1)
        self.layers = nn.Sequential(first, nn.BatchNorm2d(hidden), nn.ReLU(inplace=True), nn.Dropout(0.3), last)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = values + random.uniform(0.5, 1) * self.layers(values)
        return out


class Residuals(nn.Module):
    """Blocks that are recomputed, of which the first is no unit, and a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = Residual(1), nn.Sequential(Residual(16), Residual(16))
        self.head = nn.Conv2d(3, 3, 19, padding=9)
        units = sharding_units(self)
        assert units == [[self.body[0]], [self.body[1]]]
        assert recomputed_modules(self, units) == [self.stem, *self.body]

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.stem(images)))
        return logits


SGD = functools.partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=1e-3)
# A large epsilon: without, Adam's first updates are signs of gradients, even of those that are rounding.
ADAM = functools.partial(torch.optim.AdamW, lr=LR, weight_decay=1e-2, eps=1e-3)


class Case(NamedTuple):
    """A model and how it is trained; ``sizes`` of the microbatches of a step, ``missing`` tiles of a usual one."""

    make: Callable[[], nn.Module]
    loss: Loss
    sizes: list[int]
    optimizer: Callable[..., Any]
    dtype: torch.dtype = torch.float64
    missing: int = 0
    recompute: bool = False

    def fresh(self) -> nn.Module:
        torch.manual_seed(7)
        return self.make().to(self.dtype)

    def steps(self) -> list[Batch]:
        return [batch_of(self.sizes, PX + 4 * (step % 2), step, self.dtype) for step in range(3)]

    def engine(self, communicator: Communicator, module: nn.Module | None = None, **more: Any) -> FullyShardedEngine:
        form: dict[str, Any] = {"batch": sum(self.sizes) + self.missing, "m": len(self.sizes), "seed": SEED}
        form |= {"device": DEVICE, "recompute": self.recompute} | more
        return FullyShardedEngine(module or self.fresh(), self.loss, self.optimizer, communicator, **form)


CASES = {
    "uneven": Case(SkipNet, pixel_loss, [1, 3, 2, 2, 1], SGD),
    "one-idle": Case(TwoOutputs, two_losses, [2, 1, 3], ADAM),
    "one-each": Case(functools.partial(SkipNet, None), pixel_loss, [3, 2], ADAM, missing=3),
    "recurring": Case(Recurring, pixel_loss, [2, 3, 2], SGD),
    "blocks": Case(Residuals, pixel_loss, [2, 3, 2], SGD, recompute=True),
    "float32": Case(SkipNet, pixel_loss, [2, 2], SGD, torch.float32),
}


def checks(communicator: Communicator, _: None) -> dict[str, Any]:
    found = {name: trained(communicator, CASES[name]) for name in CASES}
    others = (predicted, nan_step, deferred, most_gathered, bypassed, recomputed, counted)
    return found | {check.__name__: check(communicator) for check in others}


def given(engine: Any, batch: Batch) -> list[Microbatch]:
    return [Microbatch(*batch[i], tuple(batch[i][0].shape)) for i in engine.share]


def trained(communicator: Communicator, case: Case) -> dict[str, Any]:
    engine = case.engine(communicator)
    losses = [engine.step(given(engine, batch), step, LR).loss for step, batch in enumerate(case.steps())]
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    state, own = engine.state_dict(), [*engine.module.parameters()]
    assert bool(state) == (communicator.rank == 0)
    held = {
        "parameters": own,
        "gradients": [p.grad for p in own if p.grad is not None],
        "optimizer": [value for values in engine.optimizer.state.values() for value in values.values()],
    }
    engine.close()
    sizes = {kind: sum(getattr(t, "to_local", lambda t=t: t)().nbytes for t in each) for kind, each in held.items()}
    return {"losses": losses, "gradients": gradients, "state": state, "bytes": sizes}


def predicted(communicator: Communicator) -> list[Tensor]:
    case = CASES["uneven"]
    engine, batch, outputs = case.engine(communicator), case.steps()[0], []
    for share in ([0, 1, 2], []), ([3], [1]):
        with engine.predicting():
            for i in share[communicator.rank]:
                outputs.append(engine.predict(Microbatch(*batch[i], tuple(batch[i][0].shape))))
    engine.step(given(engine, batch), 0, LR)
    return outputs


def nan_step(communicator: Communicator) -> list[int]:
    """Rank 1's only microbatch holds a NaN; both ranks refuse, and what they hold is as before."""
    engine, batch = CASES["one-idle"].engine(communicator), CASES["one-idle"].steps()[0]
    before = [parameter.to_local().clone() for parameter in engine.module.parameters()]
    healthy = batch[2][0].clone()
    batch[2][0][0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteLoss) as caught:
        engine.step(given(engine, batch), 0, LR)
    for old, new in zip(before, engine.module.parameters(), strict=True):
        assert torch.equal(old, new.to_local())
    batch[2][0].copy_(healthy)
    engine.step(given(engine, batch), 0, LR)
    return caught.value.microbatches


def deferred(communicator: Communicator) -> list[dict[str, Any]]:
    case, states = CASES["uneven"], []
    shared: dict[str, Any] = {"batch": sum(case.sizes), "m": len(case.sizes), "seed": SEED, "statistics": "deferred"}
    for make, form in ((FullyShardedEngine, {"device": DEVICE}), (whole_engine, {"shape": SHAPE})):
        engine: Any = make(case.fresh(), case.loss, case.optimizer, communicator, **shared, **form)
        engine.step(given(engine, case.steps()[0]), 0, LR)
        states.append(engine.state_dict().get("model", {}))
        engine.close()
    return states


BLOCKS = 10


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) for _ in range(BLOCKS)))


def convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]


def most_gathered(communicator: Communicator) -> float:
    """Largest part of the parameters that is whole at a time: seen before and after every layer of the forward pass,
    and at the gradient of each one's output."""
    module, case, seen = blocks(), Case(blocks, pixel_loss, [2, 2, 1, 1], SGD, torch.float32), list[float]()
    whole = sum(parameter.numel() for parameter in module.parameters())
    engine = case.engine(communicator, module)

    def look(*_: Any) -> None:
        seen.append(sum(p.numel() for p in module.parameters() if not hasattr(p, "to_local")) / whole)

    def look_back(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        look()
        output.register_hook(look)

    for layer in convolutions(module):
        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(look_back)
    engine.step(given(engine, case.steps()[0]), 0, LR)
    assert len(seen) == 3 * BLOCKS * 2
    assert min(seen) > 0
    return max(seen)


def recomputed(communicator: Communicator) -> dict[bool, float]:
    case, calls = Case(blocks, pixel_loss, [2, 2], SGD, torch.float32), {}
    for recompute in (False, True):
        module, counts = blocks(), [0]
        for layer in convolutions(module):
            layer.register_forward_hook(lambda *_, counts=counts: counts.append(counts.pop() + 1))
        engine = case.engine(communicator, module, recompute=recompute)
        engine.step(given(engine, case.steps()[0]), 0, LR)
        calls[recompute] = counts[0] / BLOCKS
    return calls


def wide() -> nn.Module:
    inner = (nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Tanh()) for _ in range(BLOCKS))
    return nn.Sequential(nn.Conv2d(3, 64, 1), *inner, nn.Conv2d(64, 3, 1))


def counted(communicator: Communicator) -> tuple[int, int]:
    """Return the bytes of the second step at most: as a run counts them, and of all tensors made with the engine."""
    case = Case(wide, pixel_loss, [1, 1], ADAM, torch.float32)
    batches, memory, everything = case.steps()[:2], MemoryLimit(None, DEVICE), LiveBytes()
    with everything:
        engine = case.engine(communicator)
        for step, batch in enumerate(batches):
            gc.collect()
            everything.peak_bytes = everything.bytes
            with memory.watching(engine.on_device()):
                engine.step(given(engine, batch), step, LR)
    assert memory.device_bytes is not None
    return memory.device_bytes, everything.peak_bytes


def bypassing() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    return Made(lambda m, x: nn.functional.conv2d(m.layers[0](x), m.layers[1].weight), layers=layers)


def bypassed(communicator: Communicator) -> str:
    case = Case(bypassing, pixel_loss, [1, 1], SGD)
    engine = case.engine(communicator)
    with pytest.raises(ValueError, match="or use --parallel ddp") as caught:
        engine.step(given(engine, case.steps()[0]), 0, LR)
    return str(caught.value)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(RANKS, f"{__name__}:checks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_the_plain_step(ranks: list[dict[str, Any]], name: str) -> None:
    case, tolerance = CASES[name], TOLERANCE[CASES[name].dtype]
    expected = plain_run(case.fresh(), case.loss, case.optimizer, case.steps(), seed=SEED, lr=LR)
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(expected.losses, rel=tolerance)
        assert rank[name]["gradients"].keys() == expected.gradients.keys()
        assert largest_error(expected.gradients, rank[name]["gradients"]) <= 10 * tolerance
    state = {"model": expected.model, "optimizer": expected.optimizer}
    assert_same_state(ranks[0][name]["state"], state, 10 * tolerance)


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer"])
def test_each_rank_holds_its_share(ranks: list[dict[str, Any]], kind: str) -> None:
    held = [rank["uneven"]["bytes"][kind] for rank in ranks]
    whole = sum(parameter.numel() * parameter.element_size() for parameter in CASES["uneven"].fresh().parameters())
    assert sum(held) == whole
    assert max(held) <= 0.55 * whole  # rows of 3 are divided as 2 and 1


def test_blocks_are_gathered_one_by_one_and_computed_twice_with_recomputation(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["most_gathered"] <= 2.01 / BLOCKS  # the next is on its way while one computes gradients
        assert rank["recomputed"] == {False: 1, True: 2}


def test_a_run_counts_the_parameters_that_are_gathered(ranks: list[dict[str, Any]]) -> None:
    """Their storages are made in the first step, and are resized in the next ones."""
    for rank in ranks:
        of_run, of_all = rank["counted"]
        assert of_run == pytest.approx(of_all, rel=0.01)


def test_what_cannot_go_on_is_told(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["nan_step"] == [2]
        assert "this model uses those of one that it does not call" in rank["bypassed"]


def test_deferred_statistics_are_those_of_data_parallelism(ranks: list[dict[str, Any]]) -> None:
    sharded, replicated = ranks[0]["deferred"]
    assert largest_error(replicated, sharded) <= 1e-9


def test_ranks_predict_as_many_microbatches_as_they_have(ranks: list[dict[str, Any]]) -> None:
    case = CASES["uneven"]
    module, batch = case.fresh().eval(), case.steps()[0]
    for rank, numbers in zip(ranks, ([0, 1, 2, 3], [1]), strict=True):
        assert len(rank["predicted"]) == len(numbers)
        for i, output in zip(numbers, rank["predicted"], strict=True):
            with torch.no_grad():
                expected = module(batch[i][0]).float()
            assert (output - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_ranks_that_cannot_hold_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="2 processes or more; got 1 ranks of a LocalCommunicator"):
        CASES["one-each"].engine(LocalCommunicator())

    def rank(communicator: Communicator, _: None) -> str:
        with pytest.raises(ValueError, match="or use --parallel ddp") as caught:
            CASES["one-each"].engine(communicator, nn.Linear(2, 2))
        return str(caught.value)

    assert all("got 2 ranks of a ThreadCommunicator" in said for said in run_on_threads(2, rank))


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_bytes_are_those_planned(tmp_path: Path, recompute: Recompute) -> None:
    """ResNet-50 with AdamW; every tensor of a step counts."""
    savings = MemoryOptions((recompute,), (False,), stream=False)
    (row,) = planner("resnet50", 256, RANKS, 1 << 40).search(["fsdp"], ranks=RANKS, m=BATCH, savings=savings)
    assert row.strategy.policy.recompute == recompute
    case = {"model": "resnet50", "px": 256, "batch": BATCH, "row": row.to_json(), "state_on_host": False}
    ranks = run_on_ranks(RANKS, "benchmarks.out_of_core.trial:run", tmp_path, case)
    assert max(rank["device_bytes"] for rank in ranks) == pytest.approx(max(row.peak_bytes), rel=0.03)
