"""A checkpoint as ``app.train`` writes it, of a model whose weights are set by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from app.checkpoint.file import save_checkpoint
from app.settings.fields import flat
from app.settings.optimization import ModelSettings
from app.settings.run import DataSettings, RunConfig
from pipelines.stream.device_pixels import IMAGENET
from pipelines.tiles.tiling import IndexSettings
from tests.helpers import tiny_models

SEGMENTER = "tests.helpers.tiny_models:segmenter"
CLASSIFIER = "tests.helpers.tiny_models:classifier"


def write_checkpoint(
    path: Path,
    model: str,
    *,
    tile: int | Literal["slide"],
    mpp: float,
    min_tissue: float = 0.25,
    seed: int = 0,
    classes: tuple[str, ...] = ("background", "dark"),
    slides: dict[str, dict[str, Any]] | None = None,
    **settings: Any,
) -> Path:
    """The segmenter says class 1 where a px is dark; the classifier has random weights. ``slides``: what the run knows
    of its slides; ``settings``: others of the run, by name."""
    torch.manual_seed(seed)
    net = getattr(tiny_models, model.partition(":")[2])(len(classes))
    if model == SEGMENTER:
        with torch.no_grad():
            net[0].weight.zero_()
            net[0].weight[0, :, 1, 1] = -1.0  # the centre px: the darker the larger
            net[3].weight.zero_()
            net[3].weight[1, 0] = 4.0
            net[3].bias.copy_(torch.tensor([0.0, -2.0]))
    config = RunConfig(
        DataSettings(Path("slides")),
        index=IndexSettings(tile=tile, mpp=mpp, min_tissue=min_tissue),
        net=ModelSettings(model=model),
    )
    state = {"model": net.state_dict(), "classes": [*classes], "settings": flat(config) | settings, "step": 7}
    state |= {"slides": slides or {"split": {}, "digest": {}, "patient": {}}, "stain_target": None}
    state |= {"normalisation": IMAGENET, "task": "segment" if model == SEGMENTER else "classify"}
    save_checkpoint(path, state)
    return path
