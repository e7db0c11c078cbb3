"""The operations of a layer: what a prediction of its time needs, without a tensor in it.

Recorded by ``fake_run`` while a traced model runs on tensors without data. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Convolution:
    """The shape of a convolution, plain or transposed; lengths in px.

    Attributes:
        batch: tiles.
        kernel: (height, width); ``stride`` and ``dilation`` likewise.
        size_in: (height, width) of what goes in; ``size_out`` of what comes out.
    """

    batch: int
    channels_in: int
    channels_out: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    size_in: tuple[int, ...]
    size_out: tuple[int, ...]
    transposed: bool


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a forward pass. Views and allocations, which touch no memory, are none.

    Attributes:
        name: torch's own: "convolution", "native_batch_norm", "max_pool2d_with_indices", "addmm".
        flops: multiply-adds times two.
        read_bytes: of the tensors it is given.
        written_bytes: of the tensors it gives, or changes.
        differentiable: its backward pass follows.
        passes_on: gradients flow on to earlier layers, not only to parameters.
        convolution: its shape, of a convolution.
    """

    name: str
    flops: int
    read_bytes: int
    written_bytes: int
    differentiable: bool = True
    passes_on: bool = True
    convolution: Convolution | None = None
