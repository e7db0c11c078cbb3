"""What is planned and measured: ten problems, each with the ways to train that are tried on it.

Takes nothing; gives ``PROBLEMS``, and ``TEAMS``, four with teams among the ways. Sizes are such that all of them run in
twenty minutes on two cores, which four ranks share. Limits of memory rule out what would be chosen without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallel.space.team import Grid
from parallel.strategy import Strategy

MIB = 1 << 20
CLASSES = 2
PLENTY = 8 << 30
"""Bytes of a rank where memory is no concern."""


@dataclass(frozen=True)
class Problem:
    """One of the ten.

    Attributes:
        tile: side in px.
        batch: tiles of a step over all ranks.
        candidates: that are measured; the planner searches freely.
        segments: a class per pixel, else one per tile.
        memory_bytes: that a rank may use.
    """

    name: str
    model: str
    tile: int
    ranks: int
    batch: int
    optimizer: Literal["sgd", "adamw"]
    candidates: tuple[Strategy, ...]
    segments: bool = False
    memory_bytes: int = PLENTY

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        limit = f", {self.memory_bytes // MIB} MiB a rank" if self.memory_bytes < PLENTY else ""
        model = self.model.removeprefix("torchvision:")
        return f"{model}, {self.tile} px, {ranks}, {self.batch} tiles, {self.optimizer}{limit}"


def _single(*microbatches: int) -> tuple[Strategy, ...]:
    return tuple(Strategy("single", 1, 1, m) for m in microbatches)


def _on(ranks: int, *asked: tuple[str, int, int] | tuple[str, int, int, str]) -> tuple[Strategy, ...]:
    """Candidates from (name, depth, m) and, where it is asked for, "recompute"."""
    return tuple(
        Strategy(name, ranks, depth, m, chunks=2 if name == "interleaved" else 1).under(
            recompute="stage" if "recompute" in extra else "none"
        )
        for name, depth, m, *extra in asked
    )


PROBLEMS = (
    Problem("resnet18-1", "resnet18", 256, 1, 8, "sgd", _single(1, 2, 4, 8)),
    Problem("mobilenet-1", "torchvision:mobilenet_v2", 512, 1, 4, "adamw", _single(1, 2, 4), memory_bytes=1280 * MIB),
    Problem(
        "resnet18-2",
        "resnet18",
        384,
        2,
        8,
        "adamw",
        _on(
            2,
            ("ddp", 1, 2),
            ("ddp", 1, 8),
            ("fsdp", 1, 2),
            ("gpipe", 2, 4),
            ("1f1b", 2, 8),
            ("bidirectional", 2, 8),
            ("gpipe", 2, 8, "recompute"),
        ),
    ),
    Problem(
        "unet-2",
        "unet_w16",
        256,
        2,
        8,
        "sgd",
        _on(2, ("ddp", 1, 2), ("ddp", 1, 8), ("gpipe", 2, 4), ("1f1b", 2, 8), ("mp-basic", 2, 4)),
        segments=True,
    ),
    Problem(
        "unet-2-limited",
        "unet_w16",
        512,
        2,
        4,
        "adamw",
        _on(
            2,
            ("ddp", 1, 2),
            ("ddp", 1, 4),
            ("gpipe", 2, 4),
            ("1f1b", 2, 4),
            ("master", 2, 4),
            ("1f1b", 2, 4, "recompute"),
        ),
        segments=True,
        memory_bytes=720 * MIB,
    ),
    Problem(
        "resnet50-2",
        "resnet50",
        256,
        2,
        4,
        "sgd",
        _on(
            2,
            ("ddp", 1, 2),
            ("ddp", 1, 4),
            ("fsdp", 1, 2),
            ("gpipe", 2, 2),
            ("1f1b", 2, 4),
            ("interleaved", 2, 4),
            ("bidirectional", 2, 4),
        ),
    ),
    Problem(
        "resnet50-4-limited",
        "resnet50",
        320,
        4,
        8,
        "adamw",
        _on(
            4,
            ("ddp", 1, 8),
            ("gpipe", 4, 8),
            ("1f1b", 4, 8),
            ("1f1b", 2, 8),
            ("bidirectional", 4, 8),
            ("1f1b", 4, 8, "recompute"),
        ),
        memory_bytes=700 * MIB,
    ),
    Problem(
        "densenet-2",
        "torchvision:densenet121",
        256,
        2,
        8,
        "sgd",
        _on(2, ("ddp", 1, 2), ("ddp", 1, 8), ("gpipe", 2, 4), ("1f1b", 2, 8), ("master", 2, 4)),
    ),
    Problem(
        "vgg-2",
        "torchvision:vgg11_bn",
        256,
        2,
        4,
        "sgd",
        _on(2, ("ddp", 1, 2), ("ddp", 1, 4), ("gpipe", 2, 2), ("1f1b", 2, 4), ("bidirectional", 2, 4)),
    ),
    Problem(
        "resnet18-4",
        "resnet18",
        768,
        4,
        4,
        "sgd",
        _on(4, ("ddp", 1, 4), ("gpipe", 2, 4), ("1f1b", 4, 4), ("mp-basic", 4, 4), ("bidirectional", 4, 4)),
        memory_bytes=440 * MIB,
    ),
)


def _teams(
    ranks: int, grid: str, m: int, depth: int = 1, name: str = "spatial", recompute: Literal["none", "block"] = "none"
) -> Strategy:
    """A candidate with a team of ``grid`` on each of ``depth`` seats."""
    return Strategy(name, ranks, depth, m, grid=Grid.parse(grid)).under(recompute=recompute)


TEAMS = (
    Problem(
        "teams-resnet18-2",
        "resnet18",
        512,
        2,
        4,
        "adamw",
        (_teams(2, "2x1", 2), _teams(2, "2x1", 4), *_on(2, ("ddp", 1, 4), ("1f1b", 2, 4), ("mp-basic", 2, 4))),
    ),
    Problem(
        "teams-unet-2",
        "unet_w16",
        768,
        2,
        2,
        "sgd",
        (_teams(2, "2x1", 2), _teams(2, "1x2", 2), *_on(2, ("ddp", 1, 2), ("1f1b", 2, 2))),
        segments=True,
    ),
    Problem(
        "teams-resnet50-2-limited",
        "resnet50",
        768,
        2,
        2,
        "sgd",
        (_teams(2, "2x1", 2), _teams(2, "2x1", 2, recompute="block"), *_on(2, ("ddp", 1, 2), ("1f1b", 2, 2))),
        memory_bytes=1280 * MIB,
    ),
    Problem(
        "teams-resnet18-4",
        "resnet18",
        1024,
        4,
        4,
        "sgd",
        (
            _teams(4, "4x1", 4),
            _teams(4, "2x2", 4),
            _teams(4, "2x1", 4),
            _teams(4, "2x1", 4, 2, "1f1b"),
            *_on(4, ("1f1b", 4, 4)),
        ),
        memory_bytes=600 * MIB,
    ),
)
"""Tiles divided among teams beside all else: none of these sizes was there when the planner was made."""

QUICK = Problem("quick", "resnet11_v2", 64, 2, 4, "sgd", _on(2, ("ddp", 1, 2), ("1f1b", 2, 4, "recompute")))
"""Small enough for a test of the command."""


def named(name: str) -> Problem:
    """The problem called ``name``."""
    return next(problem for problem in (*PROBLEMS, *TEAMS, QUICK) if problem.name == name)
