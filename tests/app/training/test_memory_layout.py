"""Models that take images apart by view run without channels_last; all others keep it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from app.settings.strategy import StrategySettings
from app.training.model import takes_channels_last
from app.verify import VerifyCommand, verify
from models.registry import build_model


class Viewing(nn.Module):
    """Takes images apart in a way that channels_last does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts: Tensor = self.stem(x).view(x.shape[0], 4 * 16, -1)
        return self.head(parts.mean(2))


class Looking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def viewing(classes: int) -> nn.Module:
    return Viewing()


def test_view_needs_channels_one_after_the_other() -> None:
    model = Viewing()
    assert not takes_channels_last(model, (2, 3, 4096, 4096))
    assert model.training
    assert model.stem.weight.is_contiguous()


@pytest.mark.parametrize("model", [build_model("unet_w16", classes=2), Looking()], ids=["unet", "looks at its data"])
def test_others_keep_it(model: nn.Module) -> None:
    assert takes_channels_last(model, (2, 3, 64, 64))


def test_a_model_that_views_is_verified() -> None:
    """It ended in torch's RuntimeError: view size is not compatible with input tensor's size and stride."""
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        Viewing()(torch.rand(2, 3, 16, 16).to(memory_format=torch.channels_last))
    asked = StrategySettings(parallel="1f1b", ranks=2, batch=4, microbatches=2)
    result = verify(VerifyCommand(asked, model="tests.app.training.test_memory_layout:viewing", tile=16, steps=1))
    assert result is not None
    assert result.passed
