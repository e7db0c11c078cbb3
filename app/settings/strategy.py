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
from parallel.schedule.registry import default_microbatches
from parallel.schedule.shares import FINE, Changes, parse_counts, read_changes
from parallel.schedule.text import PushRule, read_pushes
from parallel.space.team import TeamGrid
from parallel.strategy import WHOLE, Strategy
from pipelines import Rare

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

AUTO = "auto"
"""Of ``--shares``: they follow measured speeds."""
PER_WORKER = 4
"""Most minibatches of a step for each worker of ``async`` when the user names no number."""
JOIN_S = 50.0
"""Seconds; with the time to connect, a failed start is reported within a minute."""


@dataclass(frozen=True)
class StrategySettings:
    """Ranks, the parts of the model they compute, and precision."""

    parallel: Parallel = "auto"
    """Strategy, as docs/strategies.md lists them; pipedream and async delay gradients. auto: fastest that fits."""
    memory: str | None = None
    """Memory of each rank's device, such as 16GiB: plans and GPUs keep to it. Default: what is free."""
    memory_excess: Rare[Literal["warn", "stop"]] = "warn"
    """On a CPU, where tensors take more than --memory: warn at the end, or stop as a GPU would."""
    ranks: int = 1
    """Processes to start on this machine; torchrun, mpirun or srun start their own."""
    stages: Rare[int | None] = None
    """Ranks that a copy of the model is split over; more ranks are data parallel. Default: all."""
    grid: Rare[str] = ""
    """How ranks of a team divide each tile, as 4x1 (four strips) or 2x2. Default: a strip for each rank of spatial."""
    chunks: Rare[int | None] = None
    """Stages on each rank, with interleaved; default: 2."""
    cuts: Rare[str] = ""
    """Layers that begin a new stage, comma separated, one fewer than stages; default: equal cost."""
    schedule: Rare[Path | None] = None
    """CSV file of a schedule, one row a rank, in place of that of --parallel."""
    batch: int = 8
    """Tiles of one optimiser step, over all ranks."""
    microbatches: int | None = None
    """Parts the global batch is computed in, over all ranks. Default: one per rank; 2 per stage of a pipeline."""
    shares: Rare[str] = "equal"
    """Microbatches of each rank or group: equal, counts as 3,1, auto (by measured speed), or a shares.csv file."""
    staleness: Rare[int] = 4
    """Minibatches that a worker of --parallel async may be ahead of the slowest. 0: rounds."""
    push_rate: Rare[Literal["workers", "staleness"]] = "workers"
    """Learning rate of async: --lr divided by the number of workers, or by 1 + the update's staleness."""
    replay: Rare[Path | None] = None
    """pushes.csv of an earlier run with --parallel async, whose updates one rank repeats bit for bit."""
    recompute: Recompute = "none"
    """Activations to recompute in the backward pass: all of a stage, of a block, or what costs least time."""
    recompute_runs: Rare[str] = ""
    """Layers that --recompute optimal recomputes, as first:last pairs, comma separated; default: planned."""
    offload: Rare[Offload] = "none"
    """overlap: move activations to host memory until their backward pass, while the GPU computes."""
    offload_ahead: Rare[str | None] = None
    """Device memory for copies of --offload overlap under way, such as 512MiB. Default: two activations on a GPU."""
    offload_host: Rare[str | None] = None
    """Host memory for --offload overlap or --stream, such as 64GiB. Default: a share of half of what is free."""
    offload_state: Rare[Literal["none", "optimizer", "parameters"]] = "none"
    """Keep in host memory: the optimizer with its state, or the parameters, too. Not part of plans."""
    zero: Literal[0, 1, 2, 3] = 0
    """Divide among data-parallel ranks: 1 optimizer state, 2 and gradients, 3 and parameters (fsdp)."""
    stream: str = "none"
    """Compute each tile in boxes of this many px, such as 512, exactly, in less memory. auto: the largest that fit."""
    gradient_buckets: Rare[str | None] = None
    """Gradients to sum in one message during the backward pass, such as 4MiB; 0: all after it. Default: 25MiB."""
    norm_statistics: Rare[Literal["per-microbatch", "deferred"]] = "per-microbatch"
    """When batch norm updates its running statistics: each microbatch, or once a step over the batch."""
    compile: Rare[bool] = False
    """Compile each stage with torch.compile."""
    device: Literal["auto", "cpu", "cuda", "mixed"] = "auto"
    """Where to compute; auto: a GPU if there is one; mixed: ddp on GPUs and --cpu-ranks CPUs, in fp32."""
    cpu_ranks: Rare[int] = 0
    """Ranks of each machine, the last ones, that compute on its CPU with --device mixed."""
    mixed_sums: Rare[Literal["host", "device"] | None] = None
    """Where --device mixed sums gradients: in host memory, or on the GPUs. Default: device."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """bf16: mixed precision; tf32: 10-bit mantissas in products; auto: bf16 if all GPUs have it, else fp32."""
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
    def needs_strategy_plan(self) -> bool:
        """A planner has yet to choose the strategy. One rank with --stream leaves no choice."""
        return self.parallel == "auto" and (self.world > 1 or self.stream == "none")

    @property
    def needs_recompute_plan(self) -> bool:
        """A planner has yet to choose what the strategy recomputes."""
        return self.recompute == "optimal" and not self.recompute_runs

    @property
    def needs_plan(self) -> bool:
        """A planner has yet to choose something."""
        return self.needs_strategy_plan or self.needs_recompute_plan or self.stream == "auto"

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else bytes_of(self.memory)

    @property
    def bucket_bytes(self) -> int | None:
        return 0 if self.gradient_buckets == "0" else bytes_of(self.gradient_buckets or "")

    @property
    def stream_px(self) -> int | None:
        """Box size that tiles are computed in; None: whole tiles, or yet to be chosen."""
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
    def team(self) -> TeamGrid | None:
        """Grid of the teams in the D stages' places; None: one rank there, or a grid that cannot be read."""
        if self.grid:
            with contextlib.suppress(ValueError):
                return TeamGrid.parse(self.grid)
        return TeamGrid(self.world, 1) if self.name == "spatial" else None

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
        if self.name == "async":
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
        fits everywhere."""
        runs = tuple((first, last) for first, last in (run.split(":") for run in self.recompute_runs.split(",") if run))
        policy = ActivationPolicy(
            self.recompute,
            runs,
            self.offload,
            ahead=(bytes_of(self.offload_ahead) or 0) if self.offload_ahead else None if device == "cuda" else 0,
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
            pushes=self.push_rule() if self.name == "async" else None,
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
