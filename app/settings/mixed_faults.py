"""Errors of ``--device mixed``, for ``strategy_faults``."""

from __future__ import annotations

from app.settings.launcher import find_launch
from app.settings.strategy import StrategySettings


def mixed_faults(settings: StrategySettings) -> list[str]:
    """Return what is wrong, a line each."""
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
        "--device mixed is not planned for: name what is computed again, and the side of boxes": settings.planned
        and settings.parallel != "auto",
        f"--precision {settings.precision} rounds differently on a CPU and on a GPU, so that --device mixed would not "
        "be the plain step: leave it out for fp32": settings.precision in ("tf32", "bf16"),
        f"--offload-state={settings.offload_state} is for ranks that are all on a GPU; got --device mixed": (
            settings.offload_state != "none"
        ),
        "--device mixed talks over torch.distributed, and these ranks were started by an MPI launcher: start them with "
        "torchrun or --ranks": launch is not None and launch.mpi,
    }
    return [text for text, is_broken in rules.items() if is_broken]
