from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from models.blocks import SideCheck, conv_norm_relu, group_count, init_convolutions, make_norm


def test_groups_divide_the_channels_and_are_no_instance_norm() -> None:
    for channels in range(1, 300):
        groups = group_count(channels)
        assert channels % groups == 0
        assert groups <= 32
        assert channels == 1 or channels // groups >= 2


@pytest.mark.parametrize(("channels", "groups"), [(16, 8), (64, 32), (96, 32), (2048, 32), (24, 8), (7, 1)])
def test_groups_of_usual_widths(channels: int, groups: int) -> None:
    assert group_count(channels) == groups


def test_norms_are_what_their_names_say() -> None:
    assert isinstance(make_norm("batch", 64), nn.BatchNorm2d)
    group = make_norm("group", 64)
    assert isinstance(group, nn.GroupNorm)
    assert group.num_groups == 32
    assert not list(make_norm("instance", 64).parameters())


def test_unknown_norm_is_refused_with_the_choice() -> None:
    with pytest.raises(ValueError, match="batch, group, instance, frozen, layer; got 'sync'"):
        make_norm("sync", 64)  # type: ignore[arg-type]


def test_frozen_norm_keeps_its_statistics_and_trains_its_scale() -> None:
    norm, x = make_norm("frozen", 4).train(), torch.rand(2, 4, 5, 5)
    assert not norm.training
    norm.running_mean.fill_(0.5)  # type: ignore[operator, union-attr]
    norm(x).sum().backward()
    torch.testing.assert_close(norm(x), (x - 0.5) / (1 + 1e-5) ** 0.5)
    assert norm.weight.grad is not None
    assert norm.num_batches_tracked == 0


def test_layer_norm_looks_at_one_px() -> None:
    x = torch.rand(2, 4, 5, 6)
    expected = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(make_norm("layer", 4)(x), expected)


@pytest.mark.parametrize("norm", ["group", "instance", "frozen", "layer"])
def test_a_tile_does_not_see_its_neighbours_in_the_batch(norm: str) -> None:
    torch.manual_seed(0)
    block = conv_norm_relu(3, 8, norm)  # type: ignore[arg-type]
    x = torch.rand(3, 3, 9, 7)
    torch.testing.assert_close(block(x)[1:2], block(x[1:2]))


@pytest.mark.parametrize(("mode", "fan"), [("fan_in", 64 * 9), ("fan_out", 128 * 9)])
def test_initial_convolutions_keep_the_variance(mode: Literal["fan_in", "fan_out"], fan: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 128, 3)
    init_convolutions(conv, mode)
    assert conv.weight.std().item() == pytest.approx((2 / fan) ** 0.5, rel=0.02)
    assert conv.bias is not None
    assert not conv.bias.any()


def test_side_check_passes_multiples_and_names_the_next_ones() -> None:
    check = SideCheck(16)
    x = torch.rand(1, 3, 32, 48)
    assert check(x) is x
    with pytest.raises(ValueError, match=r"multiples of 16 px .* 4 times; got 48 x 40 px: use --tile 32 or 48"):
        check(torch.rand(1, 3, 40, 48))
    with pytest.raises(ValueError, match="use --tile 16 or 32"):
        check(torch.rand(1, 3, 5, 16))
