"""Engines of small models on threads, and what they leave held against the plain step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from app.training.plain_training import in_precision
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch, TrainingEngine
from parallel.strategy import Strategy
from tests.helpers.plain_step import TOLERANCE, Batch, PlainRun, largest_error, plain_run
from tests.helpers.sim_gpu import simulated
from tests.helpers.sim_gpu.ranks import run_ranks
from tests.helpers.small_nets import ALL_NETS, batch_of, drawn_once

SEED, LR = 11, 0.05
SGD = functools.partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=1e-3)
CPU = torch.device("cpu")


def net(name: str, dtype: torch.dtype) -> nn.Module:
    return drawn_once(("engine", name, dtype), 5, lambda: in_precision(ALL_NETS[name][0](), dtype))


def build(
    communicator: Communicator,
    name: str,
    strategy: Strategy,
    steps: list[Batch],
    device: torch.device = CPU,
    **more: Any,
) -> Engine:
    model, loss = net(name, steps[0][0][0].dtype), ALL_NETS[name][1]
    make, batch = more.pop("make_optimizer", SGD), sum(len(images) for images, _ in steps[0])
    return assemble(
        model,
        loss,
        make,
        communicator,
        strategy,
        shape=tuple(steps[0][0][0].shape),
        batch=batch,
        device=device,
        seed=SEED,
        **more,
    )


def train(engine: TrainingEngine, steps: list[Batch], first: int = 0, device: torch.device = CPU) -> list[float]:
    """What the ranks do: every rank is given what it wants and nothing else."""
    losses = []
    for step, batch in enumerate(steps, first):
        mine = [
            Microbatch(
                batch[i][0].to(device) if engine.wants(i).images else None,
                batch[i][1].to(device) if engine.wants(i).targets else None,
                tuple(batch[i][0].shape),
            )
            for i in engine.share
        ]
        losses.append(engine.step(mine, step, LR).loss)
    return losses


def run(
    communicator: Communicator,
    name: str,
    strategy: Strategy,
    steps: list[Batch],
    device: torch.device = CPU,
    **more: Any,
) -> dict[str, Any]:
    """Train and predict; return what came out, on the CPU."""
    engine = build(communicator, name, strategy, steps, device, **more)
    losses = train(engine, steps, device=device)
    gradients = {key: value.clone().cpu() for key, value in engine.gradients().items()}
    images = steps[0][0][0].to(device)
    asks = engine.predict_wants.images
    predicted = engine.predict(Microbatch(images if asks else None, None, tuple(images.shape)))
    state, predicted = _on_cpu((engine.state_dict(), predicted))
    return {"losses": losses, "gradients": gradients, "state": state, "predicted": predicted}


def on_threads(name: str, strategy: Strategy, steps: list[Batch], **more: Any) -> list[dict[str, Any]]:
    return run_on_threads(strategy.ranks, lambda c, _: run(c, name, strategy, steps, **more), timeout_s=60)


def on_gpus(
    name: str, strategy: Strategy, steps: list[Batch], late: int | None = None, sync_every: int | None = None
) -> list[dict[str, Any]]:
    """As ``on_threads``, on a simulated GPU for each rank; no race may be found."""
    with simulated(strategy.ranks, late, sync_every=sync_every) as gpus:
        ranks = run_ranks(
            gpus, strategy.ranks, lambda c: run(c, name, strategy, steps, device=torch.device("cuda", c.rank))
        )
        assert gpus.found == []
    return ranks


def assert_equal(
    ranks: list[dict[str, Any]], plain: PlainRun, dtype: torch.dtype, tolerance: float | None = None
) -> None:
    tolerance = tolerance or TOLERANCE[dtype]
    found: dict[str, Any] = {}
    for rank in ranks:
        assert rank["losses"] == pytest.approx(plain.losses, rel=tolerance)
        for key, gradient in rank["gradients"].items():
            if key in found:  # copies of a stage agree to the last bit
                assert torch.equal(found[key], gradient), key
            found[key] = gradient
        if rank["predicted"] is not None:
            for key, value in _flat(plain.predicted).items():
                assert torch.allclose(_flat(rank["predicted"])[key].double(), value.double(), rtol=1e-4, atol=1e-5)
    assert found.keys() == plain.gradients.keys()
    assert largest_error(plain.gradients, found) <= tolerance
    state = ranks[0]["state"]
    assert list(state["model"]) == list(plain.model)
    assert largest_error(plain.model, state["model"]) <= 10 * tolerance
    assert state["optimizer"]["state"].keys() == plain.optimizer["state"].keys()
    assert any(rank["predicted"] is not None for rank in ranks)


def assert_same_state(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    """States of a model and its optimizer, as ``state_dict`` of an engine gives them, are those of a plain run."""
    assert list(found["model"]) == list(expected["model"])
    assert largest_error(expected["model"], found["model"]) <= tolerance
    ours, theirs = found["optimizer"], expected["optimizer"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        assert ours["state"][number].keys() == values.keys()
        assert largest_error(values, ours["state"][number]) <= tolerance


def _on_cpu(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, output)


def _flat(output: Any) -> dict[str, torch.Tensor]:
    return output if isinstance(output, dict) else {"": output}


def steps_of(m: int, dtype: torch.dtype = torch.float64, steps: int = 2) -> list[Batch]:
    return [batch_of([2] * m, 12, 100 + step, dtype) for step in range(steps)]


def strategy_for(schedule: str, depth: int, groups: int = 1, **more: Any) -> Strategy:
    m = groups * (2 if schedule == "mast" else more.pop("m", 5))
    more.pop("m", None)
    return Strategy(schedule, groups * depth, depth, m, chunks=2 if schedule == "interleaved" else 1, **more)


def plain_of(name: str, steps: list[Batch], make: Any = SGD) -> PlainRun:
    return plain_run(net(name, steps[0][0][0].dtype), ALL_NETS[name][1], make, steps, seed=SEED, lr=LR)


@functools.cache
def plain(name: str, m: int, dtype: torch.dtype = torch.float64) -> PlainRun:
    return plain_of(name, steps_of(m, dtype))


def assert_plain(name: str, strategy: Strategy, dtype: torch.dtype = torch.float64) -> None:
    """Two steps on threads give what the plain steps give."""
    assert_equal(on_threads(name, strategy, steps_of(strategy.m, dtype)), plain(name, strategy.m, dtype), dtype)
