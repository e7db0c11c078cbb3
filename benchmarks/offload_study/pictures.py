"""Pictures of the study in memory: of a folder, or made.

Takes a folder with a sub-folder per class, ``train`` and ``val`` above them or not; gives ``Pictures``, uint8, the same
for all modes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VALIDATION = 0.4
"""Part of the pictures that validates where the folder does not say: about that of the study's own set, 153 of 397."""
MARGIN = 1.15
"""The shorter side of a picture before its middle is taken, over the side that is taken."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures of a classification.

    Attributes:
        train, val: uint8 (n, 3, px, px).
        train_labels, val_labels: int64 (n,).
        classes: names by label.
        source: where they come from, for the report.
    """

    train: Tensor
    train_labels: Tensor
    val: Tensor
    val_labels: Tensor
    classes: tuple[str, ...]
    source: str


def pictures_of_folder(root: Path, px: int, most: int | None = None) -> Pictures:
    """Return the pictures below ``root``, the middle of each.

    Args:
        root: with a sub-folder per class, or with ``train`` and ``val`` that have them.
        px: side.
        most: pictures to take, evenly over all; None: all.

    Raises:
        ValueError: no classes, or a class without pictures.
    """
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    split = (root / "train").is_dir() and (root / "val").is_dir()
    steps = [transforms.Resize(round(MARGIN * px)), transforms.CenterCrop(px), transforms.PILToTensor()]
    folders = [root / "train", root / "val"] if split else [root]
    try:
        parts = [ImageFolder(folder, transforms.Compose(steps)) for folder in folders]
    except FileNotFoundError as fault:
        raise ValueError(
            f"--images {root} needs a sub-folder per class with pictures in it, below train/ and val/ or not: {fault}"
        ) from fault
    total = sum(map(len, parts))
    picks = [_evenly(len(part), most and max(2, most * len(part) // total)) for part in parts]
    if split:
        (train, train_labels), (val, val_labels) = map(_stacked, parts, picks)
    else:
        validates = [int((k + 1) * VALIDATION) > int(k * VALIDATION) for k in range(len(picks[0]))]
        train, train_labels = _stacked(parts[0], (k for k, val in zip(picks[0], validates, strict=True) if not val))
        val, val_labels = _stacked(parts[0], (k for k, val in zip(picks[0], validates, strict=True) if val))
    source = f"{len(train)} + {len(val)} pictures of {root.name}"
    return Pictures(train, train_labels, val, val_labels, tuple(parts[0].classes), source)


def _evenly(count: int, most: int | None) -> list[int]:
    wanted = count if most is None else min(count, most)
    return [k * count // wanted for k in range(wanted)]


def _stacked(part: Any, picks: Iterable[int]) -> tuple[Tensor, Tensor]:
    pairs = [part[k] for k in picks]
    return torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])


def made_pictures(px: int, most: int) -> Pictures:
    """Return two classes of noise, one brighter: the work is the same as with other pictures."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(most) % 2
    noise = torch.randint(0, 192, (most, 3, px, px), generator=draw, dtype=torch.uint8)
    images = noise + (labels * 63).to(torch.uint8)[:, None, None, None]
    train = most - round(VALIDATION * most)
    return Pictures(
        images[:train], labels[:train], images[train:], labels[train:], ("dark", "bright"), f"{most} made pictures"
    )
