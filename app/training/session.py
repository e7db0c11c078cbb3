"""All parts of a training run that the loop needs.

Takes settings, dataset and placement. Everything that depends on the strategy is in the engine;
the rest asks it only for ``step``, ``predict`` and its state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from app.launch.place import RankPlacement, autocast_of, host_memory, host_share, map_share, rank_cores
from app.launch.watchdog import Watchdog
from app.settings.fields import bytes_of
from app.settings.run import EPOCHS, RunConfig
from app.training.batches import RankReading, microbatches_of, part_of, sizes_of_part, tiles_in_order
from app.training.dataset import Dataset, class_areas
from app.training.engines import build_engine, build_optimizer, choose_algorithms
from app.training.model import build_loss, build_run_model, refuse_second_update
from app.training.run_slides import SlideColumns, slide_columns
from app.training.share import share
from app.training.validation import Outputs, subsample_per_slide
from models.heads import BagGradient
from parallel.engine.step import NonFiniteLoss, TrainingEngine
from parallel.offload.host_memory import HostMemory
from parallel.schedule.shares import split_batch
from parallel.strategy import Strategy
from pipelines.cache.shards import CacheSpec
from pipelines.cache.tile_cache import TileCache
from pipelines.catalog.table import FailedSlides
from pipelines.slides.geometry import Region
from pipelines.stream.augment import AugmentSettings, StainSteps
from pipelines.stream.batch import Batch
from pipelines.stream.device import DevicePrefetcher, allocate_pinned
from pipelines.stream.device_batch import BoxMaker, Maker
from pipelines.stream.device_pixels import PixelMaker
from pipelines.stream.order import pixel_weights, slide_weights
from pipelines.stream.read import UNREAD, OnFault
from pipelines.stream.stream import TileStream

log = logging.getLogger(__name__)

VALIDATION_SHARE = 0.25
"""Part of the memory for tiles read ahead that is for validation: those of training stay meanwhile."""


class Session:
    """One run on one rank: its model, optimizer, engine and streams.

    Args:
        strategy: that ``config`` asks for, or its planner chose.
        failed: record of tiles that cannot be read.

    Attributes:
        stream: training tiles of this rank.
        pixels: turns uint8 tiles into the model's input on the device.
        reading, validation_reading: what this rank reads of each global batch.
        ranges: tiles of the global batch in each microbatch, over all ranks.
        train_rows, validation_rows: rows of the dataset's tiles.
        host: memory of tiles and maps that are computed box by box; None: tiles are not.
        cache: of tiles as they were read, if there is one.

    Raises:
        ValueError: a model, weights file or batch that does not fit the task or the ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        strategy: Strategy,
        dataset: Dataset,
        placement: RankPlacement,
        failed: FailedSlides,
        watchdog: Watchdog,
    ) -> None:
        self.config, self.strategy, self.dataset, self.placement = config, strategy, dataset, placement
        self.failed, self.watchdog = failed, watchdog
        bag, communicator = config.stream.bag, placement.communicator
        if config.score.patience and not len(dataset.rows("val")):
            raise ValueError(
                f"--patience {config.score.patience} looks at validations, and no slide is held out: give --validation"
            )
        if bag and not dataset.slide_labels:
            raise ValueError(
                "--bag gives the tiles of a slide one label, and these slides have none: annotations label tiles and "
                "pixels. Give --labels FILE.csv, or leave out --bag"
            )
        self.ranges = split_batch(config.strategy.batch, strategy.m)
        width, height = dataset.tiles.largest
        shape = len(self.ranges[0]), 3, height, width
        module, self.model = build_run_model(config, len(dataset.classes), shape)
        if bag:
            refuse_second_update(module, shape, communicator)
        self.train_rows = dataset.rows("train")
        self.validation_rows = subsample_per_slide(dataset, dataset.rows("val"), config.score.validation_tiles)
        by_slide = config.stream.sample == "slide"
        loss = build_loss(
            config.optimization, dataset, self.train_rows, communicator, in_bags=bag > 0, by_slide=by_slide
        )
        self.loss: nn.Module = loss.to(placement.device)
        self.engine, self.host = self._engine_of(module, BagGradient() if bag else self.loss)
        # Of whole pictures nothing more is varied than the crop, which comes with reading.
        self._augment = AugmentSettings(augment="none") if config.index.whole_pictures else config.augmentation
        self.pixels = self._pixels(self._augment, self.train_rows)
        self.cache: TileCache | None = None
        if config.stream.cache is not None:
            kind = CacheSpec(*dataset.tiles.largest, config.index.mpp)
            self.cache = TileCache(config.stream.cache, bytes_of(config.stream.cache_bytes) or 0, kind)
        self.pool = dataset.pool(config.stream.open_slides + 2, self.cache)
        engine, most = self.engine, max(map(len, self.ranges))
        shares = [self.ranges[i] for i in engine.share]
        # Of whole slides as tiles each has another box.
        part = None if dataset.tiles.sides is not None else part_of(engine, (most, 3, height, width))
        reading = functools.partial(RankReading, communicator, config.strategy.batch, shares, part=part)
        # Each member reads one at least.
        samples = engine.samples if min(map(len, self.ranges)) >= strategy.ways else range
        self.reading = reading([engine.wants(i) for i in engine.share], samples=samples)
        self.validation_reading = reading([engine.predict_wants] * len(engine.share))
        memory_share = 1 - VALIDATION_SHARE if len(self.validation_rows) else 1.0
        self.stream = self._read_ahead(self.reading.sharded(self._training_tiles()), memory_share)

    def _engine_of(self, module: nn.Module, loss: nn.Module) -> tuple[TrainingEngine, HostMemory | None]:
        """Return the engine of this rank, and the host memory of tiles that are computed box by box."""
        config, policy, placement = self.config, self.strategy.policy, self.placement
        host = None if policy.stream is None else host_memory(placement.device, config.out, policy.host_bytes)
        if policy.stream is not None and policy.map_bytes is None and placement.device.type == "cuda":
            size = sum(parameter.nbytes for parameter in module.parameters())
            share = map_share(placement.device, config.strategy.memory_bytes, size)
            policy = dataclasses.replace(policy, map_bytes=share)
        if policy.moves and policy.host_bytes is None:
            policy = dataclasses.replace(policy, host_bytes=host_share())
        engine = build_engine(
            dataclasses.replace(self.strategy, policy=policy),
            module,
            loss,
            functools.partial(build_optimizer, config.optimization, scales=self.model.scales),
            placement.communicator,
            batch=config.strategy.batch,
            tile=self.dataset.tiles.largest[::-1],
            seed=config.seed,
            device=placement.device,
            autocast=autocast_of(placement.precision),
            watchdog=self.watchdog,
            host=host,
        )
        fixed, limited = self.dataset.tiles.sides is None, config.strategy.memory is not None
        choose_algorithms(self.strategy, placement.device, fixed=fixed, limited=limited)
        return engine, host

    def _pixels(self, augment: AugmentSettings, rows: NDArray[np.int64]) -> Maker:
        """Return the maker of the model's input from tiles of ``rows``, whole or by boxes."""
        dataset, target, layout = self.dataset, self.dataset.stain_target, self.model.channels_last
        stains = None if target is None else StainSteps.of(target, dataset.stains, dataset.tiles.slide[rows])
        device, normalisation = self.placement.device, self.model.normalisation
        made = PixelMaker(device, augment, self.config.seed, normalisation, channels_last=layout, stains=stains)
        return made if self.strategy.policy.stream is None else BoxMaker(made)

    def _training_tiles(self) -> TileStream:
        """Return tiles shuffled, drawn as asked, augmented; one that cannot be read is replaced and recorded."""
        config, dataset, rows = self.config, self.dataset, self.train_rows
        stream = tiles_in_order(config, dataset, rows).read(self.pool, self._recorded("replaced", "read"))
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
            stream = stream.class_balanced(dataset.tile_labels[rows])
        elif sample != "tiles":
            weights = slide_weights(stream.tiles.slide) if sample == "slide" else self._pixel_weights()
            stream = stream.weighted(weights)
        if config.index.whole_pictures:
            stream = stream.crop(varied=config.augmentation.augment == "device", flip=config.augmentation.flip)
        return stream.augment(self._augment)

    def _pixel_weights(self) -> NDArray[np.float64]:
        """Return the weights (n,) of ``--sample pixels`` as the first rank reads them: all ranks have to draw alike."""
        dataset, rows = self.dataset, self.train_rows
        if dataset.tile_labels is not None:
            raise ValueError(
                "--sample pixels is for segmentation, and here tiles have classes: use --sample class, or --task "
                "segment"
            )

        def find() -> NDArray[np.float64]:
            areas, unread = class_areas(dataset, rows)
            if unread:
                log.warning("--sample pixels: %d tiles whose annotation cannot be read are not drawn", unread)
            drawn = pixel_weights(areas)
            parts = drawn @ areas / max((drawn @ areas).sum(), 1e-12)
            told = ", ".join(f"{name} {part:.1%}" for name, part in zip(dataset.classes, parts, strict=True))
            count = int((drawn > 0).sum())
            log.info("--sample pixels: of the px shown, %s; %d of %d tiles drawn", told, count, len(rows))
            return drawn

        return share(self.placement.communicator, find)

    def _recorded(self, what: str, step: str) -> OnFault:
        """Return the function that logs and records tiles that cannot be read, each once however often it is tried.

        Args:
            what: was done with the tile.
            step: what it was read for, as ``failed`` has it.
        """
        failed = self.failed

        def on_fault(slide_id: str, region: Region | None, error: Exception) -> None:
            if failed.add_once(slide_id, "open" if region is None else step, error):
                log.warning("%s: a tile was %s: %s", slide_id, what, error)

        return on_fault

    def _read_ahead(self, stream: TileStream, part: float) -> TileStream:
        """Return ``stream`` read ahead within ``part`` of the budget."""
        reads, host = self.config.stream, self.host

        def on_host(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
            assert host is not None
            array: NDArray[Any] = host.empty(shape, torch.from_numpy(np.empty(0, dtype)).dtype, locked=False).numpy()
            return array

        # Of whole slides, memory that is never written to is never taken; page-locked memory would be, all of it.
        is_gpu = self.placement.device.type == "cuda"
        allocate = allocate_pinned if is_gpu and stream.tiles.sides is None else np.empty
        threads = reads.read_threads or rank_cores(self.config.strategy.cpu_ranks)
        return stream.prefetch(int(part * reads.read_ahead_bytes), threads, allocate if host is None else on_host)

    @functools.cached_property
    def epoch_length(self) -> int:
        """Samples of one pass; with --sample class rounded up to a multiple of the classes."""
        return self.stream.order.length

    @property
    def total_steps(self) -> int:
        return self.steps_of(self.config.steps, self.config.epochs)

    def steps_of(self, steps: int | None, epochs: float | None) -> int:
        """Return the steps of a run that is given ``steps`` or ``epochs``, or neither."""
        if steps is not None:
            return steps
        epochs = EPOCHS if epochs is None else epochs
        return max(1, math.ceil(epochs * self.epoch_length / self.config.strategy.batch))

    def rows_of_step(self, step: int) -> NDArray[np.int64]:
        """Return the rows of the dataset's tiles that are drawn for step number ``step``, from 0."""
        batch = self.config.strategy.batch
        return self.train_rows[self.stream.source.rows_of(np.arange(step * batch, (step + 1) * batch))]

    def epoch_of(self, step: int) -> int:
        """Passes over the training tiles begun before ``step`` steps were done, from 0."""
        return step * self.config.strategy.batch // self.epoch_length

    def learning_rate(self, step: int, total_steps: int | None = None) -> float:
        """Return the rate of update number ``step``, from 0: a linear rise, then a cosine to 0 (Loshchilov and Hutter
        2017) at ``total_steps``; None: those of the run."""
        settings = self.config.optimization
        if step < settings.warmup:
            return settings.lr * (step + 1) / settings.warmup
        total_steps = self.total_steps if total_steps is None else total_steps
        done = min(1.0, (step - settings.warmup) / max(1, total_steps - settings.warmup))
        return settings.lr * 0.5 * (1 + math.cos(math.pi * done))

    def name_tiles(self, step: int, fault: NonFiniteLoss) -> str:
        """Return the error of a loss that is not finite, with the tiles of its microbatches on any rank."""
        table = self.dataset.tiles
        numbers = [k for i in fault.microbatches for k in self.ranges[i]]
        tiles = [
            f"{table.slide_id(row)} at level-0 ({table.l0_x[row]}, {table.l0_y[row]})"
            for row in self.rows_of_step(step)[numbers].tolist()
        ]
        state = "The updates of this step's microbatches were made" if fault.updated else "Nothing was updated"
        return (
            f"loss is {fault.losses[0]} at step {step + 1}; tiles of that microbatch: {'; '.join(tiles)}. {state}; "
            f"the last checkpoint is kept. Lower --lr (now {self.learning_rate(step):g}), use --precision "
            "fp32, or look at these tiles"
        )

    def close(self) -> None:
        """Close slides and leave the other ranks. The engine lets go of them first: a process group that something
        still holds when the interpreter ends takes the process down with it."""
        self.pool.close()
        self.engine.close()
        self.placement.communicator.close()

    @functools.cached_property
    def slides(self) -> SlideColumns:
        """Split, patient and opening of each slide, as the checkpoint keeps them."""
        return slide_columns(self.config.data, self.dataset.specs, self.dataset.splits)

    def feed(
        self,
        source: Iterator[Batch],
        ready: Callable[[], bool],
        thread_context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> DevicePrefetcher:
        """Return training batches of ``source`` as the model takes them, with the arguments of ``DevicePrefetcher``."""
        prefetch = self.config.stream.device_prefetch
        return DevicePrefetcher(source, ready, self.pixels, prefetch=prefetch, thread_context=thread_context)

    @contextlib.contextmanager
    def validation(self, rows: NDArray[np.int64] | None = None) -> Iterator[Iterator[Outputs]]:
        """Open this rank's share of the validation tiles, or of tiles ``rows``, each exactly once over all groups."""
        rows = self.validation_rows if rows is None else rows
        stream = tiles_in_order(self.config, self.dataset, rows, epochs=1)
        stream = stream.read(self.pool, self._recorded("left out of the scores", "validate"), replaces=False)
        stream = self._read_ahead(self.validation_reading.sharded(stream), VALIDATION_SHARE)
        pixels, prefetch = self._pixels(AugmentSettings(augment="none"), rows), self.config.stream.device_prefetch
        with iter(stream) as tiles, DevicePrefetcher(tiles, tiles.ready, pixels, prefetch=prefetch) as feed:
            yield self._outputs(feed)

    def _outputs(self, feed: DevicePrefetcher) -> Iterator[Outputs]:
        for batch in feed:
            sizes = sizes_of_part(batch, max(self.validation_reading.sizes))
            start = 0
            for microbatch in microbatches_of(feed, batch, sizes):
                end = start + microbatch.shape[0]
                yield Outputs(microbatch, batch.samples[start:end], batch.rows[start:end] != UNREAD)
                start = end
            batch.release()
