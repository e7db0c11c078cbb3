"""What is wrong with ``--gradient-buckets`` of a strategy; ``strategy_faults`` asks."""

from __future__ import annotations

from app.settings.strategy import StrategySettings
from parallel.schedule.registry import kind_of


def gradient_faults(settings: StrategySettings) -> list[str]:
    """Of settings whose ranks and stages fit together."""
    if settings.gradient_buckets is None:
        return []
    if settings.bucket_bytes is None:
        return [f"--gradient-buckets takes a size such as 4MiB, or 0; got {settings.gradient_buckets!r}"]
    if settings.undecided or _sums_gradients(settings):
        return []
    ranks = f"{settings.world} rank{'s' * (settings.world > 1)}"
    units = ": it sums those of a unit at once" if settings.name == "fsdp" else ""
    return [
        "--gradient-buckets is about gradients that several ranks have of the same parameters; "
        f"--parallel {settings.name} on {ranks} sums none so{units}: leave it out"
    ]


def _sums_gradients(settings: StrategySettings) -> bool:
    """Ranks hold copies of parameters, and sum their gradients in buckets."""
    if not settings.splits:
        return settings.name == "ddp" and settings.world > 1
    return settings.groups > 1 or bool(settings.team) or kind_of(settings.name).replicas == 2
