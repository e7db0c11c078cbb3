"""What is gathered at once: blocks of a bounded number, no tied parameter torn apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.registry import build_model
from parallel.engine.sharding_units import LARGEST, SMALLEST, recomputed_modules, sharding_units
from tests.helpers.lanes import long_where
from tests.helpers.small_nets import FourierNet


def names_of(module: nn.Module) -> list[list[str]]:
    names = {each: name for name, each in module.named_modules()}
    return [[names[member] for member in unit] for unit in sharding_units(module)]


def chain(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for size in sizes))


def test_blocks_are_units_and_small_neighbours_one_together() -> None:
    assert names_of(nn.ModuleList([chain(*[8] * 10)])) == [[f"0.{k}"] for k in range(10)]
    assert names_of(chain(*[2] * 150)) == [[f"{k}", f"{k + 1}", f"{k + 2}"] for k in range(0, 150, 3)]
    # 1 of 1 + 9 x 16 numbers alone is not worth a message of its own.
    assert names_of(nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), *chain(*[4] * 9)))[0] == ["0", "2"]


def test_layers_of_a_plain_module_are_left_whole() -> None:
    """Their weights may be used without calling them, as attention does."""
    assert names_of(nn.MultiheadAttention(8, 2)) == []
    assert names_of(nn.Linear(4, 4)) == []
    assert names_of(nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 3))) == [["0"], ["1"]]


def test_tied_parameters_stay_together() -> None:
    model = nn.ModuleList(chain(4, 4) for _ in range(6))
    model[4][1].weight = model[1][0].weight
    assert names_of(model) == [["0.0"], ["0.1"], ["1.1"], ["2.0"], ["2.1"], ["3.0"], ["3.1"], ["4.0"], ["5.0"], ["5.1"]]
    inside = nn.ModuleList(chain(4, 4, 4, 4) for _ in range(9))
    inside[3][2].weight = inside[3][0].weight
    assert names_of(inside) == [[f"{k}"] for k in range(9)]


@pytest.mark.parametrize(
    "name", long_where(["resnet18", "unet", "amoebanet(6,190)", "torchvision:swin_t"], "amoebanet(6,190)")
)
def test_units_of_real_models_are_few_and_leave_little(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, classes=3)
    units = sharding_units(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert 5 < len(units) <= SMALLEST
    taken: set[nn.Parameter] = set()
    for unit in units:
        assert unit
        own = {parameter for member in unit for parameter in member.parameters()} - taken
        numbers = sum(parameter.numel() for parameter in own)
        assert numbers >= total / SMALLEST
        # What is larger is one layer, or a block of layers that are not in a container.
        assert numbers <= total / LARGEST + total / SMALLEST or len(unit) == 1
        taken |= own
    assert sum(parameter.numel() for parameter in taken) > 0.9 * total


def test_blocks_are_recomputed_whatever_parameters_they_have() -> None:
    with torch.device("meta"):
        model = build_model("resnet50", classes=3)
    units = sharding_units(model)
    names = {each: name for name, each in model.named_modules()}
    found = [names[each] for each in recomputed_modules(model, units)]
    assert found[:7] == [*(f"layer1.{k}" for k in range(3)), *(f"layer2.{k}" for k in range(4))]
    assert names[units[0][0]].startswith("layer2")  # those of layer1 are too small to be units
    inside = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
    tiny = nn.Sequential(nn.Sequential(inside, nn.Sequential(nn.ReLU(), nn.Tanh())), nn.Linear(99, 99))
    assert recomputed_modules(tiny, sharding_units(tiny)) == [tiny[0]]
    layers = chain(*[8] * 10)
    assert recomputed_modules(layers, sharding_units(layers)) == []  # a layer keeps what enters it anyway


def test_parameters_without_dims_or_of_several_types_are_refused() -> None:
    inner = nn.Module()
    inner.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"inner\.scale is a single number"):
        sharding_units(nn.ModuleDict({"inner": inner}))
    with pytest.raises(ValueError, match=r"complex64 and float32.*--parallel fsdp"):
        sharding_units(FourierNet())
