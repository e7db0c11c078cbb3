"""Gradients in flat buckets, each summed over ranks at once.

Takes the parameters of a module; gives ``Bucket``s in reverse order of the parameters, which is about the order in
which backward completes their gradients (Li et al. 2020, PyTorch Distributed, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

BUCKET_BYTES = 25 << 20
"""Of gradients that are summed at once, unless asked otherwise."""


class Bucket:
    """Parameters of one dtype whose gradients lie in one flat tensor, with one number behind them per parameter: how
    many ranks had a gradient for it. One that nobody had stays None, so that the optimizer passes it over as it would
    in a single process.

    Attributes:
        touched: numbers of the parameters that this rank has a gradient for.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        first = parameters[0]
        size = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(size + len(parameters), dtype=first.dtype, device=first.device)
        self.touched: set[int] = set()
        self._ranks = self.flat[size:]
        self.views: list[Tensor] = []
        offset = 0
        for parameter in parameters:
            # A dense parameter's own strides fit into as many elements, whatever the order of its dims.
            self.views.append(torch.as_strided(self.flat, parameter.shape, parameter.stride(), offset))
            offset += parameter.numel()
        self.missing = 0

    def clear(self) -> None:
        """Zero the gradients and put them where backward adds to them."""
        self.flat.zero_()
        self.touched.clear()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def count(self) -> None:
        """Before the sum: put down which parameters this rank has a gradient for."""
        self._ranks.fill_(1)
        for number in self._untouched():
            self._ranks[number].zero_()

    def settle(self) -> None:
        """After the sum: take the gradient from the parameters that nobody had one for. A rank that has them all knows
        without reading from the device, which would wait for the sum."""
        if untouched := self._untouched():
            ranks = self._ranks.tolist()
            for number in untouched:
                if not ranks[number]:
                    self.parameters[number].grad = None

    def _untouched(self) -> list[int]:
        return [number for number in range(len(self.parameters)) if number not in self.touched]


def bucketed(parameters: Sequence[nn.Parameter], bucket_bytes: int | None = None) -> list[list[nn.Parameter]]:
    """``parameters`` from the last to the first, in runs of one dtype of at most ``bucket_bytes``, or one parameter.

    Args:
        bucket_bytes: 0: as long as the dtype is the same; None: ``BUCKET_BYTES``.
    """
    most = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    runs: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        own = parameter.numel() * parameter.element_size()
        if not runs or runs[-1][0].dtype != parameter.dtype or (most and size + own > most):
            runs.append([])
            size = 0
        runs[-1].append(parameter)
        size += own
    return runs
