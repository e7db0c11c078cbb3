"""Problems that are planned and measured, each with the strategies that are tried on it.

Takes nothing; gives problems by name. Sizes are such that ``PROBLEMS`` run in twenty minutes on two cores, which four
ranks share. Limits of memory rule out what would be chosen without them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from models.blocks import Norm
from parallel.space.team import TeamGrid
from parallel.strategy import WHOLE, Strategy

MIB = 1 << 20
CLASSES = 2
PLENTY = 8 << 30
"""Bytes of a rank where memory is no concern."""
WAY = re.compile(r"([a-z0-9-]+?)(?::(\d+))?(?:@(\dx\d))?/(\d+)(?:\+([a-z]+)=(\w+))?")
"""Strategy, :stages, @grid of a team, /microbatches, +recompute=RULE or +stream=PX."""


@dataclass(frozen=True)
class Problem:
    """A model, tiles and ranks.

    Attributes:
        tile: side in px.
        batch: tiles of a step over all ranks.
        ways: strategies that are measured, as ``WAY`` reads them; the planner searches freely.
        segments: a class per pixel, else one per tile.
        memory_bytes: that a rank may use.
    """

    name: str
    model: str
    tile: int
    ranks: int
    batch: int
    optimizer: Literal["sgd", "adamw"]
    ways: str
    segments: bool = False
    memory_bytes: int = PLENTY
    norm: Norm = "batch"

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        limit = f", {self.memory_bytes // MIB} MiB a rank" if self.memory_bytes < PLENTY else ""
        norm = "" if self.norm == "batch" else f", {self.norm} norm"
        model = self.model.removeprefix("torchvision:")
        return f"{model}{norm}, {self.tile} px, {ranks}, {self.batch} tiles, {self.optimizer}{limit}"

    @property
    def candidates(self) -> tuple[Strategy, ...]:
        """Return the strategies of ``ways``."""
        return tuple(map(self._strategy, self.ways.split()))

    def _strategy(self, way: str) -> Strategy:
        match = WAY.fullmatch(way)
        assert match, f"{self.name}: {way!r} is not of the form {WAY.pattern}"
        name, stages, grid, m, option, value = match.groups()
        whole = name in (*WHOLE, "spatial")
        depth, team = int(stages or (1 if whole else self.ranks)), TeamGrid.parse(grid) if grid else None
        strategy = Strategy(name, self.ranks, depth, int(m), chunks=2 if name == "interleaved" else 1, grid=team)
        if not option:
            return strategy
        return strategy.under(**{option: int(value) if option == "stream" else value})


def _boxes(name: str, model: str, tile: int, box: int, norm: Norm = "frozen", *, segments: bool = False) -> Problem:
    """Return one tile a step on one rank, in boxes of ``box`` px."""
    return Problem(f"boxes-{name}", model, tile, 1, 1, "sgd", f"single/1+stream={box}", segments, norm=norm)


BLOCK = "+recompute=block"
PROBLEMS = (
    Problem("resnet18-1", "resnet18", 256, 1, 8, "sgd", "single/1 single/2 single/4 single/8"),
    Problem(
        "mobilenet-1", "torchvision:mobilenet_v2", 512, 1, 4, "adamw", "single/1 single/2 single/4",
        memory_bytes=1280 * MIB,
    ),
    Problem(
        "resnet18-2", "resnet18", 384, 2, 8, "adamw",
        "ddp/2 ddp/8 fsdp/2 gpipe/4 1f1b/8 bidirectional/8 gpipe/8+recompute=stage",
    ),
    Problem("unet-2", "unet_w16", 256, 2, 8, "sgd", "ddp/2 ddp/8 gpipe/4 1f1b/8 mp-basic/4", segments=True),
    Problem(
        "unet-2-limited", "unet_w16", 512, 2, 4, "adamw", "ddp/2 ddp/4 gpipe/4 1f1b/4 master/4 1f1b/4+recompute=stage",
        segments=True, memory_bytes=720 * MIB,
    ),
    Problem(
        "resnet50-2", "resnet50", 256, 2, 4, "sgd",
        "ddp/2 ddp/4 fsdp/2 gpipe/2 1f1b/4 interleaved/4 bidirectional/4",
    ),
    Problem(
        "resnet50-4-limited", "resnet50", 320, 4, 8, "adamw",
        "ddp/8 gpipe/8 1f1b/8 1f1b:2/8 bidirectional/8 1f1b/8+recompute=stage", memory_bytes=700 * MIB,
    ),
    Problem("densenet-2", "torchvision:densenet121", 256, 2, 8, "sgd", "ddp/2 ddp/8 gpipe/4 1f1b/8 master/4"),
    Problem("vgg-2", "torchvision:vgg11_bn", 256, 2, 4, "sgd", "ddp/2 ddp/4 gpipe/2 1f1b/4 bidirectional/4"),
    Problem(
        "resnet18-4", "resnet18", 768, 4, 4, "sgd", "ddp/4 gpipe:2/4 1f1b/4 mp-basic/4 bidirectional/4",
        memory_bytes=440 * MIB,
    ),
)  # fmt: skip
TEAMS = (
    Problem("teams-resnet18-2", "resnet18", 512, 2, 4, "adamw", "spatial@2x1/2 spatial@2x1/4 ddp/4 1f1b/4 mp-basic/4"),
    Problem("teams-unet-2", "unet_w16", 768, 2, 2, "sgd", "spatial@2x1/2 spatial@1x2/2 ddp/2 1f1b/2", segments=True),
    Problem(
        "teams-resnet50-2-limited", "resnet50", 768, 2, 2, "sgd",
        f"spatial@2x1/2 spatial@2x1/2{BLOCK} ddp/2 1f1b/2", memory_bytes=1280 * MIB,
    ),
    Problem(
        "teams-resnet18-4", "resnet18", 1024, 4, 4, "sgd",
        "spatial@4x1/4 spatial@2x2/4 spatial@2x1/4 1f1b:2@2x1/4 1f1b/4", memory_bytes=600 * MIB,
    ),
)  # fmt: skip
"""Tiles divided among teams next to other strategies: none of these sizes was there when the planner was made."""
BOXES = (
    _boxes("resnet34", "torchvision:resnet34", 1024, 256),
    _boxes("resnet101", "torchvision:resnet101", 768, 256),
    _boxes("unet", "unet_w24", 512, 256, segments=True),
    _boxes("densenet169", "torchvision:densenet169", 512, 256),
    _boxes("efficientnet", "torchvision:efficientnet_b1", 768, 256),
    _boxes("convnext", "torchvision:convnext_tiny", 512, 256, "batch"),
    _boxes("resnet18-batch", "resnet18", 768, 256, "batch"),
    _boxes("regnet", "torchvision:regnet_y_800mf", 1024, 512),
)
"""Tiles computed box by box."""
SCALING = (
    Problem("scaling-1", "resnet110_v2", 128, 1, 4, "sgd", "single/4"),
    Problem("scaling-2", "resnet110_v2", 128, 2, 4, "sgd", "mp-basic/4 mast/2 master/4"),
    Problem("scaling-4", "resnet110_v2", 128, 4, 8, "sgd", "mp-basic:2/8 mast:2/4 master:2/8"),
    Problem("scaling-team-2", "resnet50", 512, 2, 4, "sgd", "spatial@2x1/4"),
    Problem("scaling-teams-4", "resnet50", 512, 4, 8, "sgd", "spatial@2x1/8"),
    Problem("scaling-seats-4", "resnet50", 512, 4, 4, "sgd", "spatial@4x1/4 master:2@2x1/4 1f1b:2@2x1/4"),
)
"""Four tiles for each group, on 1, 2 and 4 ranks: what ``benchmarks.weak_scaling`` simulates to 1,024."""
QUICK = Problem("quick", "resnet11_v2", 64, 2, 4, "sgd", "ddp/2 1f1b/4+recompute=stage")
"""Small enough for a test of the command."""
ALL = {problem.name: problem for problem in (*PROBLEMS, *TEAMS, *BOXES, *SCALING, QUICK)}
"""Problems by name."""
