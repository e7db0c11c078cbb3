"""Rounding that a model amplifies is no fault, and hides none: seeded faults are found in both types, on a calm model
and on one in which the last bit of a tile grows with every layer."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor, nn

from app.training import exactness
from app.training.exactness import (
    CEILING,
    NOISE,
    TOLERANCE,
    Errors,
    ExactnessTrial,
    StepsResult,
    compare,
    run_noise,
    run_plain,
    settled_steps,
)

CPU = torch.device("cpu")
LAYERS = {"calm": (3, 1.0), "chaotic": (24, 2.2)}


class Deep(nn.Module):
    """Convolutions whose gain makes small differences grow; the second may be computed in halves, halos detached."""

    def __init__(self, layers: int, gain: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 if not k else 6, 6, 3, padding=1) for k in range(layers))
        for layer in self.layers:
            nn.init.xavier_normal_(layer.weight, gain)
        self.head = nn.Linear(6, 3)
        self.detached = False

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(self._halves(layer, x) if k == 1 and self.detached else layer(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    @staticmethod
    def _halves(layer: nn.Module, x: Tensor) -> Tensor:
        half = x.shape[2] // 2
        upper = layer(torch.cat([x[:, :, :half], x[:, :, half : half + 1].detach()], 2))[:, :, :half]
        lower = layer(torch.cat([x[:, :, half - 1 : half].detach(), x[:, :, half:]], 2))[:, :, 1:]
        return torch.cat([upper, lower], 2)


@functools.cache
def made(kind: str, dtype: torch.dtype, steps: int = 1) -> tuple[ExactnessTrial, StepsResult, list[StepsResult]]:
    torch.manual_seed(3)
    trial = ExactnessTrial(Deep(*LAYERS[kind]), (2, 1, 1), 12, dtype, CPU, steps)
    return trial, run_plain(trial), run_noise(trial)


def judged(kind: str, dtype: torch.dtype, found: StepsResult) -> Errors:
    trial, plain, noise = made(kind, dtype)
    return compare(plain, [found], [name for name, _ in trial.module.named_parameters()], noise=noise)


both = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
each = pytest.mark.parametrize("kind", LAYERS)


@both
@each
def test_another_order_of_summation_passes(kind: str, dtype: torch.dtype) -> None:
    trial, _, _ = made(kind, dtype)
    errors = judged(kind, dtype, run_plain(dataclasses.replace(trial, channels_last=True)))
    assert errors.largest > 0
    assert errors.passed, errors.excesses


@both
@each
def test_a_detached_halo_is_found(kind: str, dtype: torch.dtype) -> None:
    trial, _, _ = made(kind, dtype)
    module = trial.fresh_module()
    module.detached = True
    errors = judged(kind, dtype, run_plain(dataclasses.replace(trial, module=module)))
    assert ("gradients", "layers.0.weight") in errors.excesses


@both
@each
def test_a_lost_microbatch_is_found(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, plain, _ = made(kind, dtype)  # before the patch: the reference loses nothing
    right, calls = exactness.ProjectedError.value, iter(range(3))
    monkeypatch.setattr(exactness.ProjectedError, "value", lambda *given: right(*given) * (next(calls) != 1))
    errors = judged(kind, dtype, run_plain(trial))
    assert len(errors.excesses) >= len(plain.gradients)


@both
@each
def test_a_doubled_bias_is_found(kind: str, dtype: torch.dtype) -> None:
    _, plain, _ = made(kind, dtype)
    for name in ("layers.1.bias", "head.bias"):
        doubled = plain.gradients | {name: 2 * plain.gradients[name]}
        assert judged(kind, dtype, dataclasses.replace(plain, gradients=doubled)).excesses == [("gradients", name)]


@both
def test_rounding_excuses_no_more_than_the_ceiling(dtype: torch.dtype) -> None:
    _, plain, noise = made("chaotic", dtype)
    wild = [dataclasses.replace(run, gradients={n: 2 * g for n, g in run.gradients.items()}) for run in noise]
    names = list(plain.gradients)
    off = {name: g * (1 + 2 * CEILING[dtype]) for name, g in plain.gradients.items()}
    errors = compare(plain, [dataclasses.replace(plain, gradients=off)], names, noise=wild)
    assert {name for _, name in errors.excesses} == set(names)
    assert max(errors.allowed["gradients"].values()) == CEILING[dtype] > TOLERANCE[dtype]


def test_a_chaotic_model_is_compared_after_one_step() -> None:
    names = [name for name, _ in made("calm", torch.float64)[0].module.named_parameters()]
    calm, chaotic = (made(kind, torch.float32, steps=3) for kind in LAYERS)
    assert settled_steps(*calm, names) == 3
    assert settled_steps(*chaotic, names) == 1
    assert NOISE * compare(chaotic[1], chaotic[2], names).largest > CEILING[torch.float32]
