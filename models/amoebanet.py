"""AmoebaNet-D(L, D) for tiles of any size: L normal cells, and a width that grows with D.

Takes float (n, in_channels, h, w), gives logits (n, classes). Real et al. 2019, "Regularized evolution for image
classifier architecture search", in the sizes of Huang et al. 2019 (GPipe, table 1) and Kim et al. 2020 (torchgpipe,
section 4). With 1000 classes the parameter counts are those of torchgpipe's table: (18, 208) 81.5M, (18, 416) 319.0M,
(18, 544) 542.7M, (36, 544) 1.06B, (72, 512) 1.84B. There is no auxiliary classifier, as there. Max pools of 3 x 3 px
take maxima, as in the first paper; torchgpipe's take means, and cut negative values of the image off before the stem.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.amoebanet_cells import NormalCell, ReductionCell
from models.blocks import Norm, init_convolutions, make_norm


class AmoebaNet(nn.Module):
    """An AmoebaNet-D: tiles (n, in_channels, h, w) -> logits (n, classes); global average pooling, so any h and w.

    The size is halved five times, by the stem and four reduction cells. Two of these follow the stem, one stands after
    each of the first two thirds of the normal cells.

    Args:
        normal_cells: L, a multiple of 3.
        filters: D, at least 8. The stem has D // 4 channels; the width of cells doubles from there with each reduction.
        norm: ``batch`` is the published network; ``instance`` needs tiles larger than 32 px to train.

    Raises:
        ValueError: L that is no multiple of 3 or below 3, D below 8.
    """

    def __init__(
        self, normal_cells: int, filters: int, *, classes: int, norm: Norm = "batch", in_channels: int = 3
    ) -> None:
        super().__init__()
        if normal_cells < 3 or normal_cells % 3 or filters < 8:
            raise ValueError(
                "AmoebaNet-D(L, D) has L a multiple of 3, a third at each of three resolutions, and D of at least 8; "
                f"got L {normal_cells}, D {filters}: use L {max(3, normal_cells // 3 * 3)}, D {max(8, filters)}"
            )
        width = filters // 4
        self.stem = nn.Sequential(nn.Conv2d(in_channels, width, 3, 2, 1, bias=False), make_norm(norm, width))
        third = [NormalCell] * (normal_cells // 3)
        self.cells = nn.ModuleList()
        last = before = width
        halved = False
        for kind in [ReductionCell, ReductionCell, *third, ReductionCell, *third, ReductionCell, *third]:
            reduces = kind is ReductionCell
            width *= 2 if reduces else 1
            self.cells.append(kind(last, before, width, halved, norm))
            last, before, halved = kind.widths_out * width, last, reduces
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(last, classes)
        init_convolutions(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        last = before = self.stem(x)
        for cell in self.cells:
            last, before = cell(last, before), last
        logits: Tensor = self.fc(torch.flatten(self.pool(last), 1))
        return logits
