"""What is wrong with what a user asks for of recomputation and offload."""

from __future__ import annotations

from app.settings.sizes import bytes_of
from app.settings.strategy import StrategySettings
from parallel.strategy import STREAMED

OPTIMAL_OFFLOAD = "--recompute optimal is planned for what stays on the device: use --recompute block with --offload"


def policy_faults(asked: StrategySettings) -> list[str]:
    """Of recomputation and offload."""
    faults = []
    if asked.name == "fsdp" and not asked.undecided:
        faults += [
            f"{flag} is not for --parallel fsdp, whose parameters come and go: use ddp, or a strategy with stages"
            for flag, given in (
                (f"--recompute {asked.recompute}", asked.recompute != "none"),
                (f"--offload {asked.offload}", asked.offload != "none"),
                (f"--offload-state={asked.offload_state}", asked.offload_state != "none"),
            )
            if given
        ]
    if asked.recompute_runs and asked.recompute != "optimal":
        faults.append(f"--recompute-runs goes with --recompute optimal; got --recompute {asked.recompute}")
    if asked.recompute == "optimal" and asked.offload == "overlap" and not asked.recompute_runs:
        faults.append(OPTIMAL_OFFLOAD)
    if any(len(run.split(":")) != 2 for run in asked.recompute_runs.split(",") if run):
        faults.append(
            f"--recompute-runs takes pairs of layers such as layer1_0_conv1:add_2; got {asked.recompute_runs!r}"
        )
    for flag, text in (
        ("--offload-ahead", asked.offload_ahead),
        ("--offload-host", asked.offload_host),
    ):
        if text is not None and bytes_of(text) is None:
            faults.append(f"{flag} takes a size such as 512MiB or 16GiB; got {text!r}")
        elif text is not None and asked.offload != "overlap" and (asked.stream == "none" or flag.endswith("ahead")):
            faults.append(f"{flag} is about --offload overlap; got --offload {asked.offload}")
    return faults + _stream_faults(asked)


def _stream_faults(asked: StrategySettings) -> list[str]:
    """Return what is wrong about tiles computed box by box."""
    if asked.stream == "none":
        return []
    if not asked.box_undecided and (not asked.stream.isdecimal() or int(asked.stream) < 1):
        return [f"--stream takes none, auto or the side of boxes in px, such as 512; got {asked.stream!r}"]
    faults = [
        f"--stream {asked.stream} computes a tile again box by box, and goes without {flag}: leave that out"
        for flag, given in (
            (f"--recompute {asked.recompute}", asked.recompute != "none"),
            (f"--offload {asked.offload}", asked.offload != "none"),
            ("--offload-state=parameters", asked.offload_state == "parameters"),
            ("--norm-statistics deferred", asked.norm_statistics == "deferred"),
            ("--compile", asked.compile),
        )
        if given
    ]
    if asked.undecided or asked.name in ("fsdp", "zero-bubble"):
        reasons = {
            "fsdp": "whose parameters come and go",
            "zero-bubble": "which splits a backward pass that boxes compute in one",
        }
        faults.append(
            f"--stream {asked.stream} is not for --parallel {asked.parallel}, "
            f"{reasons.get(asked.parallel, 'which does not plan boxes yet')}: name another strategy"
        )
    elif asked.box_undecided and asked.name not in STREAMED:
        faults.append(
            f"--stream auto is planned for --parallel single, ddp and spatial; got --parallel {asked.parallel}: name "
            "the side of boxes in px, such as 512"
        )
    return faults
