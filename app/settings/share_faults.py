"""What is wrong with ``--shares`` as they are asked for, held against the mesh and the number of microbatches."""

from __future__ import annotations

from app.settings.strategy import AUTO, StrategySettings


def share_faults(settings: StrategySettings) -> list[str]:
    """Return what is wrong, a line each; the mesh itself is checked elsewhere."""
    text = settings.shares
    if text == "equal":
        return []
    if settings.planned:
        return [f"--shares {text} is of a strategy that nothing is planned for: name --parallel, recompute and boxes"]
    if settings.name in ("single", "fsdp"):
        why = "has one rank" if settings.name == "single" else "gathers the model with every pass of all ranks alike"
        return [f"--parallel {settings.name} {why}, and takes no --shares {text}: use ddp, or leave it out"]
    if settings.schedule is not None:
        return [f"--schedule says who computes what: leave --shares {text} out"]
    if text == AUTO:
        return _change_faults(settings)
    try:
        changes = settings.read_shares()
    except FileNotFoundError:
        return [f"--shares takes equal, auto, counts such as 3,1, or a CSV file; there is no file {text}"]
    except (OSError, ValueError) as fault:
        return [f"--shares {text}: {fault}"]
    faults, shares = [], changes[0][1]
    if changes[1:]:
        faults += _change_faults(settings)
    whose = "ranks" if settings.group_ranks == 1 else f"groups of {settings.group_ranks} ranks"
    if len(shares) != settings.groups:
        faults.append(
            f"--shares {text} is of {len(shares)} shares, and there are {settings.groups} {whose}: give each one"
        )
    if (given := sum(map(len, shares))) != settings.m:
        faults.append(
            f"--shares {text} gives {given} microbatches, and --microbatches is {settings.m}: leave that out, or let "
            "them sum to it"
        )
    if settings.name == "mast" and {len(share) for share in shares} != {2}:
        faults.append(f"--parallel mast computes 2 microbatches per group; got --shares {text}: use master")
    return faults


def _change_faults(settings: StrategySettings) -> list[str]:
    """Return why shares cannot change while a run goes on."""
    name, text, faults = settings.name, settings.shares, []
    if settings.splits and settings.groups == 1:
        faults.append(
            f"--shares {text} is between groups, and --parallel {name} has one of {settings.group_ranks} ranks: raise "
            "--ranks, or leave it out"
        )
    if name == "mast" and text == AUTO:
        faults.append("--parallel mast computes 2 microbatches per group, whatever its speed: use master")
    if settings.splits and name != "spatial" and settings.stream != "none":
        faults.append(
            f"maps of --stream {settings.stream} are stored for the microbatches that a stage begins with: leave "
            f"--shares {text} out, or give counts"
        )
    if name == "gpipe" and settings.memory is not None:
        faults.append(
            f"gpipe keeps what all microbatches of a group need, which a larger share exceeds --memory with: use "
            f"--parallel 1f1b, or leave --shares {text} out"
        )
    return faults
