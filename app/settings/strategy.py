"""Which ranks compute what: strategy, stages, microbatches and precision, as a user asks for them.

One settings class, a part of ``RunConfig`` and of ``app.verify``; ``strategy_errors`` holds it against the number of
ranks there are. Letters: D stages, d groups of D ranks, m microbatches of the global batch.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.settings.fields import bytes_of
from app.settings.launcher import find_launch
from parallel.memory.policy import ActivationPolicy, Offload, Recompute
from parallel.schedule.pushes import PushRule, read_pushes
from parallel.schedule.registry import default_microbatches
from parallel.schedule.shares import FINE, Changes, parse_counts, read_changes
from parallel.space.team import Grid
from parallel.strategy import WHOLE, Strategy
from pipelines.slides.rare import Rare

Parallel = Literal[
    "auto",
    "single",
    "ddp",
    "fsdp",
    "spatial",
    "subgraph",
    "mp-basic",
    "gpipe",
    "1f1b",
    "interleaved",
    "zero-bubble",
    "mast",
    "master",
    "bidirectional",
    "pipedream",
    "async",
]

AHEAD = {"cuda": None, "cpu": 0}
"""``ActivationPolicy.ahead`` unless ``offload_ahead`` is given, by kind of device."""

AUTO = "auto"
"""Of ``--shares``: they follow measured speeds."""

PER_WORKER = 4
"""Most minibatches of a step for each worker of ``async`` when the user names no number."""

JOIN_S = 50.0
"""Together with what connecting takes, a trouble of the start is told within a minute."""


@dataclass(frozen=True)
class StrategySettings:
    """Ranks, the parts of the model they compute, and precision."""

    parallel: Parallel = "auto"
    """Strategy. single: one process; ddp: data parallel, each rank has the model and a share of the batch; fsdp: the
    same, with parameters, gradients and optimizer state in parts on the ranks, gathered block by block; spatial: each
    tile is divided among the ranks of a team (--grid); subgraph: --stages ranks divide the branches of each block, as
    of Inception. The others split the model into stages, one a rank: mp-basic, gpipe, 1f1b, interleaved, zero-bubble
    with one copy of the model; mast, master, bidirectional with two, the second in inverse order; pipedream: as 1f1b,
    but every microbatch updates the weights, with delayed gradients, which is not the plain step. async: as ddp, but a
    parameter server updates the weights with the gradients of each microbatch as they arrive; delayed gradients, too.
    auto: the fastest that fits the memory, as app.plan finds it; among what --stages and --microbatches leave open."""
    memory: str | None = None
    """Memory that each rank may take on its device, such as 16GiB: plans and GPUs keep to it, on a CPU the first
    steps are compared with it. Default: what is free."""
    memory_excess: Rare[Literal["warn", "stop"]] = "warn"
    """A run on a CPU whose tensors take more than --memory: warn at its end, or stop where a GPU of that size would."""
    ranks: int = 1
    """Processes to start on this machine; under torchrun, mpirun or srun those that were started are used."""
    stages: Rare[int | None] = None
    """Ranks that a copy of the model is split over; more ranks make data-parallel groups. Default: all ranks."""
    grid: Rare[str] = ""
    """How the ranks of a team divide each tile, rows x columns of boxes: 4x1 are four strips, 2x2 four quarters. With
    spatial one team computes the model, and more ranks make data-parallel groups; default: a strip for each rank. With
    strategies that split the model a team takes the place of each rank."""
    chunks: Rare[int | None] = None
    """Stages on each rank, with interleaved; default: 2."""
    cuts: Rare[str] = ""
    """Layers or modules that begin a new stage, comma separated, one fewer than stages; default: equal cost."""
    schedule: Rare[Path | None] = None
    """CSV file of a schedule, one row a rank, in place of that of --parallel."""
    batch: int = 8
    """Tiles of one optimiser step, over all ranks."""
    microbatches: int | None = None
    """Parts the global batch is computed in, over all ranks. Default: one per rank with ddp and fsdp, up to 4 with
    async, 1 per group with mp-basic, 2 with mast, otherwise 2 per stage and group, with --shares auto 8 per group at
    least, if the batch has as many tiles."""
    shares: Rare[str] = "equal"
    """Microbatches that each rank with ddp, or each data-parallel group, computes of a step, for devices of unequal
    speed. equal: as many each; 3,1: three and one, whose sum is --microbatches; auto: as the speeds measured in the run
    ask for; or a CSV file with the columns microbatch,group, a line for each, or the shares.csv of an earlier run. The
    same numbers whoever computes what."""
    staleness: Rare[int] = 4
    """Minibatches that a worker may be ahead of the slowest, with --parallel async. 0: rounds, in which all use the
    same parameters; from the largest of --shares on: no bound."""
    push_rate: Rare[Literal["workers", "staleness"]] = "workers"
    """Learning rate of an update with --parallel async. workers: --lr divided by their number; staleness: divided by 1
    + the updates made since its parameters were pulled."""
    replay: Rare[Path | None] = None
    """pushes.csv of an earlier run with --parallel async, whose updates one rank repeats bit for bit."""
    recompute: Recompute = "none"
    """What is not kept but computed again before its backward pass; less memory, more time, the same numbers. stage:
    all but what enters a rank's stage; block: all but what enters a block of the model; optimal: what costs least time
    of all that fits --memory, with the times of this machine. none leaves it to the plan with --parallel auto."""
    recompute_runs: Rare[str] = ""
    """Layers computed again with --recompute optimal, as first:last pairs, comma separated; default: as planned."""
    offload: Rare[Offload] = "none"
    """Move what forward passes keep to the host's memory until their backward passes. overlap: copied beside what a GPU
    computes; a CPU is its own host, where this saves nothing of the machine's memory. none leaves it to the plan with
    --parallel auto."""
    offload_ahead: Rare[str | None] = None
    """Memory of the device, such as 512MiB, for what is about to leave or has come back before it is needed, with
    --offload overlap; default: twice the largest activation on a GPU, none on a CPU, whose copies overlap nothing."""
    offload_host: Rare[str | None] = None
    """Host memory, such as 64GiB, that a rank may fill with --offload overlap or --stream; the rest stays on the
    device, or in files. Default: its share of half of what is free."""
    offload_state: Rare[Literal["none", "optimizer", "parameters"]] = "none"
    """What else is on the host instead of the device. optimizer: its state, and its step is computed there; parameters:
    these too, and they come to the device layer by layer. Plans do not count on it."""
    zero: Literal[0, 1, 2, 3] = 0
    """What ranks that hold the same part of the model divide among themselves. 1: optimizer state; 2: gradients, too;
    3: parameters, too, with ddp alone, which is fsdp then. 0 leaves it to the plan with --parallel auto."""
    stream: str = "none"
    """Side in px of boxes, such as 512, that a tile is computed in one after the other, in the forward pass and once
    more in the backward pass: the same numbers, and memory for a box in place of a tile. The tile stays bytes in the
    host's memory, beside maps between parts of the model: few with --norm frozen or layer, one for each norm with
    others. Each stage of a model that is split has boxes of its own; not for --parallel fsdp and zero-bubble, nor for
    auto with several ranks. auto, with one rank, ddp and spatial: the largest boxes that fit the memory; on a CPU
    without --memory of 512 px. none leaves it to the plan with --parallel auto."""
    gradient_buckets: Rare[str | None] = None
    """Gradients that ranks sum at once, such as 4MiB, beside what their last backward passes compute; 0: all, once
    everything is computed. Default: 25MiB; plans count on that."""
    norm_statistics: Rare[Literal["per-microbatch", "deferred"]] = "per-microbatch"
    """When batch norm updates its running statistics: with each microbatch, or once a step over the whole batch."""
    compile: Rare[bool] = False
    """Compile each stage with torch.compile."""
    device: Literal["auto", "cpu", "cuda", "mixed"] = "auto"
    """Where to compute; auto takes a GPU when there is one. mixed: with ddp, --cpu-ranks of each machine's ranks on its
    CPU and the others on a GPU each, all in fp32; --shares gives them unequal parts of a step."""
    cpu_ranks: Rare[int] = 0
    """Ranks of each machine, the last ones, that compute on its CPU with --device mixed."""
    mixed_sums: Rare[Literal["host", "device"] | None] = None
    """Where gradients are summed with --device mixed. host: in the memory of each machine, then between machines;
    device: a CPU rank hands its gradients to a GPU rank, and the GPUs sum. Default: device."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """bf16: mixed precision; tf32: float32 with 10-bit mantissas in products and convolutions; fp32: float32.
    auto: bf16 on GPUs that compute in it (Ampere and later, as TF32), fp32 elsewhere."""
    channels_last: Rare[bool] = True
    """Memory layout of images and convolutions; faster on most hardware."""
    timeout_s: Rare[float] = 1800.0
    """Seconds a rank waits for the others before the run is given up."""
    join_timeout_s: Rare[float] = JOIN_S
    """Seconds that ranks have to arrive, once the first is there, before the start is given up."""

    @property
    def world(self) -> int:
        """Ranks of this run: those that a launcher started, else ``--ranks``."""
        launch = find_launch()
        return launch.world if launch else self.ranks

    @property
    def undecided(self) -> bool:
        """A planner has yet to choose the strategy. One rank with --stream leaves no choice."""
        return self.parallel == "auto" and (self.world > 1 or self.stream == "none")

    @property
    def runs_undecided(self) -> bool:
        """A planner has yet to choose what the strategy computes again."""
        return self.recompute == "optimal" and not self.recompute_runs

    @property
    def box_undecided(self) -> bool:
        """A planner has yet to choose the side of the boxes."""
        return self.stream == "auto"

    @property
    def planned(self) -> bool:
        """A planner has yet to choose something."""
        return self.undecided or self.runs_undecided or self.box_undecided

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes."""
        return None if self.memory is None else bytes_of(self.memory)

    @property
    def bucket_bytes(self) -> int | None:
        """``gradient_buckets`` in bytes."""
        return 0 if self.gradient_buckets == "0" else bytes_of(self.gradient_buckets or "")

    @property
    def stream_px(self) -> int | None:
        """Side of the boxes that tiles are computed in; None: at once, or as yet to be chosen."""
        return None if self.stream in ("none", "auto") else int(self.stream)

    @property
    def name(self) -> str:
        """The strategy; as long as none is chosen, the one for a model that fits everywhere."""
        if self.parallel == "auto":
            return "ddp" if self.world > 1 else "single"
        return "fsdp" if self.parallel == "ddp" and self.zero == 3 else self.parallel

    @property
    def is_mixed(self) -> bool:
        """Some ranks compute on a CPU, others on a GPU."""
        return self.device == "mixed"

    @property
    def computed_precision(self) -> Literal["auto", "fp32", "tf32", "bf16"]:
        """``precision``; of devices of several kinds, what all of them compute alike."""
        return "fp32" if self.is_mixed else self.precision

    @property
    def over_torch(self) -> bool:
        """The strategy is torch's own, and its ranks talk over torch.distributed."""
        return self.name == "fsdp"

    @property
    def is_async(self) -> bool:
        """Workers push gradients to a parameter server."""
        return self.name == "async"

    @property
    def splits(self) -> bool:
        """The model is split into stages."""
        return self.name not in WHOLE

    @property
    def depth(self) -> int:
        """Stages that a copy of the model is split into, each of one rank or of a team, D."""
        if self.name in ("spatial", "subgraph") or not self.splits:
            return 1
        return self.stages or max(1, self.world // (self.team.members if self.team else 1))

    @property
    def team(self) -> Grid | None:
        """Grid of the teams in the D stages' places; None: one rank there, or a grid that cannot be read."""
        if self.grid:
            with contextlib.suppress(ValueError):
                return Grid.parse(self.grid)
        return Grid(self.world, 1) if self.name == "spatial" else None

    @property
    def ways(self) -> int:
        """Ranks that share the branches of the model's blocks."""
        return (self.stages or self.world) if self.name == "subgraph" else 1

    @property
    def group_ranks(self) -> int:
        """Ranks of a group."""
        return self.depth * (self.team.members if self.team else self.ways)

    @property
    def groups(self) -> int:
        """Data-parallel groups, d."""
        return self.world // self.group_ranks

    @property
    def m(self) -> int:
        """Microbatches of the global batch."""
        if self.microbatches is not None:
            return self.microbatches
        if self.asked_shares:
            return sum(map(len, self.asked_shares[0][1]))
        if self.is_async:
            return max(m for m in range(1, PER_WORKER * self.world + 1) if self.batch % m == 0 or m == 1)
        finer = FINE * self.groups if self.shares == AUTO else self.groups
        if not self.splits:
            return max(self.groups, min(finer, self.batch))
        usual = max(finer, self.groups * default_microbatches(self.name, self.depth))
        return usual if self.name == "mast" else max(self.groups, min(usual, self.batch))

    @functools.cached_property
    def asked_shares(self) -> Changes:
        """``shares`` as microbatches of each group, by the step from which they are in force; empty: equal at first, or
        not to be read, as ``share_errors`` says."""
        with contextlib.suppress(ValueError, OSError):
            return self.read_shares()
        return ()

    def read_shares(self) -> Changes:
        """Return ``shares`` as microbatches of each group, by the step from which they are in force; empty: equal at
        first.

        Raises:
            ValueError: they are neither counts nor a file of them.
            OSError: there is no such file.
        """
        if self.shares in ("equal", AUTO):
            return ()
        counts = parse_counts(self.shares)
        return read_changes(Path(self.shares).read_text()) if counts is None else ((0, counts),)

    def to_strategy(self, device: str) -> Strategy:
        """Return what is asked for as the engine's own value; where a planner has yet to choose, as for a model that
        fits everywhere.

        Args:
            device: "cpu" or "cuda".
        """
        runs = tuple((first, last) for first, last in (run.split(":") for run in self.recompute_runs.split(",") if run))
        policy = ActivationPolicy(
            self.recompute,
            runs,
            self.offload,
            ahead=(bytes_of(self.offload_ahead) or 0) if self.offload_ahead else AHEAD[device],
            host_bytes=bytes_of(self.offload_host) if self.offload_host else None,
            optimizer=self.offload_state != "none",
            parameters=self.offload_state == "parameters",
            stream=self.stream_px,
        )
        return Strategy(
            self.name,
            ranks=self.world,
            depth=self.depth,
            m=self.m,
            chunks=(self.chunks or 2) if self.name == "interleaved" else 1,
            cuts=tuple(cut.strip() for cut in self.cuts.split(",") if cut.strip()),
            policy=policy,
            zero=0 if self.name == "fsdp" else self.zero,
            schedule_csv=self.schedule.read_text() if self.schedule else None,
            statistics=self.norm_statistics,
            compile=self.compile,
            gradient_bytes=self.bucket_bytes,
            grid=self.team,
            shares=self.asked_shares[0][1] if self.asked_shares else (),
            changes=self.asked_shares[1:],
            rebalanced=self.shares == AUTO,
            pushes=self.push_rule() if self.is_async else None,
            ways=self.ways,
        )

    def push_rule(self) -> PushRule:
        """Return how the parameter server treats pushes.

        Raises:
            ValueError: ``replay`` is no log of pushes.
            OSError: there is no such file.
        """
        replayed = read_pushes(self.replay.read_text()) if self.replay else ()
        return PushRule(self.staleness, self.push_rate == "staleness", replayed)
