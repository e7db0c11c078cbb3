"""Flags of ``python -m app.plan``, and the errors in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.settings.fields import at_least, broken, sizes
from app.settings.optimization import Head, Norm
from app.settings.strategy import Parallel
from app.settings.strategy_errors import OPTIMAL_OFFLOAD
from parallel.plan.candidates import RECOMPUTE, MemoryOptions
from parallel.schedule.registry import SCHEDULES, SPATIAL, SUBGRAPH
from parallel.strategy import STALE, WHOLE


@dataclass(frozen=True)
class PlanCommand:
    """Say which strategies can train a model within the memory, how fast, and on how many bytes of each rank."""

    model: str = "resnet50"
    """As for app.train: a name of ours, smp:NAME(ENCODER), torchvision:NAME, timm:NAME or package.module:factory."""
    tile: int = 2048
    """Side of the tiles in px."""
    classes: int = 2
    """Classes that the model tells apart."""
    task: Literal["auto", "classify", "segment"] = "auto"
    """segment: a class per pixel; auto: what the model gives."""
    norm: Norm = "batch"
    """Normalisation."""
    head: Head = "average"
    """What pools the last map of a classifier."""
    ranks: int = 1
    """Ranks to plan for; they need not be there."""
    batch: int | None = None
    """Tiles of one optimiser step over all ranks; default: 8, or one per rank if there are more."""
    parallel: Parallel = "auto"
    """Only this strategy; auto: all of them."""
    stages: int | None = None
    """Only splits of the model over this many ranks."""
    microbatches: int | None = None
    """Only this number of microbatches; default: any."""
    memory: str | None = None
    """Memory of each rank, such as 16GiB, of which plans leave a reserve; default: the device's, or what is free."""
    device_spec: str | None = None
    """Device by its data sheet, such as v100-16gb, or several, as a40-48gb:2,t4-16gb:2; default: this machine."""
    per_node: int | None = None
    """Ranks of a node; default: all on this machine, 8 with --device-spec."""
    link: str | None = None
    """What joins the ranks of a node, such as nvlink2; default: pcie4, with --device-spec only."""
    network: str | None = None
    """What joins nodes, such as ndr-infiniband or ethernet-10g; default: edr-infiniband, with --device-spec only."""
    recompute: Literal["auto", "none", "stage", "block", "optimal"] = "auto"
    """Activations to recompute in the backward pass, as for app.train; auto: the fastest that fits."""
    offload: Literal["auto", "none", "overlap"] = "auto"
    """Move activations to host memory until their backward pass, as for app.train; auto: the fastest that fits."""
    zero: Literal[0, 1, 2, 3] | None = None
    """Only with what this divides among ranks, as for app.train; default: whatever makes a strategy fit."""
    host_memory: str | None = None
    """Host memory of each rank for --offload and --stream, such as 64GiB; default: a share of half of what is free."""
    optimizer: Literal["sgd", "adamw"] = "adamw"
    """Update rule: how many values are kept for each parameter."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Precision of products; bf16 and fp16 are mixed. auto: as app.train, bf16 on GPUs that compute in it, else fp32.
    fp16 needs --device-spec."""
    tiles: int | None = None
    """Also say how many hours so many tiles take, such as those of an epoch."""
    largest_tile: bool = False
    """Also search the largest tile of each strategy: as it is, with recomputation, and with offload, too."""
    graph: Literal["op", "layer", "block", "module"] = "block"
    """Level of detail of the model's graph in --out: graph.txt, graph.json, and graph.dot for Graphviz."""
    out: Path | None = None
    """Folder for plan.json, candidates.json, the schedule, the graph, memory.svg (by tile size) and map.svg."""

    @property
    def step_tiles(self) -> int:
        return max(8, self.ranks) if self.batch is None else self.batch

    @property
    def memory_options(self) -> MemoryOptions:
        """Ways of needing less memory that are open."""
        recompute = RECOMPUTE if self.recompute == "auto" else (self.recompute,)
        offload = {"auto": (False, True), "none": (False,), "overlap": (True,)}[self.offload]
        return MemoryOptions(recompute, offload, zero=MemoryOptions.zero if self.zero is None else (self.zero,))

    @property
    def names(self) -> tuple[str, ...]:
        """Strategies to choose from; --zero 3 is fsdp."""
        named = "fsdp" if self.parallel == "ddp" and self.zero == 3 else self.parallel
        if named != "auto":
            return (named,)
        names = (name for name in (*WHOLE, SPATIAL.name, SUBGRAPH.name, *SCHEDULES) if name not in STALE)
        return tuple(name for name in names if self.zero is None or (name == "fsdp") == (self.zero == 3))

    def validate(self) -> list[str]:
        described = {"--per-node": self.per_node, "--link": self.link, "--network": self.network}
        here, zero, stages, m = self.device_spec is None, self.zero, self.stages, self.microbatches
        parallel, ranks = self.parallel, self.ranks
        rules = {
            **at_least(self, tile=1, classes=1, ranks=1, batch=1, tiles=1, stages=1, microbatches=1, per_node=1),
            **sizes(self, memory="16GiB", host_memory="16GiB"),
            **{
                f"{flag} is about a machine described by --device-spec; name the device too": here and given is not None
                for flag, given in described.items()
            },
            "--precision fp16 is for --device-spec; this machine trains in fp32, tf32 or bf16": here
            and self.precision == "fp16",
            f"--zero 3 is --parallel fsdp, or ddp: got --zero {zero} with --parallel {parallel}": zero is not None
            and parallel != "auto"
            and (self.names == ("fsdp",)) != (zero == 3),
            "--parallel async has no schedule that could be planned: plan ddp in its place": parallel == "async",
            OPTIMAL_OFFLOAD: self.recompute == "optimal" and self.offload == "overlap",
            f"--stages must be 2 or more and divide --ranks {ranks}; got {stages}": stages is not None
            and (stages < 2 or ranks % stages),
            f"--parallel {parallel} has one stage: leave --stages {stages} out": stages is not None
            and parallel in (*WHOLE, SPATIAL.name),
            f"--parallel single uses one process; got --ranks {ranks}": parallel == "single" and ranks > 1,
            f"--parallel {parallel} takes 2 ranks or more; got --ranks {ranks}": parallel not in ("auto", "single")
            and ranks < 2,
            f"--microbatches must be 1 to --batch {self.step_tiles}; got {m}": m is not None and m > self.step_tiles,
            f"--parallel {parallel} computes a microbatch on each rank; got --microbatches {m} and --ranks {ranks}": (
                m is not None and m < ranks and parallel in WHOLE
            ),
        }
        return broken(rules)
