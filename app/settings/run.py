"""The settings of a training run: one dataclass composed of those that live with their owners.

Every field is a flag of ``app.train`` and a key of its YAML file. ``validate`` collects all errors that can be known
before any slide is opened.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from app.settings.fields import at_least, broken, bytes_of, error_of, sizes
from app.settings.optimization import CheckpointSettings, ModelSettings, OptimizerSettings, ScoreSettings
from app.settings.strategy import StrategySettings
from app.settings.strategy_errors import strategy_errors
from pipelines import Rare
from pipelines.catalog.catalog import SlideNames, SlideSpec, find_slides
from pipelines.catalog.table import listed
from pipelines.labels.class_names import ClassMap, TileLabel, pattern_fault
from pipelines.labels.slide_labels import read_mpp
from pipelines.slides.geometry import mpp_fault
from pipelines.stream.augment import AugmentSettings
from pipelines.tiles.stain import StainSettings
from pipelines.tiles.tiling import IndexSettings

EPOCHS = 10.0
"""Passes over the training tiles of a run that is given neither ``--steps`` nor ``--epochs``."""
Backend = Literal["auto", "tiled", "ndpi", "openslide", "zarr", "image"]


def mpp_errors(slide_mpp: float | None) -> list[str]:
    """Return the error of ``--slide-mpp``, if there is one."""
    fault = "" if slide_mpp is None else mpp_fault(slide_mpp)
    return [f"--slide-mpp {fault}"] if fault else []


@dataclass(frozen=True)
class DataSettings:
    """Slides and labels."""

    slides: Path
    """Folder of whole-slide images, searched with its sub-folders."""
    labels: Path | None = None
    """CSV with columns slide, label and optionally patient, site, mpp. Default: labels.csv, or folders by class."""
    annotations: Path | None = None
    """Folder of annotations: GeoJSON, ASAP or ImageScope XML, masks. Default: those next to the slides."""
    task: Literal["auto", "classify", "segment"] = "auto"
    """What to learn. auto: segment with annotations, classify with labels."""
    class_map: tuple[str, ...] = ()
    """Classes by other names, as Tumor=tumour "Immune cells=background" Necrosis=ignore; * is any other."""
    tile_label: Rare[str] = "majority"
    """Class of a tile with annotations and --task classify: majority, any, or a fraction, such as 0.25."""
    slide_mpp: Rare[float | None] = None
    """um/px of level 0 for every slide, instead of what the files say; --mpp-table goes before it."""
    mpp_table: Rare[Path | None] = None
    """CSV with columns slide and mpp: um/px of level 0. Default: column mpp of the labels."""
    scene: Rare[int | None] = None
    """Image of slide files that hold several, counted from 0. Default: such files are refused, with a list."""
    backend: Rare[Backend] = "auto"
    """Slide reader; auto takes the fastest that reads the file exactly."""
    index_workers: Rare[int] = 0
    """Processes that search slides for tissue; 0: one per core."""

    def validate(self) -> list[str]:
        return [
            *mpp_errors(self.slide_mpp),
            *error_of(lambda: ClassMap.parse(self.class_map)),
            *error_of(lambda: TileLabel.parse(self.tile_label)),
        ]


@dataclass(frozen=True)
class OpeningSettings:
    """Settings that slides are opened with."""

    slide_mpp: float | None = None
    """um/px of level 0 for every slide, instead of what the files say; --mpp-table goes before it."""
    mpp_table: Path | None = None
    """CSV with columns slide and mpp: um/px of level 0. Default: column mpp of labels.csv beside the slides."""
    scene: int | None = None
    """Image of slide files that hold several, counted from 0. Default: such files are refused, with a list."""
    backend: Backend = "auto"
    """Slide reader; auto takes the fastest that reads the file exactly."""


def slides_in(
    slides: Path, opening: DataSettings | OpeningSettings, *, whole_pictures: bool = False, labels: Path | None = None
) -> tuple[SlideSpec, ...]:
    """Return the slides below the folder ``slides``, opened as ``opening`` says; arguments and errors as of
    `find_slides`, and a ValueError where ``mpp_table`` names none of them."""
    mpp_by_slide = read_mpp(slides, opening.mpp_table, labels)
    specs = find_slides(
        slides,
        mpp=opening.slide_mpp,
        mpp_by_slide=mpp_by_slide,
        whole_pictures=whole_pictures,
        backend=opening.backend,
        scene=opening.scene,
        labels=labels,
    )
    ids = [spec.slide_id for spec in specs]
    if opening.mpp_table is not None and not any(map(SlideNames(ids).match, mpp_by_slide)):
        raise ValueError(
            f"--mpp-table {opening.mpp_table} gives the um/px of no slide of {slides}: it names "
            f"{listed([*mpp_by_slide]) or 'none'}, the slides are {listed(ids)}. Name them alike"
        )
    return specs


@dataclass(frozen=True)
class SplitSettings:
    """Slides that are not trained on."""

    validation: float = 0.2
    """Fraction of patients held out for validation, 0 to 0.9."""
    test: float = 0.0
    """Fraction of patients never looked at in this run, 0 to 0.9."""
    folds: int | None = None
    """Divide the patients into so many folds, of which --fold validates; instead of --validation."""
    fold: int | None = None
    """The fold that validates, from 0: of --folds, or of the list in --splits FILE.json."""
    split_by: Rare[Literal["patient", "site"]] = "patient"
    """What stays whole: patients, or sites (hospitals, scanners) of the labels' column site."""
    patient_pattern: Rare[str | None] = None
    """Regular expression whose first group is the patient in slide names, as '^(P[0-9]+)_'. Default: TCGA."""
    splits: Path | None = None
    """Table with columns slide and split, or a split file of CLAM or nnU-Net: which slides train and validate."""

    @property
    def is_asked(self) -> bool:
        """Return whether the split is given, and not left to fractions of the patients."""
        return self.splits is not None or self.folds is not None or self.split_by == "site"

    def validate(self) -> list[str]:
        folds, fold, held = self.folds, self.fold, {"--validation": self.validation, "--test": self.test}
        given, pattern = self.splits is not None, pattern_fault(self.patient_pattern)
        rules = {
            f"--folds is at least 2; got {folds}": folds is not None and folds < 2,
            f"--folds {folds} needs --fold 0 to --fold {(folds or 0) - 1}; got {fold}": folds is not None
            and folds >= 2
            and not (fold is not None and 0 <= fold < folds),
            f"--fold {fold} needs --folds, or --splits FILE.json": folds is None and not given and fold is not None,
            "--splits FILE decides alone: leave out --folds, --split-by and --test": given
            and (folds is not None or self.split_by != "patient" or self.test),
            f"--{'splits' if given else 'folds'} says what validates: leave out --validation {self.validation:g}": (
                given or folds is not None
            )
            and self.validation != type(self).validation,
            pattern or "": pattern,
            **{f"{f} is a fraction of the patients, 0 to 0.9; got {v:g}": not 0 <= v <= 0.9 for f, v in held.items()},
            f"--validation {self.validation:g} and --test {self.test:g} leave no slide to train on": (
                self.validation + self.test >= 1
            ),
        }
        return broken(rules)


@dataclass(frozen=True)
class StreamSettings:
    """Reading tiles."""

    open_slides: Rare[int] = 16
    """Slides whose tiles are mixed with each other, and files held open."""
    sample: Literal["tiles", "class", "slide", "pixels"] = "tiles"
    """Drawn equally often in training: tiles, classes of tiles, slides, or pixels of each class."""
    bag: int = 0
    """Tiles of a slide that are one sample with one label, weighted by attention (MIL). 0: each tile is a sample."""
    cache: Path | None = None
    """Folder that keeps tiles as they were read, for later epochs and runs. Default: tiles are not kept."""
    cache_bytes: Rare[str] = "32GiB"
    """Size up to which --cache may grow, in KiB, MiB or GiB; a full cache is still read."""
    read_threads: Rare[int] = 0
    """Threads that decode tiles, per rank; 0: one for each core of the rank."""
    read_ahead: Rare[str] = "1GiB"
    """Memory for prefetched tiles, per rank, in KiB, MiB or GiB; at least one batch is always held."""
    device_prefetch: Rare[int] = 0
    """Microbatches prefetched to the device, in float32; not part of plans, and none with --stream."""

    def validate(self) -> list[str]:
        rules = {
            f"--bag is 0 or at least 2 tiles; got {self.bag}": self.bag < 0 or self.bag == 1,
            f"--bag draws every slide once per epoch; leave out --sample {self.sample}": self.bag
            and self.sample != "tiles",
            **at_least(self, open_slides=1, read_threads=0, device_prefetch=0),
            **sizes(self, read_ahead="2GiB", cache_bytes="32GiB"),
        }
        return broken(rules)

    @property
    def read_ahead_bytes(self) -> int:
        return bytes_of(self.read_ahead) or 0


@dataclass(frozen=True)
class RunConfig:
    """Train a model on whole-slide images: from a folder of slides and labels to a model, its scores and its speed."""

    data: DataSettings
    index: IndexSettings = field(default_factory=IndexSettings)
    split: SplitSettings = field(default_factory=SplitSettings)
    stream: StreamSettings = field(default_factory=StreamSettings)
    colour: StainSettings = field(default_factory=StainSettings)
    augmentation: AugmentSettings = field(default_factory=AugmentSettings)
    net: ModelSettings = field(default_factory=ModelSettings)
    optimization: OptimizerSettings = field(default_factory=OptimizerSettings)
    strategy: StrategySettings = field(default_factory=StrategySettings)
    score: ScoreSettings = field(default_factory=ScoreSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    out: Path = Path("runs/train")
    """Run folder: settings, log, metrics, checkpoints, report."""
    steps: int | None = None
    """Optimiser steps to train for; instead of --epochs."""
    epochs: float | None = None
    """Passes over the training tiles; default 10."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint, or start it where there is none yet."""
    extend: Rare[bool] = False
    """With --resume: accept more --steps or --epochs; the learning rate becomes that of the longer run."""
    max_restarts: Rare[int] = 0
    """Times that --ranks are started again after one has failed, from the last checkpoint; torchrun has its own."""
    min_ranks: Rare[int | None] = None
    """Fewest ranks of a run with --max-restarts, one fewer after each that is lost. Default: all of --ranks."""
    twin_steps: Rare[int] = 0
    """Steps fed from memory after the run, to tell reading from computing; 0: none."""
    mlflow: Rare[str] = ""
    """Experiment of MLflow, at MLFLOW_TRACKING_URI, that gets scalars, settings and last files; empty: none."""
    seed: int = 0
    """Of weights, order, augmentation and dropout: the same seed gives the same run."""

    def validate(self) -> list[str]:
        """Return all errors that can be known from the settings alone; empty when there are none."""
        parts = (self.data, self.split, self.index, self.stream, self.colour, self.augmentation, self.optimization)
        errors = [error for part in parts for error in part.validate()]
        errors += [*strategy_errors(self.strategy), *self.score.validate(), *self.checkpoint.validate()]
        norm, least, restarts, cached = self.net.norm, self.min_ranks, self.max_restarts, self.stream.cache is not None
        tiles_differ, whole = self.index.tile == "slide", self.index.whole_pictures
        on_cpu, sample = self.augmentation.augment == "cpu", self.stream.sample
        both = self.steps is not None and self.epochs is not None
        rules = {
            f"give --steps or --epochs, not both; got {self.steps} and {self.epochs or 0:g}; remove the one that "
            "--config gives": both,
            **at_least(self, steps=1, max_restarts=0, twin_steps=0),
            f"--epochs must be above 0 and finite; got {self.epochs or 0:g}": self.epochs is not None
            and not 0 < self.epochs < math.inf,
            "--extend lengthens a run that is resumed: add --resume, or leave it out": self.extend and not self.resume,
            f"--min-ranks={least} is for runs with --max-restarts, from 1 to --ranks {self.strategy.ranks}; got "
            f"--max-restarts {restarts}": least is not None and not (0 < least <= self.strategy.ranks and restarts),
            f"--norm-statistics deferred is about --norm batch; got --norm {norm}": norm != "batch"
            and self.strategy.norm_statistics == "deferred",
            f"--augment cpu varies colours before tiles reach the device, where --stain {self.colour.stain} "
            "normalises them: use --augment device or none": on_cpu and self.colour.method,
            "--augment cpu is for tiles; with --pictures resize, use device (crops and flips) or none": on_cpu
            and whole,
            f"--cache keeps tiles of one size, which those of {'--pictures resize' if whole else '--tile slide'} are "
            "not: leave it out": cached and (whole or tiles_differ),
            **(self._whole_slide_rules() if tiles_differ else {}),
            f"--class-weights balanced and --sample {sample} both balance classes: leave one out": sample
            in ("class", "pixels")
            and self.optimization.class_weights == "balanced",
            f"--mlflow={self.mlflow} needs the package mlflow or mlflow-skinny, which is not installed: pip install "
            "mlflow-skinny, or leave it out": self.mlflow and importlib.util.find_spec("mlflow") is None,
            **(self._bag_rules() if self.stream.bag else {}),
        }
        return errors + broken(rules)

    def _bag_rules(self) -> Mapping[str, object]:
        """Return what is incompatible with ``--bag``."""
        bag, strategy = self.stream.bag, self.strategy
        refused = {
            "--task segment": self.data.task == "segment",
            "--tile slide": self.index.tile == "slide",
            "--pictures resize": self.index.whole_pictures,
            **{f"--parallel {name}": strategy.name == name for name in ("fsdp", "subgraph", "pipedream", "async")},
            "--device mixed": strategy.is_mixed,
            f"--slide-score {self.score.slide_score}": self.score.slide_score != "mean",
            "--twin-steps": self.twin_steps > 0,
            "--device-prefetch": self.stream.device_prefetch > 0,
        }
        return {
            f"--batch counts tiles, and must be a multiple of --bag {bag}; got --batch {strategy.batch}: use --batch "
            f"{-(-strategy.batch // bag) * bag}": strategy.batch % bag
        } | {f"--bag is about tiles that share the label of a slide: leave out {f}": on for f, on in refused.items()}

    def _whole_slide_rules(self) -> dict[str, object]:
        """Return what is incompatible with tiles that differ in size."""
        asked = self.strategy
        unfit = asked.name == "fsdp" or (asked.needs_strategy_plan and asked.world > 1)
        return {
            "--tile slide wants a strategy that is named, and not fsdp, whose ranks compute tiles of one size at a "
            f"time; got --parallel {asked.parallel}: use ddp": unfit,
            f"--tile slide computes slides one at a time, as they differ in size: --batch {asked.batch} needs "
            f"--microbatches {asked.batch}; got {asked.m}": not unfit and asked.m != asked.batch,
            "--augment cpu varies tiles of one size, which those of --tile slide are not: use device or none": (
                self.augmentation.augment == "cpu"
            ),
        }
