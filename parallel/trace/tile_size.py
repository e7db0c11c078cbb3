"""Check that a model runs on tiles of a size, before any slide is read: vision transformers are often made for one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from parallel.trace.without_data import preserve_module_state, run_without_data

NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    NotImplementedError,
)
"""Faults of a run without data that say nothing about one with data."""

LARGEST_RUN = 512
"""px of tiles on which a model is run that names no size of its own, where a run without data fails."""


def refuse_tile_size(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Refuse tiles on which ``model`` does not run.

    Args:
        name: ``--model``.
        shape: (n, c, h, w) of a microbatch.

    Raises:
        ValueError: which size it is made for, as far as it says so, and what to do.
    """
    with preserve_module_state(model):
        model.eval()
        try:
            run_without_data(model, shape)
        except NEEDS_DATA:
            return
        except Exception as fault:
            own = own_side(model)
            without_data = any(parameter.is_meta for parameter in model.parameters())
            if own is None and not without_data and (max(shape[2:]) > LARGEST_RUN or _runs(model, shape)):
                return
            use = f"it is made for {own} px: use --tile {own}, or" if own else "use another --tile, or"
            raise ValueError(
                f"model {name} does not run on tiles of {shape[3]} x {shape[2]} px: "
                f"{' '.join(str(fault).split())[:300]}; {use} a model that takes any size, such as resnet50 or "
                "timm:convnext_tiny"
            ) from fault


def own_side(model: nn.Module) -> int | None:
    """Return the side in px that a model of timm, torchvision or transformers is made for; None where it says none."""
    for part in model.modules():
        config = getattr(part, "pretrained_cfg", None)
        sizes: list[Any] = [config.get("input_size")] if isinstance(config, dict) else []
        sizes += [getattr(part, "image_size", None), getattr(getattr(part, "config", None), "image_size", None)]
        for size in sizes:
            side = size[-1] if isinstance(size, list | tuple) and size else size
            if isinstance(side, int):
                return side
    return None


def _runs(model: nn.Module, shape: tuple[int, ...]) -> bool:
    parameter = next(model.parameters(), torch.empty(()))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(torch.zeros((1, *shape[1:]), dtype=parameter.dtype.to_real(), device=parameter.device))
    except Exception:  # any code of a model that is not ours
        return False
    return True
