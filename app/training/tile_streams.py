"""The tiles of a run as streams: which are drawn, in what order, how varied, and how far ahead they are read.

Takes settings and dataset; returns ``TileStream``s. A tile that cannot be read is written down.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.launch.place import RankPlace, rank_cores
from app.settings.run import RunConfig
from app.training.dataset import Dataset, class_areas
from parallel.offload.host_memory import HostMemory
from pipelines.catalog.failures import FailedSlides
from pipelines.catalog.handles import SlidePool
from pipelines.labels.annotations import SlideAnnotations
from pipelines.slides.geometry import Region
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.device import allocate_pinned
from pipelines.stream.order import pixel_weights, slide_weights
from pipelines.stream.read import OnFault
from pipelines.stream.stream import TileStream

log = logging.getLogger(__name__)


def tiles_in_order(
    config: RunConfig, dataset: Dataset, rows: NDArray[np.int64], epochs: int | None = None
) -> TileStream:
    """Return tiles ``rows`` of the dataset with their targets, in index order."""
    stream = TileStream.over(dataset.tiles.select(rows), seed=config.seed, epochs=epochs)
    if config.index.whole_pictures:
        stream = stream.crop(varied=False)
    if dataset.tile_labels is not None:
        return stream.label(dataset.tile_labels[rows])
    assert isinstance(dataset.truth, SlideAnnotations)
    return stream.mask(dataset.truth)


def training_tiles(
    config: RunConfig,
    dataset: Dataset,
    rows: NDArray[np.int64],
    pool: SlidePool,
    failed: FailedSlides,
    placement: RankPlace,
) -> TileStream:
    """Return tiles ``rows`` shuffled, drawn as asked, augmented; one that cannot be read is replaced and written down.

    Raises:
        ValueError: they cannot be drawn as asked.
    """
    stream = tiles_in_order(config, dataset, rows).read(pool, told("replaced", "read", failed))
    stream = stream.shuffle(config.stream.open_slides)
    sample = config.stream.sample
    if config.stream.bag:
        stream = stream.bags(config.stream.bag)
    if sample == "class":
        if dataset.tile_labels is None:
            raise ValueError(
                "--sample class draws classes of tiles equally often, and segmentation has classes of pixels: use "
                "--sample pixels"
            )
        stream = stream.balance(dataset.tile_labels[rows])
    elif sample != "tiles":
        by_slide = sample == "slide"
        weights = slide_weights(stream.tiles.slide) if by_slide else _pixel_weights(dataset, rows, placement)
        stream = stream.weigh(weights)
    if config.index.whole_pictures:
        stream = stream.crop(varied=config.augmentation.augment == "device", flip=config.augmentation.flip)
    return stream.augment(augmentation_of(config))


def augmentation_of(config: RunConfig) -> AugmentSettings:
    """Return what is varied in tiles; of whole pictures nothing more than the crop, which comes with reading."""
    return AugmentSettings(augment="none") if config.index.whole_pictures else config.augmentation


def _pixel_weights(dataset: Dataset, rows: NDArray[np.int64], placement: RankPlace) -> NDArray[np.float64]:
    """Return the weights (n,) of ``--sample pixels`` as the first rank reads them: what one rank cannot read another
    may, and all have to draw alike."""
    if dataset.tile_labels is not None:
        raise ValueError(
            "--sample pixels is for segmentation, and here tiles have classes: use --sample class, or --task segment"
        )
    weights = torch.zeros(len(rows), dtype=torch.float64)
    if placement.communicator.rank == 0:
        areas, unread = class_areas(dataset, rows)
        if unread:
            log.warning("--sample pixels: %d tiles whose annotation cannot be read are not drawn", unread)
        drawn = pixel_weights(areas)
        weights = torch.from_numpy(drawn)
        shares = drawn @ areas / max((drawn @ areas).sum(), 1e-12)
        told = ", ".join(f"{name} {share:.1%}" for name, share in zip(dataset.classes, shares, strict=True))
        log.info("--sample pixels: of the px shown, %s; %d of %d tiles drawn", told, int((drawn > 0).sum()), len(rows))
    placement.communicator.broadcast(weights)
    return weights.numpy()


def told(what: str, step: str, failed: FailedSlides) -> OnFault:
    """Return what logs and writes down tiles that cannot be read, each once however often it is tried.

    Args:
        what: was done with the tile.
        step: what it was read for, as ``failed`` has it.
    """

    def on_fault(slide_id: str, region: Region | None, error: Exception) -> None:
        if failed.add_once(slide_id, "open" if region is None else step, error):
            log.warning("%s: a tile was %s: %s", slide_id, what, error)

    return on_fault


def read_ahead(
    config: RunConfig, stream: TileStream, placement: RankPlace, host: HostMemory | None, share: float
) -> TileStream:
    """Return ``stream`` read ahead within ``share`` of the budget."""

    def on_host(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        assert host is not None
        array: NDArray[Any] = host.empty(shape, torch.from_numpy(np.empty(0, dtype)).dtype, locked=False).numpy()
        return array

    # Of whole slides, memory that is never written to is never taken; page-locked memory would be, all of it.
    pinned = allocate_pinned if placement.device.type == "cuda" and stream.tiles.sides is None else np.empty
    return stream.prefetch(
        int(share * config.stream.read_ahead_bytes),
        config.stream.read_threads or rank_cores(config.strategy.cpu_ranks),
        pinned if host is None else on_host,
    )
