"""What is wrong with ``--device mixed`` as it is asked for; ``strategy_faults`` asks."""

from __future__ import annotations

from app.settings.launcher import find_launch
from app.settings.strategy import StrategySettings


def mixed_faults(settings: StrategySettings) -> list[str]:
    """Return what is wrong, a line each."""
    if not settings.is_mixed:
        given = (("--cpu-ranks", settings.cpu_ranks), ("--developer mixed-sums", settings.mixed_sums))
        return [
            f"{flag} is for --device mixed; got {value} with --device {settings.device}: leave it out"
            for flag, value in given
            if value
        ]
    launch, faults = find_launch(), []
    here = launch.local_world if launch else settings.ranks
    if not 0 < settings.cpu_ranks < here:
        faults.append(
            f"--device mixed needs a rank on the CPU and one on a GPU: --cpu-ranks is 1 to {here - 1} of the {here} "
            f"ranks of a machine; got {settings.cpu_ranks}"
            if here > 1
            else f"--device mixed needs a rank on the CPU and one on a GPU; got {here} rank: use --ranks 2 or more"
        )
    if settings.parallel != "ddp":
        faults.append(
            "--device mixed is for --parallel ddp, whose ranks each compute the whole model; got --parallel "
            f"{settings.parallel}"
        )
    if settings.planned and settings.parallel != "auto":
        faults.append("--device mixed is not planned for: name what is computed again, and the side of boxes")
    if settings.precision in ("tf32", "bf16"):
        faults.append(
            f"--precision {settings.precision} rounds differently on a CPU and on a GPU, so that --device mixed would "
            "not be the plain step: leave it out for fp32"
        )
    if settings.offload_state != "none":
        faults.append(
            f"--developer offload-state={settings.offload_state} is for ranks that are all on a GPU; got --device mixed"
        )
    if launch and launch.mpi:
        faults.append(
            "--device mixed talks over torch.distributed, and these ranks were started by an MPI launcher: start them "
            "with torchrun or --ranks"
        )
    return faults
