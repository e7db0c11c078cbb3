"""The arithmetic of convolutions and linear layers with the two halves of their backward pass apart.

Takes inputs, weights and the gradient of the output; gives the gradient of the input, or those of weight and bias, by
the kernels that autograd itself calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerOperation(Protocol):
    """The arithmetic of a layer without its parameters."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the layer."""
        ...

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``x`` from that of the output."""
        ...

    def parameter_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of weight and bias that are ``wanted``; the values of ``weight`` do not matter."""
        ...


@dataclass(frozen=True)
class DeferredConvolution:
    """A convolution of maps in n dims, or a transposed one; by torch's words for them."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output: (n, channels out, ...)."""
        result: Tensor = torch.ops.aten.convolution.default(x, weight, bias, *self._geometry)
        return result

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``x``: (n, channels in, ...)."""
        result: Tensor = self._backward(gradient, x, weight, None, [True, False, False])[0]
        return result

    def parameter_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of weight and bias, None for one that is not wanted."""
        channels = gradient.shape[1]
        result: Sequence[Tensor | None] = self._backward(gradient, x, weight, [channels], [False, *wanted])
        return result[1:]

    @property
    def _geometry(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def _backward(self, gradient: Tensor, x: Tensor, weight: Tensor, sizes: list[int] | None, mask: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward.default(gradient, x, weight, sizes, *self._geometry, mask)


class Linear:
    """A linear layer over the last dim of its input."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output: (..., features out)."""
        return F.linear(x, weight, bias)

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``x``: (..., features in)."""
        return gradient @ weight

    def parameter_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of weight and bias, None for one that is not wanted."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            rows.t() @ x.reshape(-1, x.shape[-1]) if wanted[0] else None,
            rows.sum(0) if wanted[1] else None,
        )
