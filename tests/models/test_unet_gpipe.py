from __future__ import annotations

import pytest
import torch
import torch.fx
from torch import nn

from models.unet_gpipe import UNetGPipe
from tests.helpers.models import parameter_count


@pytest.mark.parametrize(
    ("convs", "base", "published"),
    [
        (6, 72, "362.2M"),
        (11, 128, "2.21B"),
        (24, 128, "4.99B"),
        (24, 160, "7.80B"),
        (48, 160, "15.82B"),
    ],
)
def test_parameter_counts_are_those_of_torchgpipes_memory_benchmark(convs: int, base: int, published: str) -> None:
    with torch.device("meta"):
        count = parameter_count(UNetGPipe(convs, base, classes=1))
    assert published == (f"{count / 1e6:.1f}M" if count < 1e9 else f"{count / 1e9:.2f}B")


@pytest.mark.parametrize("convs", [1, 2, 5])
def test_eleven_cells_of_b_convolutions_and_the_head(convs: int) -> None:
    model = UNetGPipe(convs, 4, classes=2)
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 11 * convs + 1


@pytest.mark.parametrize("size", [(64, 64), (96, 64)])
def test_every_pixel_gets_logits(size: tuple[int, int]) -> None:
    assert UNetGPipe(1, 4, classes=3)(torch.rand(2, 3, *size)).shape == (2, 3, *size)


@pytest.mark.parametrize("norm", ["batch", "group", "instance"])
def test_symbolic_trace_computes_the_same_and_keeps_the_check(norm: str) -> None:
    model = UNetGPipe(2, 4, classes=2, norm=norm).eval()  # type: ignore[arg-type]
    traced = torch.fx.symbolic_trace(model)
    x = torch.rand(1, 3, 64, 96)
    torch.testing.assert_close(traced(x), model(x))
    with pytest.raises(ValueError, match="multiples of 32 px"):
        traced(torch.rand(1, 3, 64, 80))


def test_each_encoder_cell_is_joined_to_its_decoder_cell() -> None:
    graph = torch.fx.symbolic_trace(UNetGPipe(1, 4, classes=2)).graph
    skips = [node.args[0][1] for node in graph.nodes if node.target is torch.cat]
    assert [str(skip.target).split(".")[:2] for skip in skips] == [["encoder", str(i)] for i in (4, 3, 2, 1, 0)]


@pytest.mark.parametrize(("convs", "base"), [(0, 64), (5, 63), (5, 0)])
def test_sizes_that_cannot_be_built_are_refused(convs: int, base: int) -> None:
    with pytest.raises(ValueError, match=f"C even, at least 2; got B {convs}, C {base}"):
        UNetGPipe(convs, base, classes=2)
