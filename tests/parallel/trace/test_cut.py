"""Stages in a row do what the whole model does: outputs, gradients, buffers, state, in training and in evaluation."""

from __future__ import annotations

import copy
import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from benchmarks.exactness.odd import flow, sharing, state, values
from models.registry import build_model
from parallel.graph.partition import Partition, partition_at, partition_equal
from parallel.trace.cut import cut_stage
from parallel.trace.stage_module import StageModule
from parallel.trace.trace import Traced, trace
from tests.helpers.lanes import long_where
from tests.helpers.small_nets import Made


def in_a_row(stages: list[StageModule], example: Tensor) -> Any:
    """What the last stage gives; every stage is given nothing but what it names."""
    values = dict.fromkeys(stages[0].inputs, example)
    for stage in stages:
        given = stage(*(values[name] for name in stage.inputs))
        values |= dict(zip(stage.outputs, given, strict=True))
    (output,) = stages[-1].outputs
    return values[output]


def run(step: Any, model: nn.Module, example: Tensor) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, gradients in training, and buffers after one step from the model's present state."""
    before = copy.deepcopy(model.state_dict())
    model.zero_grad()
    torch.manual_seed(3)
    with torch.set_grad_enabled(model.training):
        outputs = tree_leaves(step(example))
    if model.training:
        total = torch.zeros((), dtype=example.dtype)
        for output in outputs:
            total = total + (output * torch.linspace(1, 2, output.numel(), dtype=output.dtype).view_as(output)).sum()
        total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(before[name])
    return [output.detach() for output in outputs], gradients, buffers


def assert_same(traced: Traced, partition: Partition, model: nn.Module, example: Tensor) -> None:
    """The model and its stages, both modes. Modules are shared, so every run starts from the same state."""
    stages = stages_of(traced, partition)
    assert set().union(*(stage.state_dict() for stage in stages)) == set(model.state_dict())
    assert set().union(*(dict(stage.named_parameters()) for stage in stages)) == dict(model.named_parameters()).keys()
    for training in (True, False):
        model.train(training)
        outputs, gradients, buffers = run(model, model, example)
        for stage in stages:
            stage.train(training)
        outputs_, gradients_, buffers_ = run(lambda x: in_a_row(stages, x), model, example)
        assert len(outputs) == len(outputs_) > 0
        assert all(torch.equal(a, b) for a, b in zip(outputs, outputs_, strict=True))
        assert gradients.keys() == gradients_.keys()
        assert bool(gradients) == training
        for name, gradient in gradients.items():
            scale = gradient.abs().max().clamp(min=1e-300)
            assert (gradients_[name] - gradient).abs().max() / scale <= 1e-10, name
        assert all(torch.equal(buffer, buffers_[name]) for name, buffer in buffers.items())


def stages_of(traced: Traced, partition: Partition) -> list[StageModule]:
    return [cut_stage(traced, partition, stage) for stage in range(partition.depth)]


def theirs(name: str) -> Callable[[], nn.Module]:
    more = {"aux_logits": True, "init_weights": False} if name == "googlenet" else {}
    return functools.partial(torchvision.models.get_model, name, num_classes=3, **more)


SMALL_VIT = {"image_size": 32, "patch_size": 16, "num_layers": 4, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
OURS = ("unet_w4", "unet(2,4)")
THEIRS = ("densenet121", "efficientnet_b0", "convnext_tiny", "swin_v2_t", "shufflenet_v2_x0_5")
"""One of each way to join layers; ``benchmarks/exactness/ZOO.md`` has those whose layers are joined alike."""
LARGER = {"googlenet": 64, "squeezenet1_0": 64}  # auxiliary classifiers need as much in training
MODELS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    **{name: (functools.partial(build_model, name, classes=3), 32, (3,)) for name in OURS},
    **{name: (theirs(name), LARGER.get(name, 32), (3,)) for name in (*THEIRS, *LARGER)},
    "vit": (lambda: torchvision.models.VisionTransformer(**SMALL_VIT, num_classes=3, dropout=0.1), 32, (4,)),
}
QUICK = {"unet_w4", "unet(2,4)", "squeezenet1_0", "vit"}


@pytest.mark.parametrize("name", long_where(MODELS, *set(MODELS) - QUICK))
def test_stages_of_models(name: str) -> None:
    make, px, counts = MODELS[name]
    model, example = make().double(), torch.rand(2, 3, px, px, dtype=torch.float64)
    traced = trace(model, (2, 3, px, px), torch.float64)
    for stages in counts:
        assert_same(traced, partition_equal(traced.graph, stages), model, example)


ODD = (
    *(flow.AsksAtRoot, flow.EarlyReturn, flow.AssertsShape, flow.PadsToMultiple, flow.branch_inside, flow.DropsBlocks),
    *(flow.FunctionAtRoot, flow.DeepSupervision, flow.Routed, state.TrunkWithoutGradients, state.constants),
    *(sharing.TiedWeights, sharing.ReusedModule, sharing.SharedNorm, sharing.Siamese, values.Dicts),
    *(values.Dataclasses, values.InPlaceSkips, values.WritesByIndex),
)
ODD_SHAPE = (2, 3, 32, 32)


@pytest.mark.parametrize("make", ODD)
def test_every_single_cut_of_odd_models(make: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make(3).double()
    traced = trace(model, ODD_SHAPE, torch.float64)
    example = torch.rand(ODD_SHAPE, dtype=torch.float64)
    places = [k for k in range(2, len(traced.graph.layers) - 1) if traced.graph.can_cut(k)]
    assert places
    for place in places:
        assert_same(traced, partition_at(traced.graph, [traced.graph.layers[place].name]), model, example)
    assert_same(traced, partition_equal(traced.graph, len(places) + 1), model, example)
    assert_same(traced, partition_equal(traced.graph, 1), model, example)


class RandomModel(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.linear = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2))
        kinds = ["linear", "linear", "norm", "add", "cat", "relu_", "iadd", "dropout", "size", "split"]
        self.steps = [(draw.choice(kinds), draw.random(), draw.random()) for _ in range(draw.randint(4, 12))]

    def forward(self, x: Tensor) -> Tensor:
        values = [torch.tanh(self.linear[0](x))]
        for kind, first, second in self.steps:
            a, b = values[int(first * len(values))], values[int(second * len(values))]
            match kind:
                case "linear":
                    value = torch.tanh(self.linear[int(second * 4)](a))
                case "norm":
                    value = self.norm[int(second * 2)](a)
                case "add":
                    value = a + b
                case "cat":
                    value = torch.cat([a, b], 1)[:, 1:5]
                case "relu_":
                    value = F.relu(a * 1.5, inplace=True)
                case "iadd":
                    value = a * 2.0
                    value += b
                case "dropout":
                    value = F.dropout(a, 0.3, self.training)
                case "size":
                    value = a * x.size(0)
                case _:
                    left, right = b.chunk(2, 1)
                    value = torch.cat([right, left], 1)
            values.append(value)
        return sum(values[-3:], start=self.linear[0](values[-1]))


@given(seed=st.integers(0, 10_000), data=st.data())
@settings(max_examples=settings().max_examples * 2 // 5)
def test_random_cuts_of_random_models(seed: int, data: st.DataObject) -> None:
    """Skips of any length, changes in place, modules used twice, numbers that cross."""
    model = RandomModel(seed).double()
    traced = trace(model, (3, 4), torch.float64)
    places = [k for k in range(2, len(traced.graph.layers) - 1) if traced.graph.can_cut(k)]
    chosen = sorted(data.draw(st.sets(st.sampled_from(places), max_size=5))) if places else []
    cuts = [traced.graph.layers[place].name for place in chosen]
    assert_same(traced, partition_at(traced.graph, cuts), model, torch.rand(3, 4, dtype=torch.float64))


def test_a_stage_has_the_users_modules_and_the_rest_of_the_model_can_go() -> None:
    model = build_model("resnet18", classes=3)
    traced = trace(model, (2, 3, 32, 32))
    stage = cut_stage(traced, partition_at(traced.graph, ["layer3"]), 1)
    assert stage.get_submodule("layer3.0.conv1") is model.layer3[0].conv1
    assert not any(isinstance(part, torch.fx.GraphModule) for part in stage.modules())
    stage.eval()
    assert not model.layer3[0].bn1.training
    assert model.layer2[0].bn1.training
    gone, kept = weakref.ref(model.conv1.weight), weakref.ref(model.fc.weight)
    del model, traced
    gc.collect()
    assert gone() is None
    assert kept() is stage.get_parameter("fc.weight")


def test_buffers_replaced_after_the_trace() -> None:
    model = state.constants(3)
    traced = trace(model, ODD_SHAPE)
    model.double()
    assert_same(traced, partition_equal(traced.graph, 2), model, torch.rand(ODD_SHAPE, dtype=torch.float64))


def test_frozen_normalisation_stays_frozen() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.body[1].eval()
            return self

    model = Frozen()
    traced = trace(model, (4, 6))
    stages = [stage.train() for stage in stages_of(traced, partition_at(traced.graph, ["body.2"]))]
    assert not stages[0].get_submodule("body.1").training
    assert stages[1].get_submodule("body.3").training


def test_evaluation_that_needs_what_training_does_not_send() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        y = torch.relu(m.b(torch.tanh(m.a(x))))
        return y if m.training else y + x

    traced = trace(Made(compute, a=nn.Linear(6, 6), b=nn.Linear(6, 6)), (4, 6))
    partition = partition_at(traced.graph, ["b"])
    with pytest.raises(ValueError, match=r"evaluation would send values .*x from stage 0 to 1.*begin at b"):
        cut_stage(traced, partition, 1)


def test_a_method_of_evaluation_is_not_placed_by_a_module_of_its_name() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.b(m.softmax(m.a(x)))
        return y if m.training else y.softmax(1)

    net = Made(compute, a=nn.Linear(6, 6), softmax=nn.Softmax(1), b=nn.Linear(6, 6)).double()
    traced = trace(net, (4, 6), torch.float64)
    assert_same(traced, partition_at(traced.graph, ["b"]), net, torch.rand(4, 6, dtype=torch.float64))


def test_values_are_let_go_of_after_their_last_use() -> None:
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x, torch.fx.Proxy):
                alive.append(sum(reference() is not None for reference in made))
                made.append(weakref.ref(x))
            return x * 1.0

    model = nn.Sequential(*(Spy() for _ in range(6)))
    for spy in model:
        spy.register_forward_hook(lambda *_: None)  # kept whole
    traced = trace(model, (4, 6))
    stage = cut_stage(traced, partition_equal(traced.graph, 1), 0)
    alive.clear()
    made.clear()
    with torch.no_grad():
        stage(torch.rand(4, 6))
    assert max(alive) <= 1
