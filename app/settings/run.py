"""The settings of a training run: one dataclass composed of those that live with their owners.

Every field is a flag of ``app.train`` and a key of its YAML file. ``validate`` collects all faults that can be known
before any slide is opened.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from app.settings.fields import bytes_of
from app.settings.optimization import CheckpointSettings, OptimizerSettings
from app.settings.strategy import StrategySettings
from app.settings.strategy_errors import strategy_errors
from pipelines.labels.class_names import ClassMap, TileLabel, pattern_fault
from pipelines.slides.geometry import mpp_fault
from pipelines.slides.rare import Rare
from pipelines.stream.augment import AugmentSettings
from pipelines.tiles.index_settings import IndexSettings
from pipelines.tiles.stain_fits import StainSettings

EPOCHS = 10.0
"""Passes over the training tiles of a run that is given neither ``--steps`` nor ``--epochs``."""


@dataclass(frozen=True)
class DataSettings:
    """Slides and labels."""

    slides: Path
    """Folder of whole-slide images, searched with its sub-folders."""
    labels: Path | None = None
    """CSV with columns slide, label and optionally patient, site, mpp. Default: labels.csv beside the slides, else
    sub-folders by class, inside of train/, val/ and test/ where the folders are called so: these are the split then."""
    annotations: Path | None = None
    """Folder of annotations by slide name: QuPath GeoJSON, ASAP or ImageScope XML, mask TIFF or PNG. Default: those
    beside the slides."""
    task: Literal["auto", "classify", "segment"] = "auto"
    """What to learn. auto: segment with annotations, classify with labels. classify with annotations gives each tile
    a class, as --tile-label says."""
    class_map: tuple[str, ...] = ()
    """Classes of labels, class folders or annotations by other names, as Tumor=tumour "Immune cells=background"
    Necrosis=ignore; several may lead to one, * stands for all that are not listed. Default: the names as they are."""
    tile_label: Rare[str] = "majority"
    """Class of a tile, from annotations. majority: the class that covers most of it, background included; any: the
    class drawn on most of it, if there is one; a fraction, such as 0.25: that class if it covers so much of it."""
    slide_mpp: Rare[float | None] = None
    """um/px of level 0 for every slide, instead of what the files say; --mpp-table goes before it."""
    mpp_table: Rare[Path | None] = None
    """CSV with columns slide and mpp: um/px of level 0 by slide, instead of what the files say. Default: column mpp of
    the labels."""
    scene: Rare[int | None] = None
    """Image of a slide file that holds several of similar size, counted from 0; other files are not affected.
    Default: such files are refused, with a list of their images."""
    backend: Rare[Literal["auto", "tiled", "ndpi", "openslide", "zarr", "image"]] = "auto"
    """Slide reader; auto takes the fastest that reads the file exactly."""
    index_workers: Rare[int] = 0
    """Processes that search slides for tissue; 0: one per core."""

    def validate(self) -> list[str]:
        faults = []
        if self.slide_mpp is not None and (fault := mpp_fault(self.slide_mpp)):
            faults.append(f"--slide-mpp {fault}")
        try:
            ClassMap.parse(self.class_map)
        except ValueError as fault:
            faults.append(str(fault))
        try:
            TileLabel.parse(self.tile_label)
        except ValueError as fault:
            faults.append(str(fault))
        return faults


@dataclass(frozen=True)
class SplitSettings:
    """Slides that are not trained on."""

    validation: float = 0.2
    """Fraction of patients held out for validation, 0 to 0.9."""
    test: float = 0.0
    """Fraction of patients never looked at in this run, 0 to 0.9."""
    folds: int | None = None
    """Deal the patients out to so many folds, of which --fold validates; instead of --validation. Over all of them
    every patient that is not in --test validates once."""
    fold: int | None = None
    """The fold that validates, from 0: of --folds, or of the list in --splits FILE.json."""
    split_by: Rare[Literal["patient", "site"]] = "patient"
    """What stays whole. site: hospitals and scanners as column site of the labels names them, so that none that is
    validated or tested on is trained on; a patient with slides of two sites joins these."""
    patient_pattern: Rare[str | None] = None
    """Regular expression for the patient in slide names, where no table names one: its first group, as '^(P[0-9]+)_'.
    Default: TCGA barcodes. A slide whose patient stays unknown is split by itself."""
    splits: Path | None = None
    """File that says which slides train, validate and test: a table with columns slide and split, splits_0.csv or
    splits_0_bool.csv of CLAM, or splits_final.json of nnU-Net with --fold."""

    @property
    def is_asked(self) -> bool:
        """Return whether the split is given, and not left to fractions of the patients."""
        return self.splits is not None or self.folds is not None or self.split_by == "site"

    def validate(self) -> list[str]:
        faults = self._fold_faults()
        if fault := pattern_fault(self.patient_pattern):
            faults.append(fault)
        for name, value in (("--validation", self.validation), ("--test", self.test)):
            if not 0 <= value <= 0.9:
                faults.append(f"{name} is a fraction of the patients, 0 to 0.9; got {value:g}")
        if self.validation + self.test >= 1:
            faults.append(f"--validation {self.validation:g} and --test {self.test:g} leave no slide to train on")
        return faults

    def _fold_faults(self) -> list[str]:
        faults = []
        if self.folds is not None and self.folds < 2:
            faults.append(f"--folds is at least 2; got {self.folds}")
        elif self.folds is not None and not (self.fold is not None and 0 <= self.fold < self.folds):
            faults.append(f"--folds {self.folds} needs --fold 0 to --fold {self.folds - 1}; got {self.fold}")
        if self.folds is None and self.splits is None and self.fold is not None:
            faults.append(f"--fold {self.fold} needs --folds, or --splits FILE.json")
        if self.splits is not None and (self.folds is not None or self.split_by != "patient" or self.test):
            faults.append("--splits FILE decides alone: leave out --folds, --split-by and --test")
        if (self.splits is not None or self.folds is not None) and self.validation != type(self).validation:
            which = "--splits" if self.splits is not None else "--folds"
            faults.append(f"{which} says what validates: leave out --validation {self.validation:g}")
        return faults


@dataclass(frozen=True)
class StreamSettings:
    """Reading tiles."""

    open_slides: Rare[int] = 16
    """Slides whose tiles are mixed with each other, and files held open at once."""
    sample: Literal["tiles", "class", "slide", "pixels"] = "tiles"
    """What is shown equally often in training: tiles; class (of tiles); slide, however many tiles it has; pixels (of
    each class, as far as tiles have them, in segmentation)."""
    bag: int = 0
    """Tiles of a slide that share its label as one sample, weighed by trained attention (multiple instance learning):
    --bag 32 --batch 64 is two slides a step. 0: each tile is a sample."""
    cache: Path | None = None
    """Folder that keeps tiles as they were read, for later epochs and runs, which may share it. It pays where reading
    costs more than a disk: slides that are resampled, JPEG 2000, slides on a network. Default: tiles are not kept."""
    cache_bytes: Rare[str] = "32GiB"
    """Size up to which --cache may grow, in KiB, MiB or GiB; what is there serves on when it is full."""
    read_threads: Rare[int] = 0
    """Threads that decode tiles, per rank; 0: one for each core of the rank."""
    read_ahead: Rare[str] = "1GiB"
    """Memory for tiles read ahead, per rank, in KiB, MiB or GiB; at least one batch is always held."""
    device_prefetch: Rare[int] = 0
    """Microbatches copied to the device, augmented and normalised ahead, in float32; 0: each when it is its turn.
    Plans do not count on it; --stream prefetches nothing."""

    def validate(self) -> list[str]:
        faults = []
        if self.bag < 0 or self.bag == 1:
            faults.append(f"--bag is 0 or at least 2 tiles; got {self.bag}")
        if self.bag and self.sample != "tiles":
            faults.append(f"--bag draws every slide once per epoch; leave out --sample {self.sample}")
        if self.open_slides < 1:
            faults.append(f"--open-slides must be at least 1; got {self.open_slides}")
        if self.read_threads < 0:
            faults.append(f"--read-threads must be at least 0; got {self.read_threads}")
        if self.device_prefetch < 0:
            faults.append(f"--device-prefetch must be at least 0 microbatches; got {self.device_prefetch}")
        if bytes_of(self.read_ahead) is None:
            faults.append(f"--read-ahead takes a size such as 512MiB or 2GiB; got {self.read_ahead!r}")
        if bytes_of(self.cache_bytes) is None:
            faults.append(f"--cache-bytes takes a size such as 512MiB or 32GiB; got {self.cache_bytes!r}")
        return faults

    @property
    def cache_bound(self) -> int:
        """Bytes up to which the cache may grow."""
        size = bytes_of(self.cache_bytes)
        assert size is not None
        return size

    @property
    def read_ahead_bytes(self) -> int:
        size = bytes_of(self.read_ahead)
        assert size is not None
        return size


@dataclass(frozen=True)
class ModelSettings:
    """The model."""

    model: str = "resnet50"
    """resnet18-152, resnet110_v2 (any depth 9n+2), unet, unet(B,C), amoebanet(L,D), unet:NAME (over that encoder of
    timm), smp:NAME(ENCODER) of segmentation-models-pytorch, such as smp:FPN(resnet34), torchvision:NAME, timm:NAME or
    package.module:factory."""
    norm: Literal["batch", "group", "instance", "frozen", "layer"] = "batch"
    """Normalisation. frozen: batch norm with the running statistics of --weights; layer: over the channels of each
    px. With these two --stream stores the least."""
    head: Rare[Literal["average", "gem", "attention"]] = "average"
    """What pools the last map of a classifier. attention: weighs positions by gated attention; gem: generalised mean,
    whose exponent is trained."""
    weights: str | None = None
    """Start from the parameters in this file, or, with pretrained, from those of the model's library. A head for other
    classes is left fresh. A model name with a tag, such as timm:resnet50.a1_in1k, implies pretrained."""


@dataclass(frozen=True)
class ScoreSettings:
    """Validation."""

    validate_every: Rare[int] = 0
    """Steps between validations; 0: after each epoch. The end of the run is always validated."""
    validation_tiles: Rare[int] = 0
    """Tiles scored per validation slide, evenly spread; 0: all."""
    slide_score: Rare[Literal["mean", "max", "top-k"]] = "mean"
    """How the scores of a slide's tiles make the score of the slide."""
    positive_class: Rare[str | None] = None
    """Of two classes the one that heat maps show and that a patient has where one slide has it. Default: the one that
    is not called normal, benign, negative, background or 0, if only one is; upper and lower case do not matter."""
    patience: int = 0
    """Validations in a row without a better score, after which a run ends; 0: it goes through all its steps."""
    top_k: Rare[int] = 5
    """Tiles that count under --slide-score top-k."""

    def validate(self) -> list[str]:
        faults = [
            f"--{name} must be at least {least}; got {value}"
            for name, value, least in (
                ("validate-every", self.validate_every, 0),
                ("validation-tiles", self.validation_tiles, 0),
                ("top-k", self.top_k, 1),
            )
            if value < least
        ]
        if self.patience < 0:
            faults.append(f"--patience must be at least 0 validations; got {self.patience}")
        return faults


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
    """Continue the run in --out from its last checkpoint; start it from the beginning where there is none yet."""
    extend: Rare[bool] = False
    """With --resume: accept more --steps or --epochs than the run has. The learning rate is from then on that of a run
    of the new length, so it may rise at once."""
    max_restarts: Rare[int] = 0
    """Times that the processes of --ranks are started again after one has failed, each time from the last checkpoint.
    torchrun has a --max-restarts of its own, which a run under it follows; mpirun has none."""
    min_ranks: Rare[int | None] = None
    """Ranks that a run with --max-restarts may come down to, one fewer after each attempt that lost one. Default: as
    many as --ranks. Under torchrun --nnodes MIN:MAX says it."""
    twin_steps: Rare[int] = 0
    """Steps measured from memory after the last checkpoint, to tell reading from computing; 0: none. A fault in them is
    a warning: the run is completed."""
    mlflow: Rare[str] = ""
    """Experiment of MLflow, at MLFLOW_TRACKING_URI, that is told the same scalars as TensorBoard, the settings and the
    last files; empty: none. A server that cannot be reached ends no run."""
    seed: int = 0
    """Of weights, order, augmentation and dropout: the same seed gives the same run."""

    def validate(self) -> list[str]:
        """All faults that can be known from the settings alone; empty when there are none."""
        faults = [
            *self.data.validate(),
            *self.split.validate(),
            *self.index.validate(),
            *self.stream.validate(),
            *self.colour.validate(),
            *self.augmentation.validate(),
            *self.optimization.validate(),
            *strategy_errors(self.strategy),
            *self.score.validate(),
            *self.checkpoint.validate(),
        ]
        if self.steps is not None and self.epochs is not None:
            got = f"got {self.steps} and {self.epochs:g}; remove the one that --config gives"
            faults.append(f"give --steps or --epochs, not both; {got}")
        if self.steps is not None and self.steps < 1:
            faults.append(f"--steps must be at least 1; got {self.steps}")
        if self.epochs is not None and not self.epochs > 0:
            faults.append(f"--epochs must be above 0; got {self.epochs:g}")
        if self.extend and not self.resume:
            faults.append("--extend lengthens a run that is resumed: add --resume, or leave it out")
        if self.max_restarts < 0:
            faults.append(f"--max-restarts must be at least 0; got {self.max_restarts}")
        least = self.min_ranks
        if least is not None and not (0 < least <= self.strategy.ranks and self.max_restarts):
            faults.append(
                f"--min-ranks={least} is for runs with --max-restarts, from 1 to --ranks "
                f"{self.strategy.ranks}; got --max-restarts {self.max_restarts}"
            )
        if self.strategy.norm_statistics == "deferred" and self.net.norm != "batch":
            faults.append(f"--norm-statistics deferred is about --norm batch; got --norm {self.net.norm}")
        if self.augmentation.augment == "cpu" and self.colour.method:
            faults.append(
                f"--augment cpu varies colours before tiles reach the device, where --stain {self.colour.stain} "
                "normalises them: use --augment device or none"
            )
        if self.augmentation.augment == "cpu" and self.index.whole_pictures:
            faults.append("--augment cpu is for tiles; with --pictures resize, use device (crops and flips) or none")
        if self.stream.cache is not None and (self.index.whole_pictures or self.index.tile == "slide"):
            what = "--pictures resize" if self.index.whole_pictures else "--tile slide"
            faults.append(f"--cache keeps tiles of one size, which those of {what} are not: leave it out")
        if self.index.tile == "slide":
            faults += self._whole_slide_faults()
        if self.mlflow and importlib.util.find_spec("mlflow") is None:
            faults.append(
                f"--mlflow={self.mlflow} needs the package mlflow or mlflow-skinny, which is not installed: "
                "pip install mlflow-skinny, or leave it out"
            )
        if self.twin_steps < 0:
            faults.append(f"--twin-steps must be at least 0; got {self.twin_steps}")
        return faults + (self._bag_faults() if self.stream.bag else [])

    def _bag_faults(self) -> list[str]:
        """Return what does not go with ``--bag``."""
        bag, faults = self.stream.bag, []
        if self.strategy.batch % bag:
            faults.append(
                f"--batch counts tiles, and must be a multiple of --bag {bag}; got --batch {self.strategy.batch}: "
                f"use --batch {-(-self.strategy.batch // bag) * bag}"
            )
        refused = {
            "--task segment": self.data.task == "segment",
            "--tile slide": self.index.tile == "slide",
            "--pictures resize": self.index.whole_pictures,
            "--parallel fsdp": self.strategy.name == "fsdp",
            "--parallel subgraph": self.strategy.name == "subgraph",
            "--parallel pipedream": self.strategy.name == "pipedream",
            "--parallel async": self.strategy.is_async,
            "--device mixed": self.strategy.is_mixed,
            f"--slide-score {self.score.slide_score}": self.score.slide_score != "mean",
            "--twin-steps": self.twin_steps > 0,
            "--device-prefetch": self.stream.device_prefetch > 0,
        }
        faults += [
            f"--bag is about tiles that share the label of a slide: leave out {flag}"
            for flag, on in refused.items()
            if on
        ]
        return faults

    def _whole_slide_faults(self) -> list[str]:
        """Return errors of settings with tiles that differ in size."""
        faults, asked = [], self.strategy
        if asked.name == "fsdp" or (asked.undecided and asked.world > 1):
            faults.append(
                f"--tile slide wants a strategy that is named, and not fsdp, whose ranks compute tiles of one size at "
                f"a time; got --parallel {asked.parallel}: use ddp"
            )
        elif asked.m != asked.batch:
            faults.append(
                f"--tile slide computes slides one at a time, as they differ in size: --batch {asked.batch} needs "
                f"--microbatches {asked.batch}; got {asked.m}"
            )
        if self.augmentation.augment == "cpu":
            faults.append(
                "--augment cpu varies tiles of one size, which those of --tile slide are not: use device or none"
            )
        return faults
