"""A trained model, ready to be asked: everything that it needs comes from the checkpoint of its run.

Takes a checkpoint of ``app.train``; gives probabilities of uint8 tiles. The file is read without running code of its
own (tensors and plain values only); a model that the run took from a user's package is built only when the user names
it again, as building it runs that package.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from app.checkpoint.file import load_checkpoint
from app.launch.place import choose_autocast
from app.training.memory_layout import takes_channels_last
from models.registry import build_model
from pipelines.stream.augment import AugmentSettings, Draw
from pipelines.stream.device_pixels import PixelMaker
from pipelines.stream.stain_steps import StainSteps
from pipelines.tiles.stain_fit import StainFit

LIBRARIES = ("torchvision", "timm", "smp", "unet")
"""Words before the colon of a model's name that stand for a library, not for a package of the user's."""


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
        stain_target: what the run made its slides look like; None: they stayed as they are.
    """

    name: str
    task: str
    classes: tuple[str, ...]
    settings: dict[str, Any]
    digest: str
    step: int
    stain_target: StainFit | None
    _module: nn.Module
    _pixels: PixelMaker
    _autocast: torch.dtype | None

    @property
    def tile(self) -> int:
        """Side of the tiles that it was trained on, px."""
        side: int = self.settings["tile"]
        return side

    @property
    def shown(self) -> dict[int, str]:
        """Classes that get a heat map and areas, by number: of a segmenter all but the background; of a classifier of
        two the second, whose probability says that of the first, too."""
        first = 1 if self.task == "segment" or len(self.classes) == 2 else 0
        return {number: name for number, name in enumerate(self.classes) if number >= first}

    def probabilities(self, images: NDArray[np.uint8], stain: StainFit | None = None) -> NDArray[np.float32]:
        """Return float32 (n, classes) of a classifier, (n, classes, h, w) of a segmenter.

        Args:
            images: (n, h, w, 3), RGB, of one slide.
            stain: of the slide; None: its colours are not changed.
        """
        drawn = None
        if self.stain_target is not None and stain is not None:
            none = np.zeros(len(images), np.int64)
            drawn = StainSteps.of(self.stain_target, [stain], [0]).before(Draw(none, none > 0, None, None), none)
        return _outputs(self._module, self._pixels, images, drawn, self._autocast).softmax(1).cpu().numpy()


def load_model(path: Path, named: str | None, device: torch.device) -> TrainedModel:
    """Return the model of the checkpoint ``path`` on ``device``.

    Args:
        named: ``--model`` of the user, who may say only what the run said.

    Raises:
        RunError: the checkpoint is damaged or of another version.
        ValueError: there is none, or its model cannot look at a slide window by window.
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
    if settings["tile"] == "slide":
        raise ValueError(
            f"{path} was trained with --tile slide, where a slide is one image and has one score: there are no windows "
            "to be put together. Predict with a model of a --tile in px"
        )
    if settings.get("pictures") == "resize":
        raise ValueError(
            f"{path} was trained with --pictures resize, where a picture is one image and has one score: there are no "
            "windows to be put together. Scores of held-out pictures are in predictions.csv of its run"
        )
    module = build_model(name, classes=len(classes), norm=settings["norm"], head=settings["head"])
    module.load_state_dict(state["model"])
    channels_last = settings["channels_last"] and takes_channels_last(
        module, (1, 3, settings["tile"], settings["tile"])
    )
    if channels_last:
        module.to(memory_format=torch.channels_last)
    module.to(device).eval()
    pixels = PixelMaker(device, AugmentSettings(augment="none"), 0, channels_last=channels_last)
    autocast = choose_autocast(settings["precision"], device)
    blank = np.full((1, settings["tile"], settings["tile"], 3), 255, np.uint8)
    shape = tuple(_outputs(module, pixels, blank, None, autocast).shape[1:])
    if shape not in ((len(classes),), (len(classes), *blank.shape[1:3])):
        raise ValueError(
            f"{path}: model {name} gives values of {shape} for a tile of {settings['tile']} px; expected one for each "
            f"of {len(classes)} classes, or of these for each px"
        )
    task = "classify" if len(shape) == 1 else "segment"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    numbers = state.get("stain_target")  # of a run from before there was any: None
    target = None if numbers is None else StainFit(settings["stain"], tuple(numbers))
    return TrainedModel(name, task, classes, settings, digest, state["step"], target, module, pixels, autocast)


@torch.inference_mode()
def _outputs(
    module: nn.Module,
    pixels: PixelMaker,
    images: NDArray[np.uint8],
    drawn: Draw | None,
    autocast: torch.dtype | None,
) -> torch.Tensor:
    """Logits in float32."""
    floats = pixels.floats(torch.from_numpy(images).to(pixels.device), drawn)
    with torch.autocast(pixels.device.type, autocast, enabled=autocast is not None):
        logits: torch.Tensor = module(floats)
    return logits.float()
