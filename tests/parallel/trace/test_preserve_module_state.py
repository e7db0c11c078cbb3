"""Looking at a model does not change it: hooks, attributes, buffers and outputs are the same after every examination.

A Segformer of transformers installs hooks at its first call; an examination took back the attribute that says so and
left the hooks, so that the next call installed them twice and computed with twice as many hidden states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.settings.strategy import StrategySettings
from app.training.model import refuse_draws, takes_channels_last
from app.verify import VerifyCommand, verify
from benchmarks.in_boxes import streamed
from parallel.comm.local import LocalCommunicator
from parallel.trace.trace import trace, trace_exclusively
from parallel.trace.updated_search import refuse_checkpointed, updated_buffers
from parallel.trace.without_data import preserve_module_state, refuse_tile_size
from tests.helpers import odd_nets, transformers_nets, updating_nets

SHAPE = (2, 3, 64, 64)
EXAMINATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "layout": lambda model: takes_channels_last(model, SHAPE),
    "draws": lambda model: refuse_draws(model, SHAPE),
    "size": lambda model: refuse_tile_size(model, "model", SHAPE),
    "updates": lambda model: updated_buffers(model, SHAPE, torch.float32),
    "checkpoints": lambda model: refuse_checkpointed(model, SHAPE, torch.float32),
    "trace": lambda model: trace(model, SHAPE),
    "trace, checked": lambda model: trace_exclusively(model, SHAPE, LocalCommunicator()),
    "boxes": lambda model: streamed(model, 32, SHAPE),
}
LONG = pytest.mark.long
TRANSFORMERS = [pytest.param(getattr(transformers_nets, name), id=name, marks=LONG) for name in ("segformer", "swin")]
MODELS = {
    **{name: getattr(updating_nets, name) for name in ("setting_data", "codebook", "assigning", "plain_tensor")},
    **{name: getattr(odd_nets, name) for name in ("KeepsInList", "keeps_by_hook_inside")},
}


def _seen(value: Any) -> Any:
    """``value`` of an attribute, to be compared: tensors by identity and values, containers by their contents."""
    if isinstance(value, Tensor):
        return id(value), value.data_ptr(), value.requires_grad, value.detach().flatten().tolist()
    if isinstance(value, dict):
        return [(key, _seen(content)) for key, content in value.items()]
    return [_seen(element) for element in value] if isinstance(value, list | tuple) else id(value)


def state_of(model: nn.Module) -> list[Any]:
    return [(path, _seen(vars(part))) for path, part in model.named_modules()]


@pytest.mark.parametrize("look", EXAMINATIONS.values(), ids=EXAMINATIONS)
@pytest.mark.parametrize("make", [*TRANSFORMERS, *(pytest.param(make, id=name) for name, make in MODELS.items())])
def test_looking_does_not_change_a_model(make: Callable[[int], nn.Module], look: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    model, images = make(3), torch.rand(SHAPE)
    plain = make(3)
    plain.load_state_dict(model.state_dict())
    before, drawn = state_of(model), torch.get_rng_state()
    for _ in range(2):
        with contextlib.suppress(ValueError):  # a model that cannot be taken apart is left as it was, too
            look(model)
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    for _ in range(2):
        assert torch.equal(model(images), plain(images))


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        pytest.param(name, parallel, marks=() if f"{name}, {parallel}" in ("segformer, single", "vit, gpipe") else LONG)
        for name in ("segformer", "vit", "swin", "convnext")
        for parallel in ("single", "gpipe")
    ],
)
def test_models_of_transformers_are_exact(name: str, parallel: Any) -> None:
    asked = StrategySettings(parallel, ranks=1 if parallel == "single" else 2, batch=2, microbatches=2)
    result = verify(VerifyCommand(asked, model=f"tests.helpers.transformers_nets:{name}", tile=64, steps=1))
    assert result is not None
    assert result.max_relative_error <= 1e-13


class Busy(nn.Module):
    """Changes all that a module can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.log: list[Any] = []
        self.seen: dict[str, set[int]] = {"sides": set()}
        self.scratch = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.add_(1)
        self.scratch.data.add_(1)
        self.log.append(x)
        self.seen["sides"].add(x.shape[-1])
        self.register_forward_hook(lambda module, given, value: value)
        self.extra = nn.Linear(1, 1)
        self.register_buffer("another", torch.zeros(1))
        return x


def test_everything_is_put_back() -> None:
    model = Busy()
    before = state_of(model)
    with preserve_module_state(model):
        model.eval()
        model(torch.rand(2))
        assert state_of(model) != before
    assert state_of(model) == before
    assert [*model.named_children()] == []
