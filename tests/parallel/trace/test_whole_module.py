"""Whole models: recomputed or offloaded in parts, made for one size of tiles, and not changed by being looked at.

A Segformer of transformers installs hooks at its first call; an examination took back the attribute that says so and
left the hooks, so that the next call installed them twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.planning.workload import Workload
from app.settings.strategy import StrategySettings
from app.training.model import refuse_draws, takes_channels_last
from app.verify import VerifyCommand, verify
from benchmarks.in_boxes import streamed
from benchmarks.whole_engine import whole_engine
from models.registry import build_model
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.offload.live_bytes import LiveBytes
from parallel.trace import trace as untraced
from parallel.trace.stage_module import StageModule
from parallel.trace.trace import UntracedModule, trace, trace_exclusively
from parallel.trace.updated_search import refuse_checkpointed, updated_buffers
from parallel.trace.without_data import own_side, preserve_module_state, refuse_tile_size
from tests.helpers import odd_nets, transformers_nets, updating_nets
from tests.helpers.engine_runs import SGD, net, steps_of, train
from tests.helpers.lanes import long_where
from tests.helpers.small_nets import Made, pixel_loss

SHAPE = (2, 3, 12, 12)


def engine_of(model: nn.Module, policy: ActivationPolicy) -> Engine:
    return whole_engine(model, pixel_loss, SGD, LocalCommunicator(), batch=8, m=4, shape=SHAPE, policy=policy)


def stage_of(model: nn.Module, policy: ActivationPolicy) -> StageModule:
    return engine_of(model, policy)._work.stages[0].module


class Untraceable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_a_model_is_called_as_it_is_where_all_is_kept_or_it_cannot_be_traced() -> None:
    model, moved = net("skips", torch.float64), ActivationPolicy(offload="overlap")
    assert stage_of(model, ActivationPolicy()).root is model
    for policy in (moved, ActivationPolicy("block")):
        assert not isinstance(stage_of(model, policy), UntracedModule)
    odd = Untraceable(12, 12)
    assert stage_of(odd, moved).root is odd
    with pytest.raises(ValueError, match="cannot be cut into layers: its path depends on the values of tensors"):
        stage_of(odd, ActivationPolicy("block"))


def test_a_model_that_is_called_keeps_its_names_modes_and_state() -> None:
    model = net("skips", torch.float64)
    stage = UntracedModule(model)
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert list(getattr(stage, names)()) == list(getattr(model, names)())
    assert list(stage.state_dict()) == list(model.state_dict())
    stage.eval()
    assert not any(module.training for module in model.modules())


class _Restless(nn.Module):
    """Takes another way each time, and cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.steady = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not self.steady
        return x.sin() if not x.isnan().any() and (self.calls % 2 or self.steady) else x * x.sigmoid()


def untraceable(*_: Any) -> Any:
    raise ValueError


def test_a_value_that_left_for_the_host_is_not_held_by_whoever_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's forward pass would hold what it gave to a module, for as long as that computes."""

    def deep() -> nn.Module:
        body = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))
        return Made(lambda m, x: m.body(torch.cat((x, x, x), 2) * 2).mean(), body=body)

    shape, peaks = (1, 3, 64, 64), []
    policy = ActivationPolicy(offload="overlap", smallest=0)
    for traced in (False, True):
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            if not traced:
                patch.setattr(untraced, "trace_exclusively", untraceable)
            loss = lambda output, target: output  # noqa: E731
            made = whole_engine(deep(), loss, SGD, LocalCommunicator(), batch=1, m=1, shape=shape, policy=policy)
        with LiveBytes() as live:
            made.step([Microbatch(torch.ones(shape), torch.zeros(1), shape)], 0, 0.0)
        peaks.append(live.peak_bytes)
    assert peaks[1] < peaks[0]


def test_a_part_that_does_not_compute_the_same_twice_is_refused() -> None:
    """Before the first step, where that shows then."""
    restless, policy = _Restless(), ActivationPolicy("optimal", (("input_1", "_1"),))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), restless, nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1))
    with pytest.raises(ValueError, match="calls of _Restless is an attribute that each forward"):
        stage_of(model, policy)
    restless.steady = True
    made = engine_of(model, policy)
    restless.steady = False
    with pytest.raises(RuntimeError, match="does not compute the same twice"):
        train(made, [[(i.float(), t) for i, t in batch] for batch in steps_of(4)])


OF_ONE_SIZE = {
    "timm:vit_tiny_patch16_224": 96,
    "timm:swin_tiny_patch4_window7_224": 96,
    "torchvision:vit_b_32": 64,
    "torchvision:maxvit_t": 448,
}


@pytest.mark.parametrize("name", long_where(OF_ONE_SIZE, *set(OF_ONE_SIZE) - {"timm:vit_tiny_patch16_224"}))
def test_models_of_one_size_are_made_for_the_tiles(name: str) -> None:
    """They ended in the library's assertion, below 60 lines of traceback."""
    side = OF_ONE_SIZE[name]
    with torch.device("meta"):
        model = build_model(name, classes=3, side=side)
    refuse_tile_size(model, name, (2, 3, side, side))
    with torch.device("meta"):
        default = build_model(name, classes=3)
    with pytest.raises(ValueError, match=f"model {name} does not run on tiles of {side} x {side} px.*--tile"):
        refuse_tile_size(default, name, (2, 3, side, side))
    if name == "torchvision:vit_b_32":  # commands give one message
        asked = VerifyCommand(StrategySettings(batch=2), model=name, tile=90)
        for command in (lambda: verify(asked), lambda: Workload(name, 90, 3).in_float32):
            with pytest.raises(ValueError, match=f"{name} .*90 x 90 px.*made for 224 px: use --tile 224"):
                command()


class Fixed(nn.Module):
    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.conv, self.positions = nn.Conv2d(3, 2, 4, 4), nn.Parameter(torch.zeros(1, 2, 4, 4))
        self.looks = looks

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.looks and x.sum() > 1e9:
            return x
        return x if self.looks else x + self.positions


def test_models_of_users_are_run_and_left_as_they_were() -> None:
    for model in (Fixed(looks=False), Fixed(looks=True)):
        refuse_tile_size(model, "mine:model", (2, 3, 16, 16))
        assert model.training
        assert own_side(model) is None
    with pytest.raises(ValueError, match=r"mine:model does not run on tiles of 24 x 24 px: .*another --tile"):
        refuse_tile_size(Fixed(looks=False), "mine:model", (2, 3, 24, 24))


SHAPE = (2, 3, 32, 32)
EXAMINATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "layout": lambda model: takes_channels_last(model, SHAPE),
    "draws": lambda model: refuse_draws(model, SHAPE),
    "size": lambda model: refuse_tile_size(model, "model", SHAPE),
    "updates": lambda model: updated_buffers(model, SHAPE, torch.float32),
    "checkpoints": lambda model: refuse_checkpointed(model, SHAPE, torch.float32),
    "trace": lambda model: trace(model, SHAPE),
    "trace, checked": lambda model: trace_exclusively(model, SHAPE, LocalCommunicator()),
    "boxes": lambda model: streamed(model, 16, SHAPE),
}
LONG = pytest.mark.long
TRANSFORMERS = [pytest.param(transformers_nets.segformer, id="segformer", marks=LONG)]
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


EXACT = [
    ("tests.helpers.transformers_nets:segformer", "single", 64),
    *((f"tests.helpers.transformers_nets:{name}", "gpipe", 64) for name in ("segformer", "vit", "swin", "convnext")),
    ("timm:test_vit", "single", 48),  # a vision transformer at another size
]  # fmt: skip


@pytest.mark.parametrize(("model", "parallel", "px"), long_where(EXACT, *EXACT[1:]))
def test_models_of_other_libraries_are_exact(model: str, parallel: Any, px: int) -> None:
    recompute: Any = "block" if model.startswith("timm") else "none"
    asked = StrategySettings(
        parallel, ranks=1 if parallel == "single" else 2, batch=2, microbatches=2, recompute=recompute
    )
    error = verify(VerifyCommand(asked, model=model, tile=px, steps=1))["max_relative_error"]
    assert error <= (1e-12 if model.startswith("timm") else 1e-13)


class Busy(nn.Module):
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
