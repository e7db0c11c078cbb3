"""The stream: one global order for all ranks and threads, exact resume at every position."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlidePool
from pipelines.slides.slide import SlideError
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.order import slide_weights
from pipelines.stream.read import UNREAD
from pipelines.stream.stream import TileStream
from pipelines.tiles.tile_table import TileTable
from pipelines.tiles.tiling import IndexSettings
from tests.helpers.drawings import annotations_in, box, write_geojson
from tests.helpers.real import PYRAMID_TIFF, SVS
from tests.helpers.tiles import TILE, memory_specs, pool_of, tile_table

COUNTS = [5, 1, 9, 4, 7]
N = sum(COUNTS)


def stream_of(counts=COUNTS, *, epochs=2, seed=3, threads=2):
    table = tile_table(counts)
    return (
        TileStream.over(table, seed=seed, epochs=epochs)
        .shuffle(open_slides=2)
        .read(pool_of(table))
        .label(np.arange(len(table)) * 10)
        .batch(4)
        .prefetch(threads=threads)
    )


def contents(batch):
    """A copy of everything in a batch, which is released."""
    arrays = batch.images, batch.targets, batch.rows, batch.samples
    copy = (*(array.tobytes() for array in arrays), batch.first_sample)
    batch.release()
    return copy


def rest(batches, count=None):
    return [contents(batch) for _, batch in zip(range(count or 1000), batches, strict=False)]


def all_of(stream):
    with iter(stream) as batches:
        for batch in batches:
            yield batch
            batch.release()


def rows_of(batches, count=None):
    return np.concatenate([np.frombuffer(copy[2], np.int64) for copy in rest(batches, count)])


def test_batches_hold_the_tiles_they_name():
    stream = stream_of()
    seen, sizes = Counter(), []
    for k, batch in enumerate(all_of(stream)):
        assert batch.images.shape == (len(batch), TILE, TILE, 3)
        assert batch.first_sample == 4 * k
        assert batch.samples.tolist() == list(range(4 * k, 4 * k + len(batch)))
        assert (batch.images[:, 0, 0, 0] == stream.tiles.slide[batch.rows]).all()
        assert (batch.images[:, 0, 0, 1] == stream.tiles.l0_x[batch.rows] // TILE).all()
        assert (batch.targets == batch.rows * 10).all()
        seen.update(batch.rows.tolist())
        sizes.append(len(batch))
    assert seen == dict.fromkeys(range(N), 2)
    assert sizes == [4] * 13


def test_the_last_batch_of_a_finite_stream_is_shorter_also_for_each_rank():
    stream = stream_of([3, 3], epochs=1)
    assert [len(b) for b in iter(stream)] == [4, 2]
    assert [len(b) for b in iter(stream.shard(range(2)))] == [2, 2]
    assert [len(b) for b in iter(stream.shard(range(2, 4)))] == [2, 0]


@pytest.mark.parametrize("path", [SVS, PYRAMID_TIFF], ids=lambda path: path.suffix)
def test_real_tiles_arrive_as_the_slide_gives_them(path):
    spec = SlideSpec("slide", path)
    with spec.open() as slide:
        x, y = (np.array([0, 401, 803, 1205]), np.array([7, 900, 1500, 2000]))
        made_with = IndexSettings(tile=300, mpp=2 * slide.mpp, min_tissue=0.0)
        table = TileTable(("slide",), np.zeros(4, np.int32), x, y, np.ones(4, np.float32), made_with)
        stream = TileStream.over(table, epochs=2).shuffle().read(SlidePool([spec], 1)).batch(3)
        for batch in all_of(stream):
            for image, row in zip(batch.images, batch.rows, strict=True):
                assert (image == slide.read(table.region(int(row)))).all()


def sampled(stream, sample):
    slide = stream.tiles.slide
    if sample == "class":
        return stream.class_balanced(slide.astype(np.int64) % 2)
    return stream.weighted(slide_weights(slide)) if sample == "slide" else stream


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("sample", ["tiles", "class", "slide"])
def test_ranks_share_one_global_order(world, sample):
    stream = sampled(stream_of(), sample)
    whole = rows_of(iter(stream))
    together = np.full(len(whole), -1)
    for r in range(world):
        share = range(4 * r // world, 4 * (r + 1) // world)
        for batch in all_of(stream.shard(share).prefetch(threads=1 + share.start)):
            together[batch.samples] = batch.rows
    assert (together == whole).all()


def test_a_rank_reads_only_its_rows():
    table = tile_table([1] * 8)
    specs = memory_specs(table)
    rest(iter(TileStream.over(table, epochs=1).read(SlidePool(specs, 8)).batch(4).shard(range(1, 4, 2))))
    assert sorted(specs[0].opened) == ["s1", "s3", "s5", "s7"]


@pytest.mark.parametrize("augment", ["none", "cpu"])
def test_resume_is_exact_at_every_position(augment):
    stream = stream_of([5, 1, 4]).augment(AugmentSettings(augment=augment))
    stream = stream.class_balanced(np.arange(10) % 3) if augment == "cpu" else stream.weighted(np.arange(1.0, 11.0))
    everything = rest(iter(stream))
    assert len(everything) == (6 if augment == "cpu" else 5)
    for k in range(len(everything) + 1):
        with iter(stream.prefetch(threads=1 + k % 3)) as first:
            assert rest(first, k) == everything[:k] if k else True
            state = json.loads(json.dumps(first.get_state()))
        second = iter(stream.prefetch(threads=1 + (k + 1) % 3, max_bytes=0))
        for _ in range(2):  # an iterator can also be set back
            second.set_state(state)
            assert rest(second) == everything[k:]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 7), st.integers(0, 30), st.integers(0, 9))
def test_resume_and_shards_agree_for_any_table(counts, batch, k, seed):
    stream = stream_of(counts, epochs=None, seed=seed).batch(batch)
    with iter(stream) as batches:
        last = np.frombuffer(rest(batches, k + 1)[-1][2], np.int64).tolist()
    rank_rows = []
    for row in range(batch):
        with iter(stream.shard(range(row, row + 1)).prefetch(threads=1)) as batches:
            batches.set_state({**batches.get_state(), "batch": k})
            rank_rows += next(batches).rows.tolist()
    assert rank_rows == last


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (stream_of(seed=4), "seed was 3, now 4"),
        (stream_of([5, 1, 9, 4, 8]), "tiles was"),
        (stream_of().shuffle(3), "open_slides was 2, now 3"),
        (stream_of().batch(5), "global_batch was 4, now 5"),
        (stream_of().label(np.zeros(N, np.int64)), "target was"),
        (stream_of().class_balanced(np.arange(N) % 2), "balance was no"),
        (stream_of().weighted(np.arange(N, dtype=float)), "weights was no"),
        (stream_of().augment(AugmentSettings()), r"augment\.augment was none, now device"),
        (stream_of(epochs=None), "epochs was 2, now endless"),
    ],
)
def test_a_state_of_other_settings_is_refused_with_the_key_named(other, key):
    state = iter(stream_of()).get_state()
    with pytest.raises(ValueError, match=f"cannot go on from the saved state.*{key}"):
        iter(other).set_state(state)
    iter(stream_of().shard(range(2)).prefetch(threads=3, max_bytes=7)).set_state(state)  # ranks and threads may change


def test_a_state_of_other_drawings_is_refused(tmp_path):
    """A run once went on with annotations that were drawn anew under the names of before."""
    streams = []
    for left in (10, 20):
        write_geojson(tmp_path / "s0.geojson", box(left, 10, 50, 50, "gland"))
        streams.append(stream_of().mask(annotations_in(tmp_path, "s0")))
    state = iter(streams[0]).get_state()
    iter(streams[0]).set_state(state)
    with pytest.raises(ValueError, match=r"cannot go on from the saved state.*annotation files was"):
        iter(streams[1]).set_state(state)


@pytest.mark.parametrize("sample", ["tiles", "class", "slide"])
def test_each_slide_is_opened_once_per_epoch_and_few_are_open(sample):
    table = tile_table([12] * 24)
    specs, open_slides = memory_specs(table), 4
    pool = SlidePool(specs, open_slides + 2)
    stream = TileStream.over(table, epochs=1).shuffle(open_slides).read(pool).batch(4).prefetch(0, 2)
    assert max(len(pool._handles) for _ in all_of(sampled(stream, sample))) <= open_slides + 2
    assert Counter(specs[0].opened) == {f"s{k}": 1 for k in range(24)}


def test_damage_is_replaced_alike_on_every_rank_and_told():
    table = tile_table([6, 6, 6])
    bad = {"s0": frozenset({2, 3})}
    specs = memory_specs(table, lambda s: replace(s, bad=bad.get(s.slide_id, frozenset()), opens=s.number != 1))
    told = []
    stream = TileStream.over(table, epochs=2).shuffle(2).label(np.arange(18)).batch(4)
    stream = stream.read(SlidePool(specs, 3), lambda slide_id, region, error: told.append(str(error)))
    whole = {int(s): int(r) for b in all_of(stream) for s, r in zip(b.samples, b.rows, strict=True)}
    assert set(told) == {"s0: bad tile at 16", "s0: bad tile at 24", "s1 does not open"}
    assert set(whole.values()) == {0, 1, 4, 5, *range(12, 18)}
    for share in (range(0, 4, 2), range(1, 4, 2)):
        for batch in all_of(stream.shard(share)):
            assert [whole[int(s)] for s in batch.samples] == batch.rows.tolist() == batch.targets.tolist()


class Turning:
    """Masks whose pixels all differ, so that every change of place shows, but for the slide's number in row 0."""

    classes = ("background", "gland")

    def read_mask(self, slide_id, slide, region, out, box=None):
        out[...] = (np.arange(out.size).reshape(out.shape) + 7 * (region.l0_x // TILE)) % 251
        out[0] = int(slide_id[1:])


@pytest.mark.parametrize("augment", ["none", "cpu"])
def test_pixels_and_masks_read_apart_are_those_read_together(augment):
    stream = stream_of(epochs=1).mask(Turning()).augment(AugmentSettings(augment=augment))
    images, targets = stream.shard(range(4), targets=()), stream.shard(range(4), images=())
    for whole, pixels, masks in zip(all_of(stream), all_of(images), all_of(targets), strict=True):
        assert (whole.images == pixels.images).all()
        assert (whole.targets == masks.targets).all()
        assert whole.targets.dtype == np.uint8
        if augment == "none":
            assert (whole.targets[:, 0] == stream.tiles.slide[whole.rows][:, None]).all()
        assert pixels.targets.shape == (0, TILE, TILE)
        assert masks.images.shape == (0, TILE, TILE, 3)
        assert whole.rows.tolist() == pixels.rows.tolist() == masks.rows.tolist()


def test_rows_of_pixels_and_targets_may_have_gaps():
    stream = stream_of(epochs=1)
    for whole, part in zip(all_of(stream), all_of(stream.shard(range(4), (0, 3), (1, 3))), strict=True):
        places = [k for k in (0, 3) if k < len(whole)]
        assert part.samples.tolist() == whole.samples.tolist()
        assert part.has_image.tolist() == [k in (0, 3) for k in range(len(whole))]
        assert (part.images == whole.images[places]).all()
        assert part.targets.tolist() == [whole.targets[k] for k in (1, 3) if k < len(whole)]


def test_a_rank_that_wants_nothing_opens_no_slide_and_keeps_the_position():
    table = tile_table([3, 3, 3])
    specs = memory_specs(table)
    whole = TileStream.over(table, epochs=1).shuffle(2).read(SlidePool(specs, 3)).batch(4)
    with iter(whole.shard(range(4), (), ())) as batches:
        assert [next(batches).samples.tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert specs[0].opened == []
        state = batches.get_state()
    reading = iter(whole)
    reading.set_state(state)
    assert next(reading).samples.tolist() == [8]


def masks_over(specs):
    table = tile_table([6, 6])
    return TileStream.over(table, epochs=1).shuffle(2).read(SlidePool(specs, 3)).mask(Turning()).batch(4)


def test_targets_follow_the_tile_that_another_rank_read_instead():
    specs = memory_specs(tile_table([6, 6]))
    damaged = tuple(replace(s, bad=frozenset({2, 3}) if s.slide_id == "s0" else frozenset()) for s in specs)
    replaced = 0
    with iter(masks_over(damaged)) as pixels, iter(masks_over(specs).shard(range(4), images=())) as masks:
        for whole, part in zip(pixels, masks, strict=True):
            differing = int((part.rows != whole.rows).sum())
            assert masks.follow(part, whole.rows) == bool(differing)
            assert (part.targets == whole.targets).all()
            assert part.rows.tolist() == whole.rows.tolist()
            replaced += differing
            whole.release()
            part.release()
    assert replaced == 2


def test_a_target_that_cannot_be_read_raises_only_if_its_tile_is_used():
    specs = memory_specs(tile_table([6, 6]), lambda spec: replace(spec, opens=spec.slide_id != "s0"))
    with iter(masks_over(specs).shard(range(4), images=())) as masks:
        batch = next(masks)
        assert UNREAD in batch.rows
        assert masks.follow(batch, np.full(4, 7, np.int64))  # as the rank decides that has the pixels
        with pytest.raises(SlideError, match="s0 does not open"):
            masks.follow(batch, np.zeros(4, np.int64))


def test_without_a_target_labels_are_unknown():
    table = tile_table([3])
    assert next(iter(TileStream.over(table).read(pool_of(table)).batch(2))).targets.tolist() == [-1, -1]


WEIGHTS = [np.zeros(3), np.array([1.0, -1.0, 1.0]), np.ones(2), np.array([1.0, np.nan, 1.0])]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (iter, "reads from no slides"),
        (lambda stream: TileStream.over(stream.tiles.select(np.empty(0, np.int64))), "the table is empty"),
        (lambda stream: stream.shard(range(2)), r"out of range\(1\); got range\(0, 2\)"),
        (lambda stream: stream.class_balanced(np.array([0, -1, 1])), "a class >= 0 for each of 3 tiles"),
        *((lambda stream, w=w: stream.weighted(w), "a weight at least 0 for each of 3 tiles") for w in WEIGHTS),
        (lambda stream: stream.label(np.zeros(2, np.int64)), "one label for each of 3 tiles"),
        (lambda stream: stream.augment(AugmentSettings(brightness=1.5)), r"brightness is at least 0 .* got 1\.5"),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        change(TileStream.over(tile_table([3])))


def test_a_sample_that_cannot_be_had_raises_where_it_belongs():
    table = tile_table([2, 2])
    specs = memory_specs(table, lambda spec: replace(spec, opens=False))
    with pytest.raises(SlideError, match="does not open") as caught:
        next(iter(TileStream.over(table).read(SlidePool(specs, 2)).batch(2)))
    assert "sample 0: slide s0, Region(l0_x=0" in caught.value.__notes__[0]
