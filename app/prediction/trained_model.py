"""A trained model, ready to be asked: everything that it needs comes from the checkpoint of its run.

Takes a checkpoint of ``app.train``; gives probabilities of uint8 tiles. The file is read without running code of its
own (tensors and plain values only); a model that the run took from a user's package is built only when the user names
it again, as building it runs that package.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.checkpoint.file import load_checkpoint
from app.launch.place import choose_autocast
from app.prediction.computation import InParts, Spread, Whole
from app.training.memory_layout import takes_channels_last
from models.registry import build_model
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.device_pixels import PixelMaker
from pipelines.stream.stain_steps import StainSteps
from pipelines.tiles.stain_fit import StainFit

LIBRARIES = ("torchvision", "timm", "smp", "unet")
"""Words before the colon of a model's name that stand for a library, not for a package of the user's."""


USUAL_SIDE = 1024
"""Px of the image that a model of whole slides is first looked at with; slides may have any sides."""


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model in evaluation mode on its device.

    Attributes:
        name: as ``--model`` of the run had it.
        task: classify (one class per tile) or segment (one per px).
        classes: names, in the order of the model's outputs.
        settings: of the run, by flag.
        digest: of the checkpoint's bytes.
        step: after how many steps it was written.
        averaged: its weights are their running averages.
        stain_target: what the run made its slides look like; None: they stayed as they are.
    """

    name: str
    task: str
    classes: tuple[str, ...]
    settings: dict[str, Any]
    digest: str
    step: int
    averaged: bool
    stain_target: StainFit | None
    computation: Whole | InParts

    @property
    def whole_slides(self) -> bool:
        """It was trained on slides as single images."""
        return bool(self.settings["tile"] == "slide")

    @property
    def whole_pictures(self) -> bool:
        """It was trained on pictures that are resized to a tile."""
        return bool(self.settings.get("pictures") == "resize")  # checkpoints from before there was any do not say

    @property
    def tile(self) -> int:
        """Side of the tiles that it was trained on, px; there are none with ``whole_slides``."""
        side: int = self.settings["tile"]
        return side

    @property
    def shown(self) -> dict[int, str]:
        """Classes that get a heat map and areas, by number: of a segmenter all but the background; of a classifier of
        two the second, whose probability says that of the first, too. None with ``whole_slides``
        and ``whole_pictures``."""
        if self.whole_slides or self.whole_pictures:
            return {}
        first = 1 if self.task == "segment" or len(self.classes) == 2 else 0
        return {number: name for number, name in enumerate(self.classes) if number >= first}

    def probabilities(
        self, images: NDArray[np.uint8] | None, shape: tuple[int, ...], stain: StainFit | None = None
    ) -> NDArray[np.float32] | None:
        """Return float32 (n, classes) of a classifier, (n, classes, h, w) of a segmenter, where the computation writes.

        Args:
            images: (n, h, w, 3), RGB, of one slide, where the computation reads.
            shape: (n, 3, h, w) of them.
            stain: of the slide; None: its colours are not changed.

        Raises:
            ValueError: the model gives other values than its task has.
        """
        steps = None
        if self.stain_target is not None and stain is not None:
            steps = StainSteps.of(self.stain_target, [stain], [0])
        logits = self.computation.logits(images, shape, steps)
        if logits is None:
            return None
        expected = (len(self.classes),) if self.task == "classify" else (len(self.classes), *shape[2:])
        if tuple(logits.shape[1:]) != expected:
            raise ValueError(_other_values(self.name, tuple(logits.shape[1:]), len(self.classes), shape))
        return logits.softmax(1).cpu().numpy()


def load_model(
    path: Path, named: str | None, device: torch.device, spread: Spread | None = None, batch: int = 1
) -> TrainedModel:
    """Return the model of the checkpoint ``path`` on ``device``, or spread from there.

    Args:
        named: ``--model`` of the user, who may say only what the run said.
        spread: over a group of ranks, each of which calls it, or in boxes; None: this process computes it at once.
        batch: windows that will be computed together.

    Raises:
        RunError: the checkpoint is damaged or of another version.
        ValueError: there is none, or its model cannot be used so.
    """
    if not path.is_file():
        raise ValueError(f"--checkpoint {path}: there is no such file; give RUN/checkpoints/best.pt of app.train")
    state = load_checkpoint(path)
    settings, classes = state["settings"], tuple(state["classes"])
    name = settings["model"]
    if named not in (None, name):
        raise ValueError(f"--model is that of the checkpoint, {name}; got {named}: leave it out")
    source, colon, _ = name.partition(":")
    if colon and source not in LIBRARIES and named is None:
        raise ValueError(
            f"{path} is of the model {name}, which is a package of its user's and runs its code when it is built: "
            f"if you trust it, say so with --model {name}"
        )
    own = None if settings["tile"] == "slide" else settings["tile"]
    module = build_model(name, classes=len(classes), norm=settings["norm"], head=settings["head"], side=own)
    module.load_state_dict(state["model"])
    averages = state.get("average", {})
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            parameter.copy_(averages.get(key, parameter))
    side = USUAL_SIDE if settings["tile"] == "slide" else settings["tile"]
    channels_last = settings["channels_last"] and takes_channels_last(module, (1, 3, side, side))
    if channels_last:
        module.to(memory_format=torch.channels_last)
    pixels = functools.partial(PixelMaker, device, AugmentSettings(augment="none"), 0, channels_last=channels_last)
    autocast = choose_autocast(settings["precision"], device)
    task = state.get("task")
    computation: Whole | InParts
    if spread is None or spread.plain:
        computation = Whole(module, pixels, autocast, side)
        task = task or _task(computation, name, len(classes), side)
    elif task is None:
        raise ValueError(
            f"{path} does not say what its model was trained for, as those of earlier versions: predict with it "
            "without --stages, --stream and --offload"
        )
    else:
        computation = InParts(module, spread, pixels, autocast, side, batch)
    if task == "segment" and settings["tile"] == "slide":
        raise ValueError(
            f"{path} segments slides that are one image each (--tile slide), which is not predicted: train it on tiles "
            "with a side in px"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    numbers = state.get("stain_target")  # of a run from before there was any: None
    target = None if numbers is None else StainFit(settings["stain"], tuple(numbers))
    return TrainedModel(name, task, classes, settings, digest, state["step"], bool(averages), target, computation)


def _task(computation: Whole, name: str, classes: int, side: int) -> str:
    """What a model is for, by what it gives for a blank tile."""
    logits = computation.logits(np.full((1, side, side, 3), 255, np.uint8), (1, 3, side, side))
    assert logits is not None
    shape = tuple(logits.shape[1:])
    if shape not in ((classes,), (classes, side, side)):
        raise ValueError(_other_values(name, shape, classes, (1, 3, side, side)))
    return "classify" if len(shape) == 1 else "segment"


def _other_values(name: str, values: tuple[int, ...], classes: int, shape: tuple[int, ...]) -> str:
    return (
        f"model {name} gives values of {values} for a tile of {shape[3]} x {shape[2]} px; expected one for each of "
        f"{classes} classes, or of these for each px"
    )
