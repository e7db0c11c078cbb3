"""Models that are made for one size of tiles: made for that of the run where they can be, else refused by that size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from app.planning.workload import Workload
from app.settings.strategy import StrategySettings
from app.verify import VerifyCommand, verify
from models.registry import build_model
from parallel.trace.without_data import own_side, refuse_tile_size
from tests.helpers.lanes import long_where

OF_ONE_SIZE = {
    "timm:vit_tiny_patch16_224": 96,
    "timm:swin_tiny_patch4_window7_224": 96,
    "timm:swinv2_tiny_window8_256": 64,
    "timm:mixer_s16_224": 64,
    "unet:swin_tiny_patch4_window7_224": 96,
    "torchvision:vit_b_32": 64,
    "torchvision:maxvit_t": 448,
}


@pytest.mark.parametrize(
    "name",
    long_where(OF_ONE_SIZE, *set(OF_ONE_SIZE) - {"timm:vit_tiny_patch16_224", "unet:swin_tiny_patch4_window7_224"}),
)
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


def test_one_message_names_the_size() -> None:
    name = "torchvision:vit_b_32"
    with pytest.raises(ValueError, match=f"{name} .*90 x 90 px.*made for 224 px: use --tile 224"):
        verify(VerifyCommand(StrategySettings(batch=2), model=name, tile=90))
    with pytest.raises(ValueError, match=f"{name} .*90 x 90 px.*made for 224 px: use --tile 224"):
        Workload(name, 90, 3).trace()


def test_a_vision_transformer_at_another_size_is_exact() -> None:
    asked = StrategySettings("single", recompute="block", batch=2, microbatches=2)
    result = verify(VerifyCommand(asked, model="timm:test_vit", tile=48, steps=1))
    assert result is not None
    assert result.max_relative_error <= 1e-12


class Fixed(nn.Module):
    """A user's model with positions for one size."""

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
