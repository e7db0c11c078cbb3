"""Errors of ranks that are not alike: unequal ``--shares``, ``--device mixed`` and ``--parallel async``.

Takes ``StrategySettings``; returns a line for each error. ``strategy_errors`` checks the mesh itself.
"""

from __future__ import annotations

from app.settings.fields import at_least, broken
from app.settings.launcher import find_launch
from app.settings.strategy import AUTO, StrategySettings


def share_errors(settings: StrategySettings) -> list[str]:
    """Return the errors of ``--shares`` on a mesh and a number of microbatches."""
    text, name = settings.shares, settings.name
    if text == "equal":
        return []
    if settings.needs_plan:
        return [f"--shares {text} is of a strategy that nothing is planned for: name --parallel, recompute and boxes"]
    if name in ("single", "fsdp"):
        why = "has one rank" if name == "single" else "gathers the model with every pass of all ranks alike"
        return [f"--parallel {name} {why}, and takes no --shares {text}: use ddp, or leave it out"]
    if settings.schedule is not None:
        return [f"--schedule says who computes what: leave --shares {text} out"]
    if text == AUTO:
        return _of_changes(settings)
    try:
        changes = settings.read_shares()
    except FileNotFoundError:
        return [f"--shares takes equal, auto, counts such as 3,1, or a CSV file; there is no file {text}"]
    except (OSError, ValueError) as fault:
        return [f"--shares {text}: {fault}"]
    shares = changes[0][1]
    given = sum(map(len, shares))
    whose = "ranks" if settings.group_ranks == 1 else f"groups of {settings.group_ranks} ranks"
    return (_of_changes(settings) if changes[1:] else []) + broken(
        {
            f"--shares {text} is of {len(shares)} shares, and there are {settings.groups} {whose}: give each one": (
                len(shares) != settings.groups
            ),
            f"--shares {text} gives {given} microbatches, and --microbatches is {settings.m}: leave that out, or let "
            "them sum to it": given != settings.m,
            f"--parallel mast computes 2 microbatches per group; got --shares {text}: use master": name == "mast"
            and {len(share) for share in shares} != {2},
        }
    )


def _of_changes(settings: StrategySettings) -> list[str]:
    """Return why shares cannot change while a run continues."""
    name, text = settings.name, settings.shares
    return broken(
        {
            f"--shares {text} is between groups, and --parallel {name} has one of {settings.group_ranks} ranks: raise "
            "--ranks, or leave it out": settings.splits and settings.groups == 1,
            "--parallel mast computes 2 microbatches per group, whatever its speed: use master": name == "mast"
            and text == AUTO,
            f"maps of --stream {settings.stream} are stored for the microbatches that a stage begins with: leave "
            f"--shares {text} out, or give counts": settings.splits and name != "spatial" and settings.stream != "none",
            "gpipe keeps what all microbatches of a group need, which a larger share exceeds --memory with: use "
            f"--parallel 1f1b, or leave --shares {text} out": name == "gpipe" and settings.memory is not None,
        }
    )


def mixed_errors(settings: StrategySettings) -> list[str]:
    """Return the errors of ``--device mixed``."""
    if not settings.is_mixed:
        given = (("--cpu-ranks", settings.cpu_ranks), ("--mixed-sums", settings.mixed_sums))
        return [
            f"{flag} is for --device mixed; got {value} with --device {settings.device}: leave it out"
            for flag, value in given
            if value
        ]
    launch = find_launch()
    here = launch.local_world if launch else settings.ranks
    needs = "--device mixed needs a rank on the CPU and one on a GPU"
    rules = {
        f"{needs}; got {here} rank: use --ranks 2 or more": here == 1,
        f"{needs}: --cpu-ranks is 1 to {here - 1} of the {here} ranks of a machine; got {settings.cpu_ranks}": here > 1
        and not 0 < settings.cpu_ranks < here,
        "--device mixed is for --parallel ddp, whose ranks each compute the whole model; got --parallel "
        f"{settings.parallel}": settings.parallel != "ddp",
        "--device mixed is not planned for: name what is computed again, and the side of boxes": settings.needs_plan
        and settings.parallel != "auto",
        f"--precision {settings.precision} rounds differently on a CPU and on a GPU, so that --device mixed would not "
        "be the plain step: leave it out for fp32": settings.precision in ("tf32", "bf16"),
        f"--offload-state={settings.offload_state} is for ranks that are all on a GPU; got --device mixed": (
            settings.offload_state != "none"
        ),
        f"--zero {settings.zero} is for ranks that are all on a GPU, or all on a CPU; got --device mixed": settings.zero
        > 0,
        "--device mixed talks over torch.distributed, and these ranks were started by an MPI launcher: start them with "
        "torchrun or --ranks": launch is not None and launch.mpi,
    }
    return broken(rules)


def async_errors(settings: StrategySettings) -> list[str]:
    """Return the errors of ``--parallel async``."""
    if settings.name != "async":
        given = {
            "staleness": settings.staleness != StrategySettings.staleness,
            "push-rate": settings.push_rate != StrategySettings.push_rate,
            "replay": settings.replay is not None,
        }
        return [f"--{name} is for --parallel async; got --parallel {settings.parallel}" for name in broken(given)]
    rules = {
        **at_least(settings, staleness=0),
        f"--parallel async updates after each microbatch, and all are of one size: --batch {settings.batch} is no "
        f"multiple of --microbatches {settings.m}": settings.m > 0 and settings.batch % settings.m != 0,
        f"--parallel async computes on CPUs; got --device {settings.device}: use --device cpu, or --parallel ddp": (
            settings.device in ("cuda", "mixed")
        ),
        "--parallel async is not planned for: use --recompute none or block, and --stream with a number of px": (
            settings.needs_plan
        ),
        f"--offload-state={settings.offload_state} is not for --parallel async, whose optimizer is on the "
        "server: leave it out": settings.offload_state != "none",
        "--norm-statistics deferred is about the batch of one update: leave it out with --parallel async": (
            settings.norm_statistics == "deferred"
        ),
    }
    return broken(rules) + _replay_errors(settings)


def _replay_errors(settings: StrategySettings) -> list[str]:
    if settings.replay is None:
        return []
    errors = []
    if settings.world > 1 or settings.shares != "equal":
        errors.append(
            f"--replay repeats all updates on one rank; got --ranks {settings.world} and --shares "
            f"{settings.shares}: use --ranks 1 and leave --shares out"
        )
    try:
        first = [push for push in settings.push_rule().replayed if push.step == 0]
    except FileNotFoundError:
        return [*errors, f"--replay {settings.replay} is not a file"]
    except (OSError, ValueError) as fault:
        return [*errors, f"--replay {settings.replay}: {fault}"]
    if len(first) != settings.m:
        errors.append(
            f"--replay {settings.replay} has {len(first)} updates a step, and --microbatches is "
            f"{settings.m}: add --microbatches {len(first)}"
        )
    return errors
