"""What the layers of a model cost on this machine, measured one after the other instead of estimated.

Takes a workload; gives costs for microbatches of any number of tiles, in proportion to one tile. Tiles larger than
``LARGEST`` px are measured smaller and drawn on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from app.planning.workload import Workload
from models.registry import build_model
from parallel.cost.layer_cost import Costs, LayerCost
from parallel.profile.measure_layers import measure
from parallel.trace.trace import trace

LARGEST = 512


def measured_costs(work: Workload, device: torch.device, threads: int) -> Callable[[int], Costs]:
    """By tiles of a microbatch; the loss, a small part, is left out.

    Args:
        threads: of a rank, on a CPU.

    Raises:
        ValueError: the model cannot be traced.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = build_model(work.model, classes=work.classes, norm=work.norm)
        model.to(device)
        model.to(memory_format=torch.channels_last)
        shape = (1, 3, work.tile, work.tile)
        one = measure(trace(model, shape), shape, device, scale=min(1.0, LARGEST / work.tile))
    finally:
        torch.set_num_threads(before)
    return lambda tiles: dataclasses.replace(one, layers=tuple(_times(cost, tiles) for cost in one.layers))


def _times(cost: LayerCost, tiles: int) -> LayerCost:
    return LayerCost(tiles * cost.forward_s, tiles * cost.backward_s, tiles * cost.backward_input_s)
