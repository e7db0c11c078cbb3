"""Joining what was found of single slides: the result, and the work that it takes."""

import numpy as np
import pytest

from pipelines.tiles.index_parts import merge, slides_of
from pipelines.tiles.index_settings import IndexSettings
from pipelines.tiles.tile_table import IndexedSlide, SlideFault, TileTable

SETTINGS = IndexSettings(tile=256)


def one(slide_id, tiles, mpp=0.5):
    source = IndexedSlide(slide_id, 10, None, mpp, 1000, 1000, "tiled")
    at = np.arange(tiles, dtype=np.int64)
    return TileTable(
        (slide_id,), np.zeros(tiles, np.int32), at, at, np.ones(tiles, np.float32), SETTINGS, (source,), ()
    )


def fault(slide_id):
    return TileTable.joined(SETTINGS, []).__class__(
        *((), np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32), SETTINGS),
        faults=(SlideFault(slide_id, 10, None, "open", "no slide"),),
    )


def test_the_last_table_of_a_slide_counts():
    before = merge(SETTINGS, [one("a", 2), one("b", 3), one("c", 1), fault("d")])
    joined = merge(SETTINGS, [before, one("b", 5, mpp=0.25), fault("c"), one("d", 4)])
    assert joined.slides == ("a", "b", "d")
    assert np.bincount(joined.slide).tolist() == [2, 5, 4]
    assert [source.mpp for source in joined.sources] == [0.5, 0.25, 0.5]
    assert [f.slide_id for f in joined.faults] == ["c"]
    assert sorted(slides_of(joined)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("known", [0, 1], ids=["new", "again"])
def test_joining_costs_the_same_for_each_slide(known, monkeypatch):
    """Each slide and tile is selected from at most twice, whatever the number of slides."""
    of_slides, touched = TileTable.of_slides, []

    def counted(table, ids):
        touched.append(len(table) + len(slides_of(table)))
        return of_slides(table, ids)

    monkeypatch.setattr(TileTable, "of_slides", counted)
    for count in (100, 400):
        found = [one(f"s{k:04}", 3) for k in range(count)]
        before = [TileTable.joined(SETTINGS, found)] * known
        touched.clear()
        assert len(merge(SETTINGS, [*before, *found])) == 3 * count
        assert sum(touched) <= 2 * 4 * count
