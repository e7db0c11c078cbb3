"""Whether a model can be given images in channels_last, the layout in which convolutions are fastest.

Takes a model and the shape of a microbatch; gives an answer without memory or time. Code that takes images apart by
``view`` expects the channels to lie one after the other, and torch refuses anything else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel.trace.fake_run import empty_like, once_each
from parallel.trace.trace import left_as_it_was

LEFT_OUT = (
    "channels_last is left out: the model takes its images apart in a way that this layout does not allow (view "
    "after a convolution, say); reshape in place of view would make it faster"
)


def takes_channels_last(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return False where ``model`` runs on images that lie channel by channel, and not on channels_last ones.

    Args:
        shape: (n, c, h, w) of a microbatch.
    """
    return _runs(model, shape, torch.channels_last) or not _runs(model, shape, torch.contiguous_format)


def _runs(model: nn.Module, shape: tuple[int, ...], layout: torch.memory_format) -> bool:
    state: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dtype = next((p.dtype for p in model.parameters()), torch.float32).to_real()
    with left_as_it_was(model), torch.random.fork_rng(devices=[]), mode:
        values = once_each(state, lambda t: _laid_out(empty_like(t, torch.device("cpu")), layout))
        images = _laid_out(torch.empty(shape, dtype=dtype), layout)
        try:
            torch.func.functional_call(model, values, (images,), tie_weights=False)
        except Exception:  # whatever torch raises for a layout, and what a model that looks at its data does
            return False
    return True


def _laid_out(tensor: Tensor, layout: torch.memory_format) -> Tensor:
    return tensor.to(memory_format=layout) if tensor.dim() == 4 else tensor
