"""What is wrong with ``--shares`` as they are asked for, held against the mesh and the number of microbatches."""

from __future__ import annotations

from app.settings.strategy import AUTO, TICKETS, StrategySettings


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
        return [f"--developer schedule says who computes what: leave --shares {text} out"]
    if text in (AUTO, TICKETS):
        if settings.name == "ddp":
            return []
        return [
            f"--shares {text} is for ranks that each compute the whole model, and --parallel {settings.name} lays down "
            "beforehand who computes what: use ddp, or shares such as 3,1"
        ]
    try:
        changes = settings.read_shares()
    except FileNotFoundError:
        return [f"--shares takes equal, auto, tickets, counts such as 3,1, or a CSV file; there is no file {text}"]
    except (OSError, ValueError) as fault:
        return [f"--shares {text}: {fault}"]
    faults, shares = [], changes[0][1]
    if changes[1:] and settings.name != "ddp":
        faults.append(
            f"--parallel {settings.name} keeps the shares that it begins with, and {text} changes them at step "
            f"{changes[1][0]}: use ddp"
        )
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
