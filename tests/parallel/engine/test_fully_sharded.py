"""Fully sharded data parallelism gives what the plain step gives, and keeps a share of the model on each rank.

Ranks are processes over Gloo, started once for all checks: importing torch is what a start costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks.whole_engine import whole_engine
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.fully_sharded import FullyShardedEngine
from parallel.engine.sharding_units import sharding_units
from parallel.engine.step import Microbatch, NonFiniteLoss
from parallel.stage.stage import Loss
from tests.helpers.plain_step import TOLERANCE, Batch, PlainRun, largest_error, plain_run
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import SkipNet, TwoOutputs, batch_of, pixel_loss, two_losses

pytestmark = pytest.mark.process

RANKS, PX, SEED, LR, STEPS = 2, 8, 3, 0.05, 3
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


class Case(NamedTuple):
    """A model and how it is trained; ``sizes`` of the microbatches of a step, ``missing`` tiles of a usual one."""

    make: Callable[[], nn.Module]
    loss: Loss
    sizes: list[int]
    optimizer: Callable[..., Any]
    dtype: torch.dtype = torch.float64
    missing: int = 0


SGD = functools.partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=1e-3)
# A large epsilon: without, Adam's first updates are signs of gradients, even of those that are rounding.
ADAM = functools.partial(torch.optim.AdamW, lr=LR, weight_decay=1e-2, eps=1e-3)
CASES = {
    "uneven": Case(SkipNet, pixel_loss, [1, 3, 2, 2, 1], SGD),
    "one-idle": Case(TwoOutputs, two_losses, [2, 1, 3], ADAM),
    "one-each": Case(functools.partial(SkipNet, None), pixel_loss, [3, 2], ADAM, missing=3),
    "recurring": Case(Recurring, pixel_loss, [2, 3, 2], SGD),
    "float32": Case(SkipNet, pixel_loss, [2, 2], SGD, torch.float32),
}


def fresh(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return case.make().to(case.dtype)


def batches(case: Case) -> list[Batch]:
    return [batch_of(case.sizes, PX + 4 * (step % 2), step, case.dtype) for step in range(STEPS)]


def engine_of(
    case: Case, communicator: Communicator, *, module: nn.Module | None = None, **more: Any
) -> FullyShardedEngine:
    return FullyShardedEngine(
        module or fresh(case),
        case.loss,
        case.optimizer,
        communicator,
        batch=sum(case.sizes) + case.missing,
        m=len(case.sizes),
        device=DEVICE,
        seed=SEED,
        **more,
    )


def parts(engine: FullyShardedEngine, batch: Batch) -> list[Microbatch]:
    return [Microbatch(*batch[i], tuple(batch[i][0].shape)) for i in engine.share]


def train(engine: FullyShardedEngine, steps: Sequence[Batch], first: int = 0) -> list[float]:
    return [engine.step(parts(engine, batch), step, LR).loss for step, batch in enumerate(steps, first)]


# On the ranks


def checks(communicator: Communicator, plain: dict[str, Any]) -> dict[str, Any]:
    found = {name: trained(communicator, CASES[name]) for name in CASES}
    return found | {
        "resumed": resumed(communicator, CASES["one-idle"], plain),
        "predicted": predicted(communicator, CASES["uneven"]),
        "nan": nan_step(communicator, CASES["one-idle"]),
        "deferred": deferred(communicator, CASES["uneven"]),
        "gathered": most_gathered(communicator),
        "bypassed": bypassed(communicator),
        "recomputed": recomputed(communicator),
    }


def trained(communicator: Communicator, case: Case) -> dict[str, Any]:
    engine = engine_of(case, communicator)
    steps = batches(case)
    losses = train(engine, steps)
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    state = engine.state_dict()
    assert bool(state) == (communicator.rank == 0)
    bytes_here = {
        "parameters": [local_bytes(parameter) for parameter in engine.module.parameters()],
        "gradients": [local_bytes(p.grad) for p in engine.module.parameters() if p.grad is not None],
        "optimizer": [local_bytes(value) for values in engine.optimizer.state.values() for value in values.values()],
    }
    engine.close()
    return {
        "losses": losses,
        "gradients": gradients,
        "model": state.get("model", {}),
        "optimizer": state.get("optimizer", {}),
        "bytes": {kind: sum(sizes) for kind, sizes in bytes_here.items()},
    }


def local_bytes(tensor: Any) -> int:
    local = getattr(tensor, "to_local", lambda: tensor)()
    return int(local.numel() * local.element_size())


def resumed(communicator: Communicator, case: Case, plain: dict[str, Any]) -> dict[str, Any]:
    """The last step, from what a plain run left before it."""
    engine = engine_of(case, communicator, module=nn.Module.to(case.make(), case.dtype))
    engine.load_state_dict(plain)
    losses = train(engine, batches(case)[-1:], STEPS - 1)
    return {"losses": losses, "state": engine.state_dict()}


def predicted(communicator: Communicator, case: Case) -> list[Tensor]:
    """Rank 0 predicts three microbatches, the other rank none; then each one, of different sizes."""
    engine = engine_of(case, communicator)
    batch = batches(case)[0]
    outputs = []
    for share in ([0, 1, 2], []), ([3], [1]):
        with engine.predicting():
            for i in share[communicator.rank]:
                outputs.append(engine.predict(Microbatch(*batch[i], tuple(batch[i][0].shape))))
    train(engine, batches(case)[:1])
    return outputs


def nan_step(communicator: Communicator, case: Case) -> list[int]:
    """Rank 1's only microbatch holds a NaN; both ranks refuse, and what they hold is as before."""
    engine = engine_of(case, communicator)
    batch = batches(case)[0]
    before = [parameter.to_local().clone() for parameter in engine.module.parameters()]  # type: ignore[operator]
    healthy = batch[2][0].clone()
    batch[2][0][0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteLoss) as caught:
        engine.step(parts(engine, batch), 0, LR)
    for old, new in zip(before, engine.module.parameters(), strict=True):
        assert torch.equal(old, new.to_local())  # type: ignore[operator]
    batch[2][0].copy_(healthy)
    engine.step(parts(engine, batch), 0, LR)
    return caught.value.microbatches


def deferred(communicator: Communicator, case: Case) -> dict[str, Any]:
    """The same step by data parallelism, running statistics deferred in both."""
    states = []
    for sharded in (True, False):
        shared: dict[str, Any] = {
            "batch": sum(case.sizes),
            "m": len(case.sizes),
            "seed": SEED,
            "statistics": "deferred",
        }
        module = fresh(case)
        engine = (
            FullyShardedEngine(module, case.loss, case.optimizer, communicator, device=DEVICE, **shared)
            if sharded
            else whole_engine(module, case.loss, case.optimizer, communicator, shape=SHAPE, **shared)
        )
        batch = batches(case)[0]
        engine.step([Microbatch(*batch[i], tuple(batch[i][0].shape)) for i in engine.share], 0, LR)
        states.append(engine.state_dict().get("model", {}))
        engine.close()
    return {"sharded": states[0], "replicated": states[1]}


BLOCKS = 10


def most_gathered(communicator: Communicator) -> float:
    """Largest part of the parameters that is whole at a time: seen before and after every layer of the forward pass,
    and at the gradient of each one's output."""
    torch.manual_seed(7)
    module = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) for _ in range(BLOCKS)))
    case = Case(lambda: module, pixel_loss, [2, 2, 1, 1], SGD)
    whole = sum(parameter.numel() for parameter in module.parameters())
    engine = engine_of(case, communicator)
    seen = []

    def look(*_: Any) -> None:
        here = [p.numel() for p in module.parameters() if not hasattr(p, "to_local")]
        seen.append(sum(here) / whole)

    def look_back(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        look()
        output.register_hook(look)

    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_pre_hook(look)
            layer.register_forward_hook(look_back)
    train(engine, batches(case)[:1])
    assert len(seen) == 3 * BLOCKS * 2
    assert min(seen) > 0
    return max(seen)


def recomputed(communicator: Communicator) -> dict[bool, float]:
    """Forward passes of each layer in a step of one microbatch a rank, without and with recomputation."""
    calls = {}
    for recompute in (False, True):
        module = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) for _ in range(BLOCKS)))
        counts = [0]
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_hook(lambda *_, counts=counts: counts.append(counts.pop() + 1))
        case = Case(functools.partial(lambda made: made, module), pixel_loss, [2, 2], SGD)
        train(engine_of(case, communicator, recompute=recompute), batches(case)[:1])
        calls[recompute] = counts[0] / BLOCKS
    return calls


class Bypassed(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.conv2d(self.layers[0](images), self.layers[1].weight)


def bypassed(communicator: Communicator) -> str:
    case = Case(Bypassed, pixel_loss, [1, 1], SGD)
    engine = engine_of(case, communicator)
    with pytest.raises(ValueError, match="or use --parallel ddp") as caught:
        train(engine, batches(case)[:1])
    return str(caught.value)


# Here


def plain(name: str, steps: int = STEPS) -> PlainRun:
    case = CASES[name]
    return plain_run(fresh(case), case.loss, case.optimizer, batches(case)[:steps], seed=SEED, lr=LR)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    before = plain("one-idle", STEPS - 1)
    state = {"model": before.model, "optimizer": before.optimizer}
    checks = "tests.parallel.engine.test_fully_sharded:checks"
    return run_on_ranks(RANKS, checks, tmp_path_factory.mktemp("ranks"), state)


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_the_plain_step(ranks: list[dict[str, Any]], name: str) -> None:
    expected, tolerance = plain(name), TOLERANCE[CASES[name].dtype]
    first = ranks[0][name]
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(expected.losses, rel=tolerance)
        assert rank[name]["gradients"].keys() == expected.gradients.keys()
        assert largest_error(expected.gradients, rank[name]["gradients"]) <= 10 * tolerance
    assert list(first["model"]) == list(expected.model)
    assert largest_error(expected.model, first["model"]) <= 10 * tolerance
    assert_same_optimizer(first["optimizer"], expected.optimizer, tolerance)


def assert_same_optimizer(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert type(values) is dict
        assert found["state"][number].keys() == values.keys()
        assert largest_error(values, found["state"][number]) <= 10 * tolerance


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer"])
def test_each_rank_holds_its_share(ranks: list[dict[str, Any]], kind: str) -> None:
    held = [rank["uneven"]["bytes"][kind] for rank in ranks]
    whole = sum(parameter.numel() * parameter.element_size() for parameter in fresh(CASES["uneven"]).parameters())
    assert sum(held) == whole
    assert max(held) <= 0.55 * whole  # rows of 3 are divided as 2 and 1


def test_a_model_is_gathered_block_by_block(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["gathered"] <= 2.01 / BLOCKS  # the next is on its way while one computes gradients


def test_blocks_are_computed_twice_with_recomputation(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["recomputed"] == {False: 1, True: 2}


def test_a_module_that_is_not_called_is_named_as_the_reason(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "this model uses those of one that it does not call" in rank["bypassed"]


def test_a_run_of_one_process_goes_on_sharded_and_back(ranks: list[dict[str, Any]]) -> None:
    case, expected = CASES["one-idle"], plain("one-idle")
    assert [rank["resumed"]["losses"] for rank in ranks] == [pytest.approx(expected.losses[-1:], rel=1e-10)] * RANKS
    state = ranks[0]["resumed"]["state"]
    assert largest_error(expected.model, state["model"]) <= 1e-9
    module = fresh(case)
    local = LocalCommunicator()
    engine = whole_engine(module, case.loss, case.optimizer, local, batch=6, m=3, shape=SHAPE, seed=SEED)
    engine.load_state_dict(state)
    assert_same_optimizer(engine.state_dict()["optimizer"], expected.optimizer, 1e-10)


def test_ranks_predict_as_many_microbatches_as_they_have(ranks: list[dict[str, Any]]) -> None:
    case = CASES["uneven"]
    module, batch = fresh(case).eval(), batches(case)[0]
    for rank, numbers in zip(ranks, ([0, 1, 2, 3], [1]), strict=True):
        assert len(rank["predicted"]) == len(numbers)
        for i, output in zip(numbers, rank["predicted"], strict=True):
            with torch.no_grad():
                expected = module(batch[i][0]).float()
            assert (output - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_nan_on_one_rank_stops_all_before_the_update(ranks: list[dict[str, Any]]) -> None:
    assert [rank["nan"] for rank in ranks] == [[2], [2]]


def test_deferred_statistics_are_those_of_data_parallelism(ranks: list[dict[str, Any]]) -> None:
    states = ranks[0]["deferred"]
    assert largest_error(states["replicated"], states["sharded"]) <= 1e-9


def test_ranks_that_cannot_hold_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="between 2 processes or more; got 1 ranks of a LocalCommunicator: start them"):
        engine_of(CASES["one-each"], LocalCommunicator())

    def rank(communicator: Communicator, _: None) -> str:
        with pytest.raises(ValueError, match="or use --parallel ddp") as caught:
            engine_of(CASES["one-each"], communicator, module=nn.Linear(2, 2))
        return str(caught.value)

    assert all("got 2 ranks of a ThreadCommunicator" in said for said in run_on_threads(2, rank))
