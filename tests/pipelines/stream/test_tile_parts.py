"""Parts of tiles, read alone or as boxes of bytes, beside crops of what is read whole: bit for bit, no more read."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from parallel.offload.live_bytes import LiveBytes
from pipelines.backends.level_reader import MemoryReader
from pipelines.cache.shards import CacheSpec
from pipelines.cache.tile_cache import TileCache, open_cached
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlidePool
from pipelines.labels.annotations import SlideAnnotations
from pipelines.slides.geometry import Region, TileBox
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import SlideError, TileReadError
from pipelines.stream.augment import AugmentSettings, StainSteps, draw
from pipelines.stream.batch import Batch
from pipelines.stream.device import DevicePrefetcher
from pipelines.stream.device_batch import BoxMaker, HostBoxes
from pipelines.stream.device_pixels import PixelMaker
from pipelines.stream.iterator import rows_to_follow
from pipelines.stream.read import MAX_FAULTS
from pipelines.stream.stream import TileStream
from pipelines.tiles.stain import PUBLISHED, StainFit
from pipelines.tiles.tile_table import TileTable
from pipelines.tiles.tiling import IndexSettings
from tests.helpers.drawings import area, mask_of, write_geojson
from tests.helpers.memory_slide import memory_slide
from tests.helpers.real import PYRAMID_TIFF, SVS

SEED = 5
TILES = 6
MPP = 0.5
WIDTH, HEIGHT = 300, 260


NOISE = np.random.default_rng(7).integers(0, 256, (HEIGHT, WIDTH, 3)).astype(np.uint8)


class CountingReader(MemoryReader):
    def read_level(self, level, l_x, l_y, out):
        if set(range(l_y, l_y + len(out))) & set(self.damaged_rows):
            raise TileReadError("damaged there")
        self.read_px.append(out.shape[0] * out.shape[1])
        super().read_level(level, l_x, l_y, out)


@dataclass(frozen=True)
class NoisySpec:
    """A slide of noise in memory; whoever opens it counts the px that are read of its level, and may damage some."""

    slide_id: str = "slide"
    read_px: list[int] = field(default_factory=list, compare=False)
    damaged_rows: range = range(0)

    def verify_unchanged(self):
        """It is in memory."""

    def open(self):
        reader = CountingReader([NOISE])
        reader.read_px, reader.damaged_rows = self.read_px, self.damaged_rows
        return PyramidSlide(Path("slide"), reader, memory_slide([NOISE], MPP).levels)


def pool_of(**options):
    return SlidePool([NoisySpec(**options)], 1)


def table_of(mpp):
    """Tiles of 61 px, some of them over the edges of the slide."""
    x, y = np.array([-9, 13, 60, 101, 280, 150]), np.array([30, 7, 61, -11, 17, 240])
    made = IndexSettings(tile=61, mpp=mpp, min_tissue=0.0)
    return TileTable(("slide",), np.zeros(TILES, np.int32), x, y, np.ones(TILES, np.float32), made)


def drawn_masks(folder):
    rings = [[(3.3, 7.1), (220.7, 31.9), (140.2, 170.4)], [(30.5, 20.25), (31, 200), (280, 100.125)]]
    path = write_geojson(folder / "drawn.geojson", *(area([ring], f"c{k}") for k, ring in enumerate(rings)))
    return SlideAnnotations(("background", "c0", "c1"), {"slide": "slide"}, "drawn", {"slide": path})


def stream_of(pool, table, augment, masks):
    settings = AugmentSettings(augment=augment)
    stream = TileStream.over(table, seed=SEED).shuffle().read(pool).batch(4).prefetch(threads=2).augment(settings)
    return stream.label(np.arange(len(table)) * 3) if masks is None else stream.mask(masks)


def made_of(stream, augment, boxed=False, stains=None, batches=3):
    """Images, targets and rows of each microbatch of 2 tiles."""
    pixels = PixelMaker(CPU, AugmentSettings(augment=augment), SEED, stains=stains)
    made, maker = [], BoxMaker(pixels) if boxed else pixels
    with iter(stream) as tiles, DevicePrefetcher(tiles, tiles.ready, maker, prefetch=1) as feed:
        for batch in islice(feed, batches):
            made += [(*part, batch.rows.tolist()) for part in feed.microbatches(batch, [2, 2])]
    return made


def same_parts(stream, augment, parts, stains=None):
    """Hold each of ``parts`` of what the stream gives against the whole."""
    whole = made_of(stream, augment, stains=stains)
    for k, box in enumerate(parts):
        rows, columns = range(box.row_start, box.row_stop), range(box.column_start, box.column_stop)
        place = np.s_[..., rows.start : rows.stop, columns.start : columns.stop]
        alone = made_of(stream.part(box), augment, boxed=k % 2 == 1, stains=stains)
        for (images, targets, read), (part, part_targets, read_alone) in zip(whole, alone, strict=True):
            assert read == read_alone
            assert part.shape == images.shape
            got = part.box(rows, columns)
            assert torch.equal(got, images[place])
            inner = range(rows.start, rows.start + 1), range(columns.stop - 1, columns.stop)
            assert torch.equal(part.box(*inner), got[..., :1, -1:])
            if targets.ndim == 1:
                assert torch.equal(part_targets, targets)
            else:
                assert torch.equal(part_targets.box(rows, columns), targets[place])


UNEVEN = [TileBox(0, 20, 0, 61), TileBox(17, 61, 5, 38), TileBox(40, 41, 60, 61)]


@pytest.mark.parametrize(
    ("augment", "mpp"), [("device", MPP), ("device", 2 * MPP), ("device", 1.37 * MPP), ("none", 3 * MPP), ("cpu", MPP)]
)
def test_parts_are_crops_of_the_whole_bit_for_bit(augment, mpp, tmp_path):
    """Of all turns, of odd tiles, some over the slide's edge, at the level, at half of it and between."""
    table = table_of(mpp)
    same_parts(stream_of(pool_of(), table, augment, drawn_masks(tmp_path)), augment, UNEVEN)


def test_labels_stains_and_resized_pictures_are_those_of_the_whole():
    table = table_of(MPP)
    stains = StainSteps.of(PUBLISHED["macenko"], [STAINED["macenko"]], table.slide)
    same_parts(stream_of(pool_of(), table, "device", None), "device", UNEVEN[:2], stains)
    same_parts(stream_of(pool_of(), table, "none", None).crop(varied=True), "none", UNEVEN[:2])


@pytest.mark.parametrize("path", [SVS, PYRAMID_TIFF], ids=lambda path: path.suffix)
@pytest.mark.parametrize("backend", ["tiled", "openslide"])
def test_boxes_of_real_slides_are_crops(path, backend):
    numbers = np.random.default_rng(3)
    with SlideSpec("slide", path, backend=backend).open() as slide:
        for factor in (1.0, 1.0, 2.0, 3.0, 1.6, 4.0, 5.3):
            x, y = (int(numbers.integers(-40, side)) for side in (slide.levels[0].width, slide.levels[0].height))
            assert_crops(
                slide, Region(x, y, 131, 94, factor * slide.mpp), (0, 50, 0, 131), (31, 94, 17, 18), (7, 90, 64, 131)
            )


def assert_crops(slide, region, *boxes):
    whole = slide.read(region)
    for box in (TileBox(*sides) for sides in boxes):
        out = np.empty((box.height, box.width, 3), np.uint8)
        slide.read_box(region, box, out)
        assert np.array_equal(out, box.crop(whole)), (region, box)
    return whole


@pytest.mark.parametrize("factor", [1.6, 2.3])
def test_of_a_resampled_region_the_px_are_read_that_go_into_the_box(factor, monkeypatch):
    spec, region = NoisySpec(), Region(3, 5, 90, 97, factor * MPP)
    with spec.open() as slide:
        for band_bytes in (1 << 20, 1):
            monkeypatch.setattr("pipelines.slides.pyramid.BAND_BYTES", band_bytes)
            slide.read(region)
            of_the_whole = sum(spec.read_px)
            spec.read_px.clear()
            assert_crops(slide, region, (10, 31, 4, 50), (60, 97, 50, 90), (0, 97, 89, 90))
            assert sum(spec.read_px) - of_the_whole < 0.45 * 90 * 97 * factor**2
            spec.read_px.clear()


def test_no_more_is_read_than_the_part():
    spec, table = NoisySpec(), table_of(2 * MPP)
    stream = stream_of(SlidePool([spec], 1), table, "device", None).part(TileBox(0, 30, 31, 61))
    with iter(stream) as tiles:
        batch = next(tiles)
        assert batch.images.shape == (4, 3 * 30 * 30)
        assert batch.sides(0) == (61, 61)
    assert set(spec.read_px) == {(2 * 30) ** 2}


def test_tiles_of_a_cache_are_kept_whole_and_cut(tmp_path):
    spec = SlideSpec("slide", PYRAMID_TIFF)
    with spec.open() as slide:
        table = table_of(slide.mpp)
    with TileCache(tmp_path, 1 << 30, CacheSpec(61, 61, table.settings.mpp)) as cache:
        plain = stream_of(SlidePool([spec], 1), table, "device", None)
        pool = SlidePool([spec], 1, functools.partial(open_cached, cache=cache))
        cached = stream_of(pool, table, "device", None).prefetch(threads=1)
        parts = made_of(cached.part(UNEVEN[1]), "device")
        for (images, _, _), (boxes, _, _) in zip(made_of(plain, "device"), parts, strict=True):
            assert torch.equal(boxes.box(range(17, 61), range(5, 38)), images[..., 17:61, 5:38])
        assert cache.counts.hits > 0
        assert cache.counts.misses == TILES


def settle(ranks, batches):
    """Have the ranks follow one another until all have read the same; return in how many rounds."""
    asked, rounds = batches[0].wanted, 0
    while not (batches[0].rows == batches[1].rows).all():
        asked = rows_to_follow(np.stack([batch.rows for batch in batches]), asked)
        for tiles, batch in zip(ranks, batches, strict=True):
            tiles.follow(batch, asked)
        rounds += 1
    return rounds


def test_ranks_that_share_tiles_come_to_read_the_same_also_where_one_part_is_damaged():
    """A tile is damaged in one rank's part, what replaces it in the other's."""
    table, halves = table_of(MPP), (TileBox(0, 30, 0, 61), TileBox(30, 61, 0, 61))
    pool = pool_of(damaged_rows=range(62, 64))
    streams = [stream_of(pool, table, "none", None).part(half) for half in halves]
    alone = stream_of(pool_of(), table, "none", None)
    with iter(streams[0]) as upper, iter(streams[1]) as lower, iter(alone) as whole:
        batches, whole_batch = (next(upper), next(lower)), next(whole)
        assert settle((upper, lower), batches) > 1
        used = batches[0].rows
        with NoisySpec().open() as slide:
            for k, row in enumerate(used.tolist()):
                pixels = slide.read(table.region(row))
                for batch, half in zip(batches, halves, strict=True):
                    assert np.array_equal(batch.image(k), half.crop(pixels).ravel())
                    assert batch.targets[k] == 3 * row
        assert (used != whole_batch.rows).any()


def test_ranks_that_never_come_to_read_the_same_give_up():
    """Of two tiles each rank can read one: neither can stand for the other."""
    table = table_of(MPP).select(np.array([1, 2]))  # rows 7-67 and 61-121 of the slide
    pools = [pool_of(damaged_rows=rows) for rows in (range(20, 21), range(110, 111))]
    halves = TileBox(0, 30, 0, 61), TileBox(31, 61, 0, 61)
    streams = [stream_of(pool, table, "none", None).part(half) for pool, half in zip(pools, halves, strict=True)]
    with iter(streams[0].batch(1)) as upper, iter(streams[1].batch(1)) as lower:
        batches = next(upper), next(lower)
        with pytest.raises(SlideError, match=f"could not read {MAX_FAULTS} tiles one after"):
            settle((upper, lower), batches)


def test_resume_is_the_same_for_any_part():
    stream = stream_of(pool_of(), table_of(MPP), "device", None)
    with iter(stream) as whole, iter(stream.part(UNEVEN[0])) as part:
        next(whole)
        part.set_state(whole.get_state())
        assert next(whole).samples.tolist() == next(part).samples.tolist()


def test_boxes_outside_the_part_and_parts_outside_the_tile_are_refused():
    stream = stream_of(pool_of(), table_of(MPP), "device", None)
    for boxed in (False, True):
        images = made_of(stream.part(TileBox(0, 30, 5, 20)), "device", boxed=boxed, batches=1)[0][0]
        with pytest.raises(ValueError, match=r"rows 0-30, columns 5-20 .* asked for rows 0-31"):
            images.box(range(31), range(5, 20))
    with pytest.raises(ValueError, match="inside the tile, rows 0-61, columns 0-61; got rows 0-62"):
        stream.part(TileBox(0, 62, 0, 1))
    sides = np.full((TILES, 2), 61, np.int32)
    with pytest.raises(ValueError, match="differ in size"):
        TileStream.over(replace(table_of(MPP), sides=sides)).part(TileBox(0, 1, 0, 1))


@pytest.mark.parametrize("mpp", [MPP, 1.37 * MPP])
def test_boxes_of_mask_files_are_crops(mpp, tmp_path):
    values = np.random.default_rng(2).integers(0, 3, (HEIGHT // 2, WIDTH // 2)).astype(np.uint8)
    Image.fromarray(values).save(tmp_path / "mask.png")
    files, ids = {"slide": tmp_path / "mask.png"}, {1: 1, 2: 2}
    truth = SlideAnnotations(("background", "a", "b"), {}, "masks", files, ids)
    region, box = Region(-9, 30, 61, 61, mpp), TileBox(17, 61, 5, 38)
    part = np.empty((44, 33), np.uint8)
    with NoisySpec().open() as slide:
        truth.read_mask("slide", slide, region, part, box)
        assert np.array_equal(part, box.crop(mask_of(truth, "slide", slide, region)))
    assert set(np.unique(part)) == {0, 1, 2}


@pytest.mark.parametrize(("height", "width"), [(5, 5), (4, 7)])
def test_a_box_is_where_it_lay_before_turning(height, width):
    tile = np.arange(height * width).reshape(height, width)
    for turns in range(0, 4, 1 if height == width else 2):
        for flip in (False, True):
            turned = np.rot90(tile, turns)[:, :: -1 if flip else 1]
            box = TileBox(1, 4, 2, 4)
            before = box.before_turning(turns, flip, height, width).crop(tile)
            assert np.array_equal(np.rot90(before, turns)[:, :: -1 if flip else 1], box.crop(turned))


CPU = torch.device("cpu")
STAINED = {
    "macenko": StainFit("macenko", (0.662, 0.648, 0.377, 0.176, 0.851, 0.495, 2.844, 1.741)),
    "reinhard": StainFit("reinhard", (-1.479, -0.145, 0.06, 0.73, 0.126, 0.033)),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("side", [(61, 61), (45, 83)])
@pytest.mark.parametrize(
    ("augment", "method"),
    [
        ("device", None),
        ("none", None),
        ("cpu", None),
        ("device", "macenko"),
        ("device", "reinhard"),
        ("none", "reinhard"),
    ],
)
def test_boxes_are_crops_of_the_whole_bit_for_bit(augment, method, side, channels_last):
    settings, numbers = AugmentSettings(augment=augment), np.random.default_rng(side[0])
    images = torch.from_numpy(numbers.integers(0, 256, (32, *side, 3)).astype(np.uint8))
    masks, samples = images[..., 1] // 64, np.arange(7, 7 + 32)
    drawn = draw(settings, 5, samples)
    orientations = {*zip(drawn.quarter_turns.tolist(), drawn.flip.tolist(), strict=True)}
    assert len(orientations) == (1 if augment == "none" else 8)
    rows = samples % 3
    stains = StainSteps.of(PUBLISHED[method], [None, STAINED[method]], [0, 1, 1]) if method else None
    pixels = PixelMaker(CPU, settings, 5, channels_last=channels_last, stains=stains)
    whole, whole_masks = pixels.make(images, masks, samples, rows)
    boxes, mask_boxes = BoxMaker(pixels).make(images, masks, samples, rows)
    assert isinstance(mask_boxes, HostBoxes)
    assert boxes.shape == tuple(whole.shape)
    for _ in range(20):
        top, left = (int(numbers.integers(0, length)) for length in side)
        bottom, right = (int(numbers.integers(a + 1, length + 1)) for a, length in zip((top, left), side, strict=True))
        place, ranges = np.s_[..., top:bottom, left:right], (range(top, bottom), range(left, right))
        box = boxes.box(*ranges)
        assert torch.equal(box, whole[place])
        assert torch.equal(mask_boxes.box(*ranges), whole_masks[place])
        assert box.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_a_feed_of_boxes_makes_nothing_and_copies_nothing():
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    every, samples = np.ones(3, bool), np.arange(3)
    batch = Batch(images, np.arange(3), samples, samples, 0, lambda: None, every, every, samples)
    pixels = PixelMaker(CPU, AugmentSettings(), 0)
    with LiveBytes() as live, DevicePrefetcher(iter([batch]), lambda: False, BoxMaker(pixels), prefetch=2) as feed:
        (first, labels), (second, _) = feed.microbatches(next(feed), [2, 1])
        assert not [*feed.held()]
    assert live.peak_bytes == 3 * 8, "labels alone are on the device"
    assert isinstance(first, HostBoxes)
    assert labels.tolist() == [0, 1]
    expected, _ = pixels.make(torch.from_numpy(images), None, samples, samples)
    images[2] = 0  # boxes are of the buffer, until the batch is released
    assert torch.equal(first.box(range(3, 9), range(16)), expected[:2, :, 3:9])
    assert second.box(range(16), range(16)).unique().numel() == 3
