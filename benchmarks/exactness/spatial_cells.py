"""The cells of the table of teams: operations on threads, and models under every strategy that has teams.

Takes nothing; gives cells as plain values. A cell's description names it in the file of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from app.settings.strategy import StrategySettings
from benchmarks.exactness.cells import COMMUNICATORS, OWN, CommunicatorName
from benchmarks.exactness.peers import DETACHED, DTENSOR, ONCE, PEER_OPERATIONS
from benchmarks.exactness.spatial_ops import OPERATIONS

Dtype = Literal["float64", "float32"]
SIZES = {"64": (64, 64), "61": (61, 61), "67x53": (67, 53), "97": (97, 97), "35x27": (35, 27)}
SMALL = "35x27"
"""For float32: of larger maps one device alone loses 5e-6 of a gradient, the sum over 28,000 px, to rounding."""
GRIDS = ("2x1", "1x2", "3x1", "2x2", "4x1", "3x2")
TILES, CLASSES, MICROBATCHES = 2, 3, 4


@dataclass(frozen=True)
class OperationCell:
    """One operation by a team of threads, or by a peer."""

    operation: str
    size: str
    grid: str
    dtype: Dtype = "float64"
    by: str = "teams"

    def __str__(self) -> str:
        return f"{self.operation} / {self.size} / {self.grid} / {self.dtype} / {self.by}"


@dataclass(frozen=True)
class Subject:
    """A model of the table.

    Attributes:
        model: as for ``--model``.
        tile: px; the smallest at which two plain runs on tiles a rounding apart agree well within the tolerance.
        tiles: of a microbatch.
        small: it is tried in every way.
    """

    model: str
    tile: int
    tiles: int = 1
    small: bool = False


SUBJECTS = {
    "dropout": Subject(f"{OWN}:Dropouts", 32, small=True),
    "two-outputs": Subject(f"{OWN}:TwoOutputs", 32, small=True),
    "unet_w8": Subject("unet_w8", 32, small=True),
    "resnet18": Subject("resnet18", 64, small=True),
    "resnet50": Subject("resnet50", 64),
    "unet(5,16)": Subject("unet(5,16)", 64),
    "resnet110_v2": Subject("resnet110_v2", 32),
    "densenet121": Subject("torchvision:densenet121", 64),
    "inception_v3": Subject("torchvision:inception_v3", 128, tiles=2),
    "googlenet": Subject(f"{OWN}:googlenet", 64, tiles=2),
    "mobilenet_v3": Subject("torchvision:mobilenet_v3_small", 64, tiles=2),
    "efficientnet_b0": Subject("torchvision:efficientnet_b0", 64, tiles=2),
    "convnext_tiny": Subject("torchvision:convnext_tiny", 64, tiles=2),
    "deeplabv3": Subject("torchvision:deeplabv3_mobilenet_v3_large", 64, tiles=2),
    "amoebanet(6,48)": Subject("amoebanet(6,48)", 128),
}

MESHES: dict[str, dict[str, Any]] = {
    "spatial": {"parallel": "spatial", "grid": "2x1", "ranks": 2},
    "1f1b (2, 1)": {"parallel": "1f1b", "grid": "2x1,1x1", "ranks": 3},
    "1f1b (2, 2)": {"parallel": "1f1b", "grid": "1x2", "ranks": 4},
    "master (2, 2)": {"parallel": "master", "grid": "2x1", "ranks": 4},
    "two groups": {"parallel": "spatial", "grid": "1x2", "ranks": 4},
}
"""Settings a user would give; (2, 1): a team of two and one of one."""

KEEPING: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"recompute": "block"},
    "recompute + offload": {"recompute": "block", "offload": "overlap"},
}


@dataclass(frozen=True)
class ModelCell:
    """Steps of the engine over teams beside as many plain ones."""

    model: str
    mesh: str
    keeping: str
    communicator: CommunicatorName

    @property
    def subject(self) -> Subject:
        return SUBJECTS[self.model]

    @property
    def settings(self) -> StrategySettings:
        """As a user would give them."""
        return StrategySettings(
            **MESHES[self.mesh],
            **KEEPING[self.keeping],
            batch=MICROBATCHES * self.subject.tiles,
            microbatches=MICROBATCHES,
            device="cpu",
        )

    @property
    def ranks(self) -> int:
        return int(MESHES[self.mesh]["ranks"])

    def __str__(self) -> str:
        return f"{self.model} / {self.mesh} / {self.keeping} / {self.communicator}"


Cell = OperationCell | ModelCell


def operation_cells() -> Iterator[OperationCell]:
    """Every operation in float64 on all sides but the small, in float32 on the small; then those of peers."""
    large = [size for size in SIZES if size != SMALL]
    for operation in OPERATIONS:
        for grid in GRIDS:
            for size in large:
                yield OperationCell(operation, size, grid)
            yield OperationCell(operation, SMALL, grid, "float32")
    for peer in (DETACHED, ONCE):
        for operation in PEER_OPERATIONS:
            for size in large:
                for grid in ("2x1", "4x1"):
                    yield OperationCell(operation, size, grid, by=peer)
    for operation in ("convolution 3x3", "batch norm"):
        for grid in ("2x1", "1x2"):
            yield OperationCell(operation, "64", grid, by=DTENSOR)


def model_cells() -> Iterator[ModelCell]:
    """Small models in every way over every communicator; the others on threads, and recomputed under one mesh."""
    for communicator in COMMUNICATORS:
        for ranks in sorted({int(mesh["ranks"]) for mesh in MESHES.values()}):
            for model, subject in SUBJECTS.items():
                for mesh in (name for name, settings in MESHES.items() if settings["ranks"] == ranks):
                    for keeping in KEEPING:
                        if subject.small or (communicator == "threads" and (keeping == "keep" or mesh == "spatial")):
                            yield ModelCell(model, mesh, keeping, communicator)


def all_cells() -> Iterator[Cell]:
    """Of the whole table; those of processes that share ranks and communicator follow each other."""
    yield from operation_cells()
    yield from model_cells()
