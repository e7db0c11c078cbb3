"""A user's settings as the engine's own: how the model is spread, and what becomes of what forward passes keep."""

from __future__ import annotations

import torch

from app.settings.sizes import bytes_of
from app.settings.strategy import StrategySettings
from parallel.memory.policy import SMALLEST, ActivationPolicy
from parallel.strategy import Strategy

AHEAD = {"cuda": 256 << 20, "cpu": 0}
"""Bytes of activations on their way, by kind of device."""


def stages_of(asked: StrategySettings, device: torch.device, smallest: int = SMALLEST) -> Strategy:
    """The settings as the engine's own; of a strategy that splits the model."""
    return Strategy(
        asked.schedule_name,
        ranks=asked.world,
        depth=asked.depth,
        m=asked.m,
        chunks=(asked.chunks or 2) if asked.name == "interleaved" else 1,
        cuts=tuple(cut.strip() for cut in asked.cuts.split(",") if cut.strip()),
        schedule_csv=asked.schedule.read_text() if asked.schedule else None,
        keeping=keeping_of(asked, device, smallest),
        shard_optimizer=asked.shard_optimizer == "pair",
        statistics=asked.norm_statistics,
        compile=asked.compile,
        gradient_bytes=asked.bucket_bytes,
    )


def keeping_of(asked: StrategySettings, device: torch.device, smallest: int = SMALLEST) -> ActivationPolicy:
    """What becomes of what forward passes keep."""
    chosen = tuple((first, last) for first, last in (run.split(":") for run in asked.recompute_runs.split(",") if run))
    recompute = asked.recompute
    if recompute == "optimal":
        recompute = "chosen" if chosen else "none"
    return ActivationPolicy(
        recompute,
        chosen,
        asked.offload,
        ahead=(bytes_of(asked.offload_ahead) or 0) if asked.offload_ahead else AHEAD[device.type],
        smallest=smallest,
        host_bytes=bytes_of(asked.offload_host) if asked.offload_host else None,
        optimizer=asked.offload_state != "none",
        parameters=asked.offload_state == "parameters",
        stream=asked.stream_px,
    )
