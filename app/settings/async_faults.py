"""Errors of ``--parallel async``, for ``strategy_faults``."""

from __future__ import annotations

from app.settings.strategy import StrategySettings


def async_faults(settings: StrategySettings) -> list[str]:
    """Return what is wrong, a line each."""
    if not settings.is_async:
        given = {
            "staleness": settings.staleness != StrategySettings.staleness,
            "push-rate": settings.push_rate != StrategySettings.push_rate,
            "replay": settings.replay is not None,
        }
        return [
            f"--{name} is for --parallel async; got --parallel {settings.parallel}"
            for name, is_given in given.items()
            if is_given
        ]
    rules = {
        f"--staleness is at least 0 minibatches; got {settings.staleness}": settings.staleness < 0,
        f"--parallel async updates after each microbatch, and all are of one size: --batch {settings.batch} is no "
        f"multiple of --microbatches {settings.m}": settings.m > 0 and settings.batch % settings.m != 0,
        f"--parallel async computes on CPUs; got --device {settings.device}: use --device cpu, or --parallel ddp": (
            settings.device in ("cuda", "mixed")
        ),
        "--parallel async is not planned for: use --recompute none, stage or block, and --stream with a number of px": (
            settings.planned
        ),
        f"--offload-state={settings.offload_state} is not for --parallel async, whose optimizer is on the "
        "server: leave it out": settings.offload_state != "none",
        "--norm-statistics deferred is about the batch of one update: leave it out with --parallel async": (
            settings.norm_statistics == "deferred"
        ),
    }
    return [text for text, is_broken in rules.items() if is_broken] + _replay_faults(settings)


def _replay_faults(settings: StrategySettings) -> list[str]:
    if settings.replay is None:
        return []
    faults = []
    if settings.world > 1 or settings.shares != "equal":
        faults.append(
            f"--replay repeats all updates on one rank; got --ranks {settings.world} and --shares "
            f"{settings.shares}: use --ranks 1 and leave --shares out"
        )
    try:
        first = [push for push in settings.push_rule().replayed if push.step == 0]
    except FileNotFoundError:
        return [*faults, f"--replay {settings.replay} is not a file"]
    except (OSError, ValueError) as fault:
        return [*faults, f"--replay {settings.replay}: {fault}"]
    if len(first) != settings.m:
        faults.append(
            f"--replay {settings.replay} has {len(first)} updates a step, and --microbatches is "
            f"{settings.m}: add --microbatches {len(first)}"
        )
    return faults
