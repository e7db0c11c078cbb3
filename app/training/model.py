"""The model of a run and its loss: built by name, with the weights it starts from, in the layout it is computed in.

Takes settings and the classes of a dataset; gives a module on the CPU, the same on every rank, and what the user should
know about how it was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from app.checkpoint.file import check_weights
from app.settings.optimization import OptimizerSettings
from app.settings.run import RunConfig
from app.training.dataset import Dataset, class_counts
from app.training.memory_layout import LEFT_OUT, takes_channels_last
from models.losses import PixelClassLoss, TileClassLoss, balanced_weights
from models.registry import build_model
from models.weights import load_weights


@dataclass(frozen=True, eq=False)
class RunModel:
    """A model, ready for an engine.

    Attributes:
        parameters: of the whole model, in numbers.
        channels_last: it is to be given images in that layout.
        notes: what the user should know about how it was made.
    """

    module: nn.Module
    parameters: int
    channels_last: bool
    notes: tuple[str, ...]


def build_run_model(config: RunConfig, classes: int, shape: tuple[int, ...]) -> RunModel:
    """Return the model of ``config``, drawn from its seed.

    Args:
        shape: (n, 3, h, w) of a microbatch of the largest tiles.

    Raises:
        ValueError: a model or weights file that does not fit.
    """
    torch.manual_seed(config.seed)
    module = build_model(config.net.model, classes=classes, norm=config.net.norm, head=config.net.head)
    if config.net.weights:
        check_weights(config.net.weights)
    notes = _load_weights(module, config.net.weights) if config.net.weights else ()
    channels_last = config.strategy.channels_last
    if channels_last and not takes_channels_last(module, shape):
        channels_last, notes = False, (*notes, LEFT_OUT)
    if channels_last:
        module.to(memory_format=torch.channels_last)
    return RunModel(module, sum(parameter.numel() for parameter in module.parameters()), channels_last, notes)


def build_loss(
    settings: OptimizerSettings, dataset: Dataset, train_rows: NDArray[np.int64]
) -> TileClassLoss | PixelClassLoss:
    """Return the loss of ``dataset``'s task; class weights are those of the tiles ``train_rows``.

    Raises:
        ValueError: ``settings.loss`` is of another task.
    """
    weights = balanced_weights(class_counts(dataset, train_rows)) if settings.class_weights == "balanced" else None
    smoothing, gamma = settings.label_smoothing, settings.focal_gamma if settings.loss == "focal" else 0.0
    if dataset.task == "segment":
        dice = settings.loss in ("auto", "dice_ce")
        return PixelClassLoss(weights, dice=dice, label_smoothing=smoothing, gamma=gamma)
    if settings.loss == "dice_ce":
        raise ValueError(
            "--loss dice_ce is of the overlap of areas, and tiles of one class each have none (--task classify): use "
            "--loss cross_entropy or focal, or --task segment with annotations"
        )
    return TileClassLoss(weights, label_smoothing=smoothing, gamma=gamma)


def _load_weights(model: nn.Module, path: Path) -> tuple[str, ...]:
    """Load ``path`` into ``model``; lines that say how much of it, and what is left as it was drawn."""
    lines = load_weights(model, path)
    left, wanted = {line.split()[0] for line in lines}, model.state_dict()
    return (f"--weights {path}: {sum(key not in left for key in wanted)} of {len(wanted)} tensors loaded", *lines)
