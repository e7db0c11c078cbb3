"""Models with what makes cutting hard, one thing each, and models drawn at random."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Linears(nn.Module):
    """Linear layers of 6 numbers, by name."""

    layers = "abcd"

    def __init__(self) -> None:
        super().__init__()
        for name in self.layers:
            setattr(self, name, nn.Linear(6, 6))


class Dropping(Linears):
    layers = "ab"

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.a(x), 0.5, training=self.training)
        return torch.relu(self.b(F.dropout(x, 0.5, training=self.training)))


class DroppingInABranch(nn.Module):
    """The value before the branch exists in both modes, the one after it in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.training:
            x = x * x.new_empty(x.shape).bernoulli_(0.5)
        return torch.tanh(self.norm(self.b(x)))


class Sizes(Linears):
    layers = "ab"

    def forward(self, x: Tensor) -> Tensor:
        n, width = x.shape
        y = self.b(torch.tanh(self.a(x)))
        return y.view(n * 2, width // 2).reshape(x.size(0), -1)


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = torch.tanh(self.a(x)).chunk(2, 1)
        pair = Pair(left, torch.sigmoid(right))
        return self.b(pair.first) * pair.second, pair.second


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.a(x))
        z = self.b(y) * 1.5
        z += x
        w = z.view(-1)
        w.mul_(2)
        return torch.sigmoid(z) + y


class Branching(nn.Module):
    """Its path depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else -x


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Sequential(nn.Tanh(), Branching()), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.c(self.b(self.a(x))))


class Tied(nn.Module):
    """Two names for one weight in two modules, and a module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.a, self.b, self.after = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.full((6,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        x = torch.tanh(self.a(x))
        x = torch.tanh(self.a(x))
        return self.after(torch.tanh(self.b(x))) * self.scale


class Named(nn.Module):
    """Two outputs, one made early and used by nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2)
        self.register_buffer("offset", torch.arange(6.0))
        self.register_buffer("hidden", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = self.a(x) + self.offset
        late = torch.relu(self.b(torch.tanh(early))) * self.hidden
        return {"late": late, "more": [early.mean(1)]}


SMALL = [Dropping, DroppingInABranch, Sizes, Tuples, InPlace, Untraceable, Tied, Named]


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
