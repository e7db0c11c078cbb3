"""A loss for any model, whatever it gives: what exactness is tried with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class ProjectedError:
    """A loss for any model: its outputs, projected on random weights, are to be a random number.

    Of a map of the tile's size, the weight of a value is that of its channel, which is fixed, times that of its px, the
    target, so that the projection is a sum over boxes of the tile.
    """

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        """Return the mean loss ().

        Args:
            output: a tensor (n, ...), or tensors in tuples, lists, dicts and the like.
            targets: (n, h, w).
        """
        return self.value(self.sums(output, targets), targets.shape[1] * targets.shape[2])

    def sums(self, output: Any, targets: Tensor) -> Tensor:
        """Return projections (n, outputs), less their targets; of a map (n, c, h, w), what a box adds."""
        if isinstance(output, Tensor) and output.dim() == 4 and (len(output), *output.shape[2:]) == targets.shape:
            weights = _weights(0, (output.shape[1], 1, 1), output)
            return (output * weights * targets[:, None]).flatten(1).sum(1)[:, None].double()
        rows, columns = targets.shape[1:]
        errors = []
        for k, leaf in enumerate(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
            leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            leaf = leaf if leaf.dim() else leaf.reshape(1, 1)  # a model's own loss, beside the rest
            weights = _weights(k, leaf.shape[1:], leaf)
            projection = (leaf * weights).flatten(1).sum(1) / math.sqrt(weights.numel())
            errors.append((projection - targets[:, 0, 0]) * math.sqrt(rows * columns))
        return torch.stack(errors, 1)

    def value(self, sums: Tensor, pixels: int) -> Tensor:
        """Return the mean loss () of tiles of ``pixels`` px."""
        return sums.square().mean(0).sum() / pixels


def _weights(seed: int, shape: Sequence[int], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(like)
