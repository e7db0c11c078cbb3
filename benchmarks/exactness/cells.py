"""Cells of the exactness tables: which model is computed how, over which communicator.

Takes the name of a table; gives cells as plain values, each with the settings that a user would give. Letters: D
stages, d groups of D ranks, m microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from app.settings.strategy import StrategySettings
from benchmarks.exactness.zoo import Entry, all_entries, family_entries
from parallel.schedule.registry import SCHEDULES

CommunicatorName = Literal["threads", "gloo", "mpi"]
COMMUNICATORS: tuple[CommunicatorName, ...] = get_args(CommunicatorName)
OWN = "benchmarks.exactness.models"
Settings = tuple[tuple[str, Any], ...]
"""Fields of ``StrategySettings`` and their values."""


@dataclass(frozen=True)
class Cell:
    """One strategy of one model, to be compared with the plain step.

    Attributes:
        model: row of the table; way: its column.
        detail: what tells cells of one row and column apart.
        factory: as for ``--model``.
        tile: px; the smallest that leaves batch norm several values a channel.
        batch: tiles of all m microbatches.
        over: how ranks talk.
        steps: of the optimizer, each of which is compared.
        library: the model is of a library: channels_last, and parameters that begin constant are moved.
        planned: settings that a plan makes: ``recompute_runs``.
    """

    table: str
    model: str
    way: str
    detail: str
    factory: str
    tile: int
    batch: int
    m: int
    settings: Settings
    over: CommunicatorName = "threads"
    dtype: str = "float64"
    steps: int = 1
    library: bool = False
    planned: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return int(dict(self.settings).get("ranks", 1))

    @property
    def strategy_settings(self) -> StrategySettings:
        """Return the settings, but for those that a plan makes."""
        return StrategySettings(**dict(self.settings), batch=self.batch, microbatches=self.m, device="cpu")

    def __str__(self) -> str:
        return " / ".join(part for part in (self.table, self.model, self.way, self.detail, self.over) if part)


SMALL = ("dropout", "two-outputs")
SUBJECTS: dict[str, tuple[str, int, int]] = {
    "dropout": (f"{OWN}:Dropouts", 12, 1),
    "two-outputs": (f"{OWN}:TwoOutputs", 12, 1),
    "unet_w8": ("unet_w8", 32, 1),
    "resnet18": ("resnet18", 64, 1),
    "resnet110_v2": ("resnet110_v2", 16, 1),
    # One tile leaves channels that a 3 x 3 pool over 2 x 2 px makes constant: they stand on the kink of a ReLU,
    # where the last bit of a sum decides about a gradient.
    "googlenet": (f"{OWN}:googlenet", 64, 2),
    "unet(5,16)": ("unet(5,16)", 64, 1),
    "densenet121": ("torchvision:densenet121", 64, 1),
}
"""Name -> model, px of a tile, tiles of a microbatch."""
MESHES = ((1, 2), (1, 3), (1, 4), (2, 2))
"""(d, D)."""
STEPS, MANY_STEPS = 2, 20


def schedule_cells() -> Iterator[Cell]:
    """Yield every schedule on every mesh over every communicator; small models in float32 and for many steps too."""
    for over in COMMUNICATORS:
        for name, (factory, tile, tiles) in SUBJECTS.items():
            for groups, depth in MESHES:
                for schedule, kind in SCHEDULES.items():
                    # One more than the stages, so that schedules fill and drain; uneven with two groups.
                    m = 2 * groups if kind.fixed else groups * (depth + 1) - (groups - 1)
                    settings = (("parallel", schedule), ("ranks", groups * depth), ("stages", depth))
                    batch = tiles * m + (name in SMALL)
                    cell = Cell("schedules", name, schedule, f"{groups}x{depth}", factory, tile, batch, m, settings)
                    yield replace(cell, over=over, steps=STEPS)
                    if name in SMALL:
                        yield replace(cell, over=over, steps=STEPS, model=f"{name}, float32", dtype="float32")
                        if (groups, depth) == (1, 3):
                            model = f"{name}, {MANY_STEPS} steps"
                            yield replace(cell, over=over, steps=MANY_STEPS, model=model)


KEPT: dict[str, tuple[str, int, int, int, str]] = {
    "dropout": (f"{OWN}:Dropouts", 12, 4, 2, "16KiB"),
    "unet": ("unet", 32, 3, 1, "512KiB"),
    "resnet50": ("resnet50", 64, 3, 1, "1MiB"),
}
"""Name -> model, px of a tile, tiles of three microbatches, steps, room for overlap: some of its tensors, not all."""
AHEAD = "some"
KEEPING: dict[str, dict[str, Any]] = {
    "offload overlap": {"offload": "overlap"},
    "offload overlap, ahead": {"offload": "overlap", "offload_ahead": AHEAD},
    "recompute stage": {"recompute": "stage"},
    "recompute block": {"recompute": "block"},
    "recompute optimal": {"recompute": "optimal"},
    "block + overlap": {"recompute": "block", "offload": "overlap"},
    "block + overlap, ahead": {"recompute": "block", "offload": "overlap", "offload_ahead": AHEAD},
    "stage + overlap": {"recompute": "stage", "offload": "overlap"},
    "state optimizer": {"offload_state": "optimizer"},
    "state parameters": {"offload_state": "parameters"},
    "parameters + block + overlap": {"offload_state": "parameters", "recompute": "block", "offload": "overlap"},
}


def keeping_cells() -> Iterator[Cell]:
    """Yield every way to keep less under schedules of one and of two copies of the model, and under ddp."""
    for name, (factory, tile, batch, steps, room) in KEPT.items():
        for kept, fields in KEEPING.items():
            for schedule in ("gpipe", "1f1b", "master", "bidirectional", "ddp"):
                if schedule == "ddp" and fields.get("recompute") == "stage":  # ddp has no stages
                    continue
                own = {key: room if value == AHEAD else value for key, value in fields.items()}
                settings = (("parallel", schedule), ("ranks", 2), *own.items())
                planned = ("recompute_runs",) if fields.get("recompute") == "optimal" else ()
                cell = Cell("keeping", kept, schedule, name, factory, tile, batch, 3, settings)
                yield replace(cell, steps=steps, planned=planned)


DIVIDED: dict[str, tuple[str, int, int]] = {
    "dropout": (f"{OWN}:Dropouts", 32, 1),
    "two-outputs": (f"{OWN}:TwoOutputs", 32, 1),
    "unet_w8": ("unet_w8", 32, 1),
    "resnet18": ("resnet18", 64, 1),
    "resnet50": ("resnet50", 64, 1),
    "unet(5,16)": ("unet(5,16)", 64, 1),
    "resnet110_v2": ("resnet110_v2", 32, 1),
    "densenet121": ("torchvision:densenet121", 64, 1),
    "inception_v3": ("torchvision:inception_v3", 128, 2),
    "googlenet": (f"{OWN}:googlenet", 64, 2),
    "mobilenet_v3": ("torchvision:mobilenet_v3_small", 64, 2),
    "efficientnet_b0": ("torchvision:efficientnet_b0", 64, 2),
    "convnext_tiny": ("torchvision:convnext_tiny", 64, 2),
    "deeplabv3": ("torchvision:deeplabv3_mobilenet_v3_large", 64, 2),
    "amoebanet(6,48)": ("amoebanet(6,48)", 128, 1),
}
"""Name -> model, px of a tile at which two plain runs a rounding apart agree, tiles of a microbatch."""
EVERYWHERE = ("dropout", "two-outputs", "unet_w8", "resnet18")
"""Models that are computed in every way over every communicator."""
TEAMS: dict[str, Settings] = {
    "spatial": (("parallel", "spatial"), ("grid", "2x1"), ("ranks", 2)),
    "1f1b (2, 2)": (("parallel", "1f1b"), ("grid", "1x2"), ("ranks", 4)),
    "master (2, 2)": (("parallel", "master"), ("grid", "2x1"), ("ranks", 4)),
    "two groups": (("parallel", "spatial"), ("grid", "1x2"), ("ranks", 4)),
    "boxes of half the tile": (("parallel", "single"),),
}
"""(2, 2): two teams of two ranks."""
SAVED: dict[str, Settings] = {
    "keep": (),
    "recompute": (("recompute", "block"),),
    "recompute + offload": (("recompute", "block"), ("offload", "overlap")),
}


def team_cells() -> Iterator[Cell]:
    """Yield tiles divided among the ranks of a team, and tiles computed box by box on one rank."""
    for over in COMMUNICATORS:
        for name, (factory, tile, tiles) in DIVIDED.items():
            for way, settings in TEAMS.items():
                boxed = settings == (("parallel", "single"),)
                own = (*settings, ("stream", str(tile // 2))) if boxed else settings
                for saved, more in SAVED.items():
                    everywhere = name in EVERYWHERE or (over == "threads" and (not more or way == "spatial"))
                    if everywhere and not (boxed and (more or over != "threads")):
                        cell = Cell("teams", name, way, saved, factory, tile, 4 * tiles, 4, (*own, *more))
                        yield replace(cell, over=over)


WAYS: dict[str, Settings] = {
    "2 stages": (("parallel", "1f1b"), ("ranks", 2)),
    "4 stages": (("parallel", "1f1b"), ("ranks", 4)),
    "recompute": (("parallel", "single"), ("recompute", "block")),
    **{name: (("parallel", name), ("ranks", 2)) for name in ("gpipe", "1f1b", "master")},
    **{f"spatial {n}x1": (("parallel", "spatial"), ("ranks", n), ("grid", f"{n}x1")) for n in (2, 3)},
}
ZOO_WAYS = ("2 stages", "4 stages", "recompute")
FAMILY_WAYS = ("gpipe", "1f1b", "master", "spatial 2x1", "spatial 3x1")


def entry_cells(table: str, entry: Entry, ways: tuple[str, ...], steps: int = 1) -> Iterator[Cell]:
    """Yield a model of a library computed in each of ``ways``: two microbatches of the tiles that it asks for."""
    for way in ways:
        yield Cell(
            table, entry.name, way, "", entry.model, entry.tile, 2 * entry.tiles, 2, WAYS[way],
            dtype=entry.dtype, steps=steps, library=True,
        )  # fmt: skip


def _zoo_cells(deep: bool) -> Iterator[Cell]:
    for entry in all_entries():
        if entry.deep == deep:
            yield from entry_cells("deep" if deep else "zoo", entry, ZOO_WAYS)


def _family_cells() -> Iterator[Cell]:
    for entry in family_entries():
        yield from entry_cells("families", entry, FAMILY_WAYS, steps=2)


TABLES: dict[str, Callable[[], Iterator[Cell]]] = {
    "schedules": schedule_cells,
    "keeping": keeping_cells,
    "teams": team_cells,
    "zoo": lambda: _zoo_cells(deep=False),
    "deep": lambda: _zoo_cells(deep=True),
    "families": _family_cells,
}
"""Name of a table -> its cells."""
