"""A trained model, ready to be asked: everything that it needs comes from the checkpoint of its run.

Takes a checkpoint of ``app.train``; returns probabilities of uint8 tiles. The file is read without running code of its
own (tensors and plain values only); a model that the run took from a user's package is built only when the user names
it again, as building it runs that package.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from app.checkpoint.file import load_checkpoint
from app.launch.place import autocast_of, precision_of
from app.prediction.computation import Computation, Placement, Stains
from app.settings.cli import RunError
from app.settings.fields import with_values
from app.settings.run import DataSettings, RunConfig
from app.training.engines import choose_algorithms
from app.training.model import takes_channels_last
from app.training.run_slides import SlideColumns
from models.heads import put_bag_head
from models.registry import build_model
from parallel.offload.copies import read_later
from parallel.profile.gpu import has_bf16, set_tf32
from pipelines.catalog.handles import SlideState
from pipelines.labels.class_names import patient_in, positive_class
from pipelines.stream.augment import AugmentSettings, StainSteps
from pipelines.stream.device_pixels import PixelMaker
from pipelines.tiles.stain import StainFit

log = logging.getLogger(__name__)

LIBRARIES = ("torchvision", "timm", "smp", "unet")
"""Words before the colon of a model's name that stand for a library, not for a package of the user's."""
USUAL_SIDE = 1024
"""Px of the image that a model of whole slides is first looked at with; slides may have any sides."""


class TrainedModel:
    """The model of the checkpoint ``path`` in evaluation mode on ``device``, or spread from there.

    Args:
        named: ``--model`` of the user, who may say only what the run said.
        placement: over a group of ranks, each of which calls it, or in boxes; None: the whole model, in this process.

    Attributes:
        name: as ``--model`` of the run had it.
        task: classify (one class per tile) or segment (one per px).
        classes: names, in the order of the model's outputs.
        digest: of the checkpoint's bytes.
        step: after how many steps it was written.
        averaged: its weights are their running averages.
        stain_target: what the run made its slides look like; None: they stayed as they are.
        slides: of the run, as `slide_columns` gives them.

    Raises:
        RunError: the checkpoint is damaged, of another version, or not of ``app.train``.
        ValueError: there is none, or its model cannot be used so.
    """

    def __init__(
        self, path: Path, named: str | None, device: torch.device, placement: Placement | None = None, batch: int = 1
    ) -> None:
        try:
            state = _read_state(path, named)
            settings, whole = state["settings"], state["settings"]["tile"] == "slide"
            self.name, self.task, self.step = settings["model"], state["task"], state["step"]
            self.classes: tuple[str, ...] = tuple(state["classes"])
            self.slides: SlideColumns = state["slides"]
            self.averaged = bool(state.get("average"))
            self.config: RunConfig = with_values(RunConfig(DataSettings(Path())), settings)
            normalisation, numbers = state["normalisation"], state["stain_target"]
        except (KeyError, TypeError, AttributeError) as fault:
            reason = f"{type(fault).__name__}: {fault}"
            raise RunError(f"{path} is no checkpoint of app.train ({reason}); give RUN/checkpoints/best.pt") from fault
        module = _module_of(path, state, self.in_bags)
        side = USUAL_SIDE if whole else settings["tile"]
        channels_last = settings["channels_last"] and takes_channels_last(module, (1, 3, side, side))
        if channels_last:
            module.to(memory_format=torch.channels_last)

        @functools.lru_cache(maxsize=1)  # one for all windows of a slide
        def pixels(stains: Stains | None) -> PixelMaker:
            steps = None if stains is None else StainSteps.of(stains[0], [stains[1]], [0])
            return PixelMaker(device, AugmentSettings(augment="none"), 0, normalisation, channels_last, steps)

        lacks_tf32 = settings["precision"] == "tf32" and not has_bf16(device)
        precision = precision_of("fp32" if lacks_tf32 else settings["precision"], device)
        set_tf32(False)  # folded norms are compared with the model as it is
        placement = placement or Placement()
        self.computation = Computation(module, placement, pixels, autocast_of(precision), side, batch)
        set_tf32(precision == "tf32")
        choose_algorithms(placement.strategy(), device, fixed=not whole)
        if self.task == "segment" and whole:
            raise ValueError(
                f"{path} segments slides that are one image each (--tile slide), which is not predicted: train it on "
                "tiles with a side in px"
            )
        with path.open("rb") as file:
            self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.stain_target = None if numbers is None else StainFit(settings["stain"], tuple(numbers))

    @property
    def in_bags(self) -> bool:
        """It was trained with ``--bag``, and has attention scores as further outputs."""
        return self.config.stream.bag > 0

    @property
    def tile(self) -> int:
        """Side of the tiles that it was trained on, px; there are none with ``--tile slide``."""
        return self.config.index.side

    @property
    def positive(self) -> int | None:
        """Index of the positive class of two, as `positive_class` has it."""
        return positive_class(self.classes, self.config.score.positive_class)

    @property
    def training_patients(self) -> list[str]:
        """Known patients of the training slides of the run, sorted."""
        split = self.slides["split"]
        return sorted({name for slide_id, name in self.slides["patient"].items() if split[slide_id] == "train"})

    def origin(self, slide_id: str, state: SlideState) -> dict[str, str | None]:
        """Return split and patient of a slide, as cells of its row. Those of the run are recognised by their content;
        another slide is in the split of its patient, where its name says who that is, else ``external``."""
        patient = patient_in(slide_id, self.config.split.patient_pattern)
        of_run = self._of_digest.get(state.digest)
        if of_run is not None:
            return {"split": self.slides["split"][of_run], "patient": self.slides["patient"].get(of_run)}
        if slide_id in self.slides["split"]:
            log.warning("%s: the run has another slide of this name; this one is not counted as it", slide_id)
        return {"split": self._split_of_patient.get(patient or "", "external"), "patient": patient}

    @functools.cached_property
    def _of_digest(self) -> dict[str, str]:
        """Slide by digest; of copies under several names one that was trained on, if any was."""
        split, digest = self.slides["split"], self.slides["digest"]
        in_order = sorted(split, key=lambda slide_id: split[slide_id] == "train")
        return {digest[slide_id]: slide_id for slide_id in in_order if slide_id in digest}

    @functools.cached_property
    def _split_of_patient(self) -> dict[str, str]:
        split = self.slides["split"]
        return {patient: split[slide_id] for slide_id, patient in self.slides["patient"].items()}

    def splits_by_patient(self, records: Iterable[Mapping[str, Any]]) -> Counter[str]:
        """Return the number of slides in each split of the run that are not of the run, but of one of its patients.

        Args:
            records: of predicted slides, as `PredictionFolder` gives them.
        """
        new = [record["row"]["split"] for record in records if record["state"]["digest"] not in self._of_digest]
        return Counter(split for split in new if split != "external")

    @property
    def shown(self) -> dict[int, str]:
        """Classes that get a heat map and areas, by number: of a segmenter all but the background; of a classifier of
        two the positive one if it is known, whose probability gives that of the other. None of slides and pictures
        that are one image."""
        if self.config.index.one_tile_each:
            return {}
        numbers = range(self.task == "segment", len(self.classes))
        if self.task == "classify" and self.positive is not None:
            numbers = range(self.positive, self.positive + 1)
        return {number: self.classes[number] for number in numbers}

    def probabilities(
        self, images: NDArray[np.uint8] | None, shape: tuple[int, ...], stain: StainFit | None = None
    ) -> NDArray[np.float32] | None:
        """Return float32 (n, classes) of a classifier, (n, classes, h, w) of a segmenter, where the computation writes;
        of a classifier of bags the attention scores are one more column.

        Args:
            images: (n, h, w, 3), RGB, of one slide, where the computation reads.
            shape: (n, 3, h, w) of them.
            stain: of the slide; None: its colours are not changed.

        Raises:
            ValueError: the outputs of the model are not those of its task.
        """
        wait = self.begin(images, shape, stain)
        return None if wait is None else wait()

    def begin(
        self, images: NDArray[np.uint8] | None, shape: tuple[int, ...], stain: StainFit | None = None
    ) -> Callable[[], NDArray[np.float32]] | None:
        """Begin to compute ``probabilities`` on the device; return a function that waits for them.

        Args:
            images: not changed until then, though they may be let go of.
        """
        stains = None if self.stain_target is None or stain is None else (self.stain_target, stain)
        logits = self.computation.logits(images, shape, stains)
        if logits is None:
            return None
        expected: tuple[int, ...] = (len(self.classes), *shape[2:])
        if self.task == "classify":
            expected = (len(self.classes) + self.in_bags,)
        if tuple(logits.shape[1:]) != expected:
            raise ValueError(
                f"model {self.name} gives values of {tuple(logits.shape[1:])} for a tile of {shape[3]} x {shape[2]} "
                f"px; expected one for each of {len(self.classes)} classes, or of these for each px"
            )
        values = logits.softmax(1)
        if self.in_bags:
            values = torch.cat((logits[:, :-1].softmax(1), logits[:, -1:]), 1)
        wait = read_later(values)
        return lambda: wait().numpy()


def _read_state(path: Path, named: str | None) -> dict[str, Any]:
    """Return the content of the checkpoint ``path``, whose model the user trusts."""
    if path.is_dir():
        raise ValueError(f"--checkpoint {path} is a folder; give a file, as RUN/checkpoints/best.pt or last.pt")
    if not path.is_file():
        raise ValueError(
            f"--checkpoint {path}: there is no such file; give RUN/checkpoints/best.pt of app.train, or last.pt of a "
            "run without validation"
        )
    state = load_checkpoint(path)
    name: str = state["settings"]["model"]
    if named not in (None, name):
        raise ValueError(f"--model is that of the checkpoint, {name}; got {named}: leave it out")
    source, colon, _ = name.partition(":")
    if colon and source not in LIBRARIES and named is None:
        raise ValueError(
            f"{path} is of the model {name}, which is a package of its user's and runs its code when it is built: "
            f"if you trust it, say so with --model {name}"
        )
    return state


def _module_of(path: Path, state: dict[str, Any], in_bags: bool) -> nn.Module:
    """Return the model on the CPU, with its weights or their running averages."""
    settings, classes, averages = state["settings"], len(state["classes"]), state.get("average", {})
    name, side = settings["model"], None if settings["tile"] == "slide" else settings["tile"]
    module = build_model(name, classes=classes, norm=settings["norm"], head=settings["head"], side=side)
    if in_bags:
        put_bag_head(module, name, classes)
    try:
        module.load_state_dict(state["model"])
        with torch.no_grad():
            for key, parameter in module.named_parameters():
                parameter.copy_(averages.get(key, parameter))
    except RuntimeError as fault:
        reason = " ".join(str(fault).split())[:300]
        raise RunError(f"{path} has no weights of {name} for {classes} classes: {reason}") from fault
    return module
