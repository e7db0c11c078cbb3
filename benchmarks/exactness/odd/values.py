"""Values between modules: lists, dicts, complex and whole numbers, views that are written to."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.exactness.odd.blocks import Head, Trunked, block, framed


class Pyramid(nn.Module):
    """Images -> features at three sizes, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(3, 8, 2), block(8, 8, 2), block(8, 8, 2)])

    def forward(self, images: Tensor) -> list[Tensor]:
        features = [images]
        for part in self.blocks:
            features.append(part(features[-1]))
        return features[1:]


class Lists(nn.Module):
    """A module that takes a list, from one that gives a list."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.pyramid, self.join, self.head = Pyramid(), _Join(), nn.Conv2d(8, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.join(self.pyramid(images)))


class _Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))

    def forward(self, features: list[Tensor]) -> Tensor:
        *finer, x = [lateral(value) for lateral, value in zip(self.lateral, features, strict=True)]
        for value in reversed(finer):
            x = value + F.interpolate(x, size=value.shape[-2:])
        return x


class Dicts(nn.Module):
    """Features and outputs by name."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.pyramid = Pyramid()
        self.heads = nn.ModuleDict({"grade": Head(8, classes), "stain": Head(8, 2)})

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = OrderedDict((f"p{k}", value) for k, value in enumerate(self.pyramid(images)))
        return {name: head(features["p2"]) for name, head in self.heads.items()} | {"fine": features["p0"].mean(1)}


@dataclass
class Output:
    """Output of a user's module: torch does not look into it."""

    near: Tensor
    far: Tensor


class Dataclasses(Trunked):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.split = _Split()

    def forward(self, images: Tensor) -> Tensor:
        found = self.split(self.stem(images))
        return self.head(self.second(found.near) * found.far)


class _Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Output:
        return Output(torch.tanh(self.near(x)), torch.sigmoid(self.far(x)))


class InPlaceSkips(Trunked):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.mix, self.more = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.stem(images))
        y = self.mix(x)
        y += x
        z = self.more(y)
        z.mul_(0.5).add_(y)
        return self.head(self.second(F.relu_(z)))


class WritesByIndex(Trunked):
    """Writes into parts of a value, and through a view of it."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.stem(images)).clone()
        x[:, 0] = x[:, 1] * 2
        x[..., :2, :] *= 0.5
        flat = x.flatten(1)
        flat[:, ::7].zero_()
        return self.head(self.second(x))


class FillsCanvas(Trunked):
    """Puts what it computes into a new tensor of zeros."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.stem(images))
        canvas = torch.zeros(x.shape[0], 8, 20, 20, dtype=x.dtype, device=x.device)
        canvas[:, :, 2:18, 2:18] = x
        return self.head(self.second(canvas))


class Fourier(Trunked):
    """Filters in the frequency domain; complex values pass between layers."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.weight = nn.Parameter(torch.randn(8, 16, 9, 2) * 0.2)
        self.inner = nn.Parameter(torch.randn(8, 16, 9, 2) * 0.2)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.fft.rfft2(self.first(self.stem(images)), norm="ortho")
        x = x * torch.view_as_complex(self.weight)
        x = x * torch.view_as_complex(self.inner)
        return self.head(self.second(torch.fft.irfft2(x, s=(16, 16), norm="ortho")))


class ComplexWeights(Trunked):
    """Complex parameters, multiplied, and the size of what comes out."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.mix = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat) * 0.3)
        self.turn = nn.Parameter(torch.randn(8, 1, 1, dtype=torch.cfloat))

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.stem(images))
        x = torch.einsum("oc,nchw->nohw", self.mix, torch.complex(x, x.flip(3)))
        return self.head(self.second((x * self.turn).abs()))


class RowsThroughLSTM(Trunked):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.rows = nn.LSTM(8, 4, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.stem(images))
        n, c, h, w = x.shape
        rows, _ = self.rows(x.permute(0, 2, 3, 1).reshape(n * h, w, c))
        return self.head(self.second(rows.reshape(n, h, w, c).permute(0, 3, 1, 2)))


class SteppedGRU(Trunked):
    """A cell that is called row by row, with its state."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.cell, self.out = nn.GRUCell(8, 8), nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.second(self.first(self.stem(images))).mean(3)
        state = rows.new_zeros(rows.shape[0], 8)
        for k in range(16):
            state = self.cell(rows[:, :, k], state)
        return self.out(state)


class Attention(Trunked):
    """torch's own attention and a transformer layer over pixels, and a token in front."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.avg_pool2d(self.first(self.stem(images)), 2).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        attended, weights = self.attention(x, x, x)
        return self.out(self.layer(x + attended)[:, 0]) + weights.mean()


class GatedPooling(nn.Module):
    """Attention-based multiple-instance pooling over the pixels of a tile."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(block(3, 8, 2), block(8, 8, 2))
        self.gate, self.value, self.out = nn.Linear(8, 1), nn.Linear(8, 8), nn.Linear(8, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        bag = self.features(images).flatten(2).mT
        weights = torch.softmax(torch.tanh(self.gate(bag)), 1)
        return self.out((weights * self.value(bag)).sum(1)), weights.squeeze(-1)


class TopPixels(Trunked):
    """Gathers the features of the brightest pixels: whole numbers pass between layers."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.second(self.first(self.stem(images))).flatten(2)
        places = x.sum(1).topk(16, 1).indices
        x = x.gather(2, places[:, None].expand(-1, 8, -1))
        return self.head(x.unflatten(2, (4, 4)))


class Unpools(nn.Module):
    """SegNet: the places of maxima pass to the decoder."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.down, self.bottom, self.up = block(3, 8), block(8, 8), block(8, classes)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, images: Tensor) -> Tensor:
        x, places = self.pool(self.down(images))
        return self.up(self.unpool(self.bottom(x), places))


class Quantized(Trunked):
    """A codebook looked up by the nearest entry, straight-through."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.codes = nn.Embedding(6, 8)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(self.stem(images)).permute(0, 2, 3, 1)
        nearest = torch.cdist(x.flatten(0, 2), self.codes.weight).argmin(1).view(x.shape[:-1])
        found = self.codes(nearest)
        straight = (x + (found - x).detach()).permute(0, 3, 1, 2)
        return self.head(self.second(straight)), (found - x.detach()).square().mean((1, 2))


class Warps(Trunked):
    """A spatial transformer: the tile is sampled along a grid that it chooses."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.choose = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6))

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.stem(images))
        grid = F.affine_grid(self.choose(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.head(self.second(F.grid_sample(x, grid, align_corners=False)))


class Shuffles(nn.Module):
    """Pixels to channels and back, windows rolled and cut out, columns folded."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.down, self.body, self.up = nn.PixelUnshuffle(2), block(12, 16), nn.PixelShuffle(2)
        self.mix, self.head = nn.Linear(16, 16), nn.Conv2d(4, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.roll(self.body(self.down(images)), (-2, -2), (2, 3))
        n, c, h, w = x.shape
        windows = x.view(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5).flatten(4)
        x = self.mix(windows).unflatten(4, (4, 4)).permute(0, 3, 1, 4, 2, 5).reshape(n, c, h, w)
        columns = F.unfold(torch.roll(x, (2, 2), (2, 3)), 2, stride=2)
        return self.head(self.up(F.fold(columns * 0.5, (h, w), 2, stride=2)))


class GivesItsInput(Trunked):
    """Gives the image back with the logits, as an autoencoder's loss wants it."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(images), images


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout2d(F.dropout(x, 0.2, self.training), 0.2, self.training)
        return x + 0.1 * torch.randn_like(x) if self.training else x


noise = framed(lambda: nn.Sequential(Noise(), nn.RReLU(), nn.AlphaDropout(0.1)))

MODELS = (
    "Lists", "Dicts", "Dataclasses", "InPlaceSkips", "WritesByIndex", "FillsCanvas", "Fourier", "ComplexWeights",
    "RowsThroughLSTM", "SteppedGRU", "Attention", "GatedPooling", "TopPixels", "Unpools", "Quantized", "Warps",
    "Shuffles", "GivesItsInput", "noise",
)  # fmt: skip
"""Names of the factories."""
