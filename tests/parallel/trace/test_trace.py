"""Layers as they are: how deep tracing goes, what it records of each layer, what it leaves as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.blocks import FrozenBatchNorm2d
from parallel.cost.cluster import device_named
from parallel.cost.roofline import cost_on
from parallel.trace.trace import run_again, trace
from tests.helpers.small_nets import Made
from tests.parallel.engine.test_inference import AuxiliaryInTraining


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.1)
        self.never = nn.Dropout(0.0)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        n = x.size(0)
        x = F.adaptive_avg_pool2d(x, 1).view(n, -1)
        return self.fc(self.never(self.drop(x))) + x.detach().sum()


class Refuses(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Linear(4, 4)
        self.inner.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "inner buffer":
            self.inner.mean = x.mean(0)
        if self.how == "data":
            return self.inner(x) if bool(x.sum() > 0) else x
        if self.how == "no_grad":
            with torch.no_grad():
                return self.inner(x)
        if self.how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)
        if self.how == "noise":
            return self.inner(x + torch.tensor(np.random.rand(4).tolist()))  # noqa: NPY002
        if self.how == "drawn":
            return self.inner(x) if float(torch.rand(1)) < 0.5 else x
        return self.inner(x)


class Around(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.part = nn.Sequential(nn.Tanh(), Refuses(how))
        self.after = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.part(self.before(x)))


def test_facts_of_layers() -> None:
    traced = trace(Body(), (2, 3, 8, 8))
    layers = traced.graph.by_name
    assert [layer.kind for layer in traced.graph.layers] == [
        "input", "Conv2d", "BatchNorm2d", "ReLU", "size", "adaptive_avg_pool2d", "view", "Dropout", "Dropout", "Linear",
        "detach", "sum", "add", "output",
    ]  # fmt: skip
    conv = layers["conv"]
    assert (conv.module, conv.inputs, conv.differentiable) == ("conv", ("x",), True)
    assert conv.output_bytes == 2 * 4 * 8 * 8 * 4
    assert conv.param_bytes == 4 * 3 * 9 * 4
    assert conv.flops == 2 * (2 * 4 * 8 * 8) * (3 * 9)
    assert (layers["norm"].param_bytes, layers["norm"].largest_param_bytes) == (2 * 4 * 4, 4 * 4)
    assert layers["size"].output_bytes == 0
    assert not any(layers[name].differentiable for name in ("x", "size", "detach", "sum_1"))
    assert [layer.name for layer in traced.graph.layers if layer.random] == ["drop"]
    assert {path: traced.graph.classes[path] for path in ("", "conv")} == {"": "Body", "conv": "Conv2d"}
    # The ReLU changes what the BatchNorm made.
    assert traced.graph.inseparable == ((2, 3),)


class Attending(nn.Module):
    """Attention that may drop."""

    def __init__(self, dropout_p):
        super().__init__()
        self.dropout_p = dropout_p

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout_p)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_attention_with_nothing_to_drop_draws_no_numbers(dropout_p):
    layers = trace(Attending(dropout_p), (2, 3, 8, 8)).graph.layers
    assert any(layer.random for layer in layers) == (dropout_p > 0)


def test_attention_costs_its_two_products() -> None:
    graph, device = trace(Attending(0.0), (2, 3, 512, 32)).graph, device_named("v100-16gb")
    flops = 2 * 2 * (2 * 3) * 512 * 512 * 32
    assert sum(layer.flops for layer in graph.layers) == flops
    assert max(layer.forward_s for layer in cost_on(graph, device).layers) > flops / device.flops["float32"]


class OwnNorm(FrozenBatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_norm_may_draw_numbers_in_a_forward_of_its_own_alone() -> None:
    layers = trace(nn.Sequential(FrozenBatchNorm2d(3), OwnNorm(3)), (2, 3, 8, 8)).graph.by_name
    assert [layers[name].random for name in ("_0", "_1")] == [False, True]


class WithoutAutograd(nn.Module):
    """Its linear layer is not taken apart by autograd; what it gives depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.inner(x)[: int(torch.count_nonzero(self.norm(x))) + 1]


def test_a_model_that_depends_on_its_data_runs_on_zeros() -> None:
    model = nn.Sequential(WithoutAutograd())
    layer = trace(model, (3, 4)).graph.by_name["_0"]
    assert layer.output_bytes == 8 * 4
    assert [op.flops for op in layer.ops if op.name == "linear"] == [2 * 3 * 4 * 8]  # those of its parts
    assert model[0].norm.num_batches_tracked == 0


@pytest.mark.parametrize("how", ["data", "no_grad", "autocast", "drawn", "noise", "hook", "inner buffer"])
def test_innermost_module_that_cannot_be_traced_is_a_leaf(how: str) -> None:
    model = Around(how)
    if how == "hook":
        model.part[1].register_forward_hook(lambda module, inputs, output: output * 2)
    traced = trace(model, (2, 4))
    assert [layer.module for layer in traced.graph.layers if layer.module] == ["before", "part.0", "part.1", "after"]
    assert traced.graph.by_name["part_1"].random  # nobody knows
    assert traced.graph.by_name["part_1"].differentiable == (how != "no_grad")
    assert not traced.graph.by_name["part_0"].random


def test_model_that_cannot_be_traced() -> None:
    with pytest.raises(ValueError, match=r"Refuses itself cannot be cut .*\n?.*test_trace.py:\d+.*submodule"):
        trace(Refuses("data"), (2, 4))
    with pytest.raises(ValueError, match="switches gradients or autocast"):
        trace(Refuses("autocast"), (2, 4))
    hooked = Around("")
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks of the model itself"):
        trace(hooked, (2, 4))
    with pytest.raises(ValueError, match="example input, at module 'before'"):
        trace(Around(""), (2, 5))


def test_same_graph_is_shared_and_a_different_one_is_not() -> None:
    shared = trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()), (2, 3, 8, 8))
    assert shared.training is shared.evaluation
    traced = trace(AuxiliaryInTraining(), (2, 3, 64, 64))
    training = {node.name for node in traced.training.graph.nodes}
    evaluation = {node.name for node in traced.evaluation.graph.nodes}
    assert evaluation < training
    assert "early" in training - evaluation


def test_ranges_without_cuts() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.b(self.a(torch.tanh(self.a(x)))))  # a: 1 to 3; b: 4
            z = y * self.scale  # 6 to 7
            view = z.view(-1)  # 8
            view.add_(1)  # 9 changes what 7 made
            return torch.tanh(torch.tanh(z))

    graph = trace(Shares(), (2, 4)).graph
    assert [layer.kind for layer in graph.layers][1:10] == [
        "Linear", "tanh", "Linear", "Linear", "tanh", "get_attr", "mul", "view", "add_",
    ]  # fmt: skip
    assert graph.inseparable == ((1, 3), (6, 9))


def by_size() -> nn.Module:
    compute = lambda m, x: m.large(x) if x.shape[-1] > 40 else m.small(x)  # noqa: E731
    return Made(compute, small=nn.Conv2d(3, 4, 3), large=nn.Conv2d(3, 4, 5))


IN_PARTS = Made(lambda _, x: torch.stack([part.sum() for part in x.split(8, dim=2)]))
"""As many parts as a tile has rows of 8 px."""


IN_PLACE = Made(lambda _, x: x.flatten(1).__iadd__(1))
"""Adds in place to what may be a view."""


@pytest.mark.parametrize("model", [by_size(), nn.Sequential(nn.Conv2d(3, 3, 1), by_size()), IN_PARTS, IN_PLACE])
def test_what_depends_on_the_side_of_tiles_is_followed_for_each(model: nn.Module) -> None:
    assert not trace(model, (1, 3, 32, 32)).any_side


def test_graphs_that_hold_for_any_side_run_on_others() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten())
    traced = trace(model, (1, 3, 32, 32))
    assert traced.any_side
    assert run_again(traced, (1, 3, 48, 48)).graph == trace(model, (1, 3, 48, 48)).graph
    with pytest.raises(ValueError, match="does not run"):
        run_again(traced, (1, 3, 2, 2))


def test_state_that_is_updated_is_the_same_for_any_side() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)), nn.ReLU())
    traced = trace(model, (1, 3, 32, 32))
    assert traced.updated
    assert traced.any_side
    for again in (run_again(traced, (1, 3, 48, 48)), trace(model, (1, 3, 48, 48))):
        assert again.updated == traced.updated


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d, functools.partial(nn.BatchNorm2d, affine=False)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_norms_that_are_not_taken_apart_leave_the_same_facts(
    kind: Callable[[int], nn.Module], dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), kind(4), nn.ReLU(inplace=True), looked_up())
    graph = trace(model, (2, 3, 16, 16), autocast=dtype).graph
    monkeypatch.setattr("parallel.trace.op_recorder._is_normed", lambda *given: False)
    assert trace(model, (2, 3, 16, 16), autocast=dtype).graph == graph


def test_mixed_precision_keeps_norms_and_upsampled_maps_in_float32_as_on_gpus() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1), nn.Upsample(scale_factor=2))
    graph = trace(model, (1, 3, 8, 8), autocast=torch.bfloat16).graph
    values = 4 * 8 * 8
    assert [layer.output_bytes for layer in graph.layers[1:5]] == [2 * values, 4 * values, 2 * values, 4 * 4 * values]
    assert 4 * values in [size for _, size in graph.by_name["_1"].saved]


def looked_up() -> nn.Module:
    made = Made(lambda m, x: F.batch_norm(x, m.mean, m.var, training=True))
    made.register_buffer("mean", torch.zeros(4))
    made.register_buffer("var", torch.ones(4))
    return made
