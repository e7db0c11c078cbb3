"""The plain single-process step written out: what every strategy is held against. Nothing of ours but the seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel.engine.step import microbatch_seed
from parallel.stage.stage import Loss
from parallel.trace.python_random import seed_python

Batch = list[tuple[Tensor, Tensor]]
"""(images, targets) of each microbatch of one global batch."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass
class PlainRun:
    """What a few steps leave: losses of all, gradients of the last, the state after it."""

    losses: list[float]
    gradients: dict[str, Tensor]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    predicted: Any


def plain_run(
    model: nn.Module, loss: Loss, make_optimizer: Callable[..., Any], steps: Sequence[Batch], *, seed: int, lr: float
) -> PlainRun:
    """Gradients of the microbatches are accumulated, weighted by their sizes."""
    optimizer = make_optimizer(model.named_parameters())
    for group in optimizer.param_groups:
        group["lr"] = lr
    model.train()
    losses = []
    for step, batch in enumerate(steps):
        tiles = sum(len(images) for images, _ in batch)
        optimizer.zero_grad()
        total = 0.0
        for i, (images, targets) in enumerate(batch):
            torch.manual_seed(microbatch_seed(seed, step, i))
            seed_python(microbatch_seed(seed, step, i))
            part = loss(model(images), targets) * (len(images) / tiles)
            part.backward()
            total += part.item()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(total)
    model.eval()
    with torch.no_grad():
        predicted = model(steps[0][0][0])
    return PlainRun(losses, gradients, model.state_dict(), optimizer.state_dict(), predicted)


def largest_error(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, relative to the largest value of the tensor it is in."""
    return max(
        float((expected[name] - found[name]).abs().max() / max(expected[name].abs().max(), 1e-30)) for name in found
    )


ROUNDING = 1000
"""A gradient below so many roundings of the largest holds nothing but rounding: it counts relative to that one."""


def relative_errors(expected: Mapping[Any, Tensor | None], found: Mapping[Any, Tensor | None]) -> dict[Any, float]:
    """Largest relative error of each tensor; a gradient that is missing on one side is infinitely wrong."""
    sizes = {
        name: float(value.abs().max()) if value is not None and value.numel() else 0.0
        for name, value in expected.items()
    }
    largest = max(sizes.values(), default=0.0)
    errors = {}
    for name, value in expected.items():
        ours = found[name]
        if value is None or ours is None:
            errors[name] = 0.0 if value is ours else float("inf")
            continue
        if value.shape != ours.shape:
            errors[name] = float("inf")
            continue
        epsilon = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        scale = sizes[name] if sizes[name] > ROUNDING * epsilon * largest else largest
        difference = float((value.double() - ours.double()).abs().max()) if value.numel() else 0.0
        errors[name] = difference / scale if difference else 0.0
        if errors[name] != errors[name]:
            errors[name] = float("inf")
    return errors
