"""Parts of tiles, read alone, beside crops of what is read whole: bit for bit, and no more of the slide than that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.backends.memory import MemoryReader, memory_slide
from pipelines.cache.cached_slide import CachedSpec
from pipelines.cache.tile_cache import TileCache
from pipelines.cache.tile_kind import TileKind
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlidePool
from pipelines.labels.annotations import SlideAnnotations
from pipelines.slides.geometry import Region
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import Pixels, Slide, TileReadError
from pipelines.slides.tile_box import TileBox
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.batch import Batch
from pipelines.stream.device import DeviceFeed
from pipelines.stream.device_pixels import PixelMaker
from pipelines.stream.iterator import TileIterator
from pipelines.stream.stain_steps import StainSteps
from pipelines.stream.stream import TileStream
from pipelines.stream.tile_boxes import BoxMaker
from pipelines.tiles.index import TileTable
from pipelines.tiles.index_settings import IndexSettings
from pipelines.tiles.stain_fit import PUBLISHED, StainFit
from tests.helpers.drawings import area, write_geojson
from tests.helpers.real import PYRAMID_TIFF, SVS

SEED = 5
TILES = 6
MPP = 0.5
WIDTH, HEIGHT = 300, 260


@dataclass(frozen=True)
class NoisySpec:
    """A slide of noise in memory; whoever opens it counts the px that are read of its level, and may damage some."""

    slide_id: str = "slide"
    read_px: list[int] = field(default_factory=list, compare=False)
    damaged_rows: range = range(0)

    def check_unchanged(self) -> None:
        """It is in memory."""

    def open(self) -> Slide:
        read_px, damaged = self.read_px, self.damaged_rows

        class Counting(MemoryReader):
            def read_level(self, level: int, l_x: int, l_y: int, out: Pixels) -> None:
                if set(range(l_y, l_y + len(out))) & set(damaged):
                    raise TileReadError("damaged there")
                read_px.append(out.shape[0] * out.shape[1])
                super().read_level(level, l_x, l_y, out)

        noise = np.random.default_rng(7).integers(0, 256, (HEIGHT, WIDTH, 3)).astype(np.uint8)
        slide = memory_slide([noise], MPP)
        return PyramidSlide(Path("slide"), Counting([noise]), slide.levels)


def table_of(sides: tuple[int, int], mpp: float, slide_id: str = "slide") -> TileTable:
    """Tiles of (height, width), some of them over the edges of the slide."""
    x, y = np.array([-9, 13, 60, 101, 280, 150]), np.array([30, 7, 61, -11, 17, 240])
    # a table of squares is made oblong by its settings alone
    made = IndexSettings(tile=sides[1], mpp=mpp, min_tissue=0.0)
    return TileTable((slide_id,), np.zeros(TILES, np.int32), x, y, np.ones(TILES, np.float32), made)


def drawn_masks(folder: Path, slide_id: str = "slide") -> SlideAnnotations:
    rings = [[(3.3, 7.1), (220.7, 31.9), (140.2, 170.4)], [(30.5, 20.25), (31, 200), (280, 100.125)]]
    path = write_geojson(folder / "drawn.geojson", *(area([ring], f"c{k}") for k, ring in enumerate(rings)))
    return SlideAnnotations(("background", "c0", "c1"), {slide_id: slide_id}, "drawn", {slide_id: path})


def stream_of(pool: SlidePool, table: TileTable, augment: str, masks: SlideAnnotations | None) -> TileStream:
    settings = AugmentSettings(augment=augment)  # type: ignore[arg-type]
    stream = TileStream.over(table, seed=SEED).shuffle().read(pool).batch(4).prefetch(threads=2).augment(settings)
    return stream.label(np.arange(len(table)) * 3) if masks is None else stream.mask(masks)


def made_of(
    stream: TileStream, augment: str, boxed: bool = False, stains: StainSteps | None = None, batches: int = 4
) -> list[tuple[object, object, list[int]]]:
    """Images, targets and rows of each microbatch of 2 tiles."""
    pixels = PixelMaker(torch.device("cpu"), AugmentSettings(augment=augment), SEED, stains=stains)  # type: ignore[arg-type]
    made: list[tuple[object, object, list[int]]] = []
    maker = BoxMaker(pixels) if boxed else pixels
    with iter(stream) as tiles, DeviceFeed(tiles, tiles.ready, maker, prefetch=1) as feed:
        for batch in islice(feed, batches):
            made += [(*part, batch.rows.tolist()) for part in feed.microbatches(batch, [2, 2])]
    return made


def same_parts(stream: TileStream, augment: str, parts: list[TileBox], stains: StainSteps | None = None) -> None:
    """Hold each of ``parts`` of what the stream gives against the whole."""
    whole = made_of(stream, augment, stains=stains)
    for k, box in enumerate(parts):
        rows, columns = range(box.row_start, box.row_stop), range(box.column_start, box.column_stop)
        alone = made_of(stream.part(box), augment, boxed=k % 2 == 1, stains=stains)
        for (images, targets, read), (part, part_targets, read_alone) in zip(whole, alone, strict=True):
            assert read == read_alone
            assert part.shape == images.shape
            got = part.box(rows, columns)
            assert torch.equal(got, images[..., rows.start : rows.stop, columns.start : columns.stop])
            inner = range(rows.start, rows.start + 1), range(columns.stop - 1, columns.stop)
            assert torch.equal(part.box(*inner), got[..., :1, -1:])
            if targets.ndim == 1:
                assert torch.equal(part_targets, targets)
            else:
                expected = targets[..., rows.start : rows.stop, columns.start : columns.stop]
                assert torch.equal(part_targets.box(rows, columns), expected)


UNEVEN = [TileBox(0, 20, 0, 61), TileBox(17, 61, 5, 38), TileBox(40, 41, 60, 61)]


@pytest.mark.parametrize("augment", ["device", "none", "cpu"])
@pytest.mark.parametrize("mpp", [MPP, 2 * MPP, 1.37 * MPP])
def test_parts_are_crops_of_the_whole_bit_for_bit(augment: str, mpp: float, tmp_path: Path) -> None:
    """Of all turns, of odd tiles, some over the slide's edge, at the level, at half of it and between."""
    table = table_of((61, 61), mpp)
    same_parts(stream_of(SlidePool([NoisySpec()], 1), table, augment, drawn_masks(tmp_path)), augment, UNEVEN)


def test_labels_and_stains_are_those_of_the_whole() -> None:
    table = table_of((61, 61), MPP)
    fit = StainFit("macenko", (0.662, 0.648, 0.377, 0.176, 0.851, 0.495, 2.844, 1.741))
    stains = StainSteps.of(PUBLISHED["macenko"], [fit], table.slide)
    same_parts(stream_of(SlidePool([NoisySpec()], 1), table, "device", None), "device", UNEVEN[:2], stains)


@pytest.mark.parametrize("path", [SVS, PYRAMID_TIFF], ids=lambda path: path.suffix)
@pytest.mark.parametrize("backend", ["tiled", "openslide"])
def test_boxes_of_real_slides_are_crops(path: Path, backend: str) -> None:
    numbers = np.random.default_rng(3)
    with SlideSpec("slide", path, backend=backend).open() as slide:
        for factor in (1.0, 1.0, 2.0, 3.0, 1.6, 4.0, 5.3):
            x, y = (int(numbers.integers(-40, side)) for side in (slide.levels[0].width, slide.levels[0].height))
            region = Region(x, y, 131, 94, factor * slide.mpp)
            whole = slide.read(region)
            for box in (TileBox(0, 50, 0, 131), TileBox(31, 94, 17, 18), TileBox(7, 90, 64, 131)):
                out = np.empty((box.height, box.width, 3), np.uint8)
                slide.read_box(region, box, out)
                assert np.array_equal(out, box.crop(whole)), (factor, box)


def test_bands_of_a_resampled_region_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.slides.pyramid.BAND_BYTES", 1)
    spec = NoisySpec()
    with spec.open() as slide:
        region = Region(3, 5, 90, 97, 2.3 * MPP)
        whole = slide.read(region)
        px = sum(spec.read_px)
        spec.read_px.clear()
        box = TileBox(10, 31, 4, 50)
        out = np.empty((box.height, box.width, 3), np.uint8)
        slide.read_box(region, box, out)
        assert np.array_equal(out, box.crop(whole))
        assert sum(spec.read_px) < 0.5 * px


def test_no_more_is_read_than_the_part() -> None:
    spec, table = NoisySpec(), table_of((60, 60), 2 * MPP)
    stream = stream_of(SlidePool([spec], 1), table, "device", None).part(TileBox(0, 30, 30, 60))
    with iter(stream) as tiles:
        batch = next(tiles)
        assert batch.images.shape == (4, 3 * 30 * 30)
        assert batch.sides(0) == (60, 60)
    assert set(spec.read_px) == {(2 * 30) ** 2}


def test_tiles_of_a_cache_are_kept_whole_and_cut(tmp_path: Path) -> None:
    spec = SlideSpec("slide", PYRAMID_TIFF)
    with spec.open() as slide:
        table = table_of((61, 61), slide.mpp)
    with TileCache(tmp_path, 1 << 30, TileKind(61, 61, table.settings.mpp)) as cache:
        plain = stream_of(SlidePool([spec], 1), table, "device", None)
        cached = stream_of(SlidePool([CachedSpec(spec, cache)], 1), table, "device", None).prefetch(threads=1)
        whole, part = made_of(plain, "device"), made_of(cached.part(UNEVEN[1]), "device")
        for (images, _, _), (boxes, _, _) in zip(whole, part, strict=True):
            assert torch.equal(boxes.box(range(17, 61), range(5, 38)), images[..., 17:61, 5:38])
        assert cache.counts.hits > 0
        assert cache.counts.misses == TILES
