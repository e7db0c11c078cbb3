"""The table of tiles: saved and loaded, chosen from and joined; settings and files that are refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.slides.geometry import Region
from pipelines.tiles.tile_table import IndexedSlide, IndexPart, SlideFault, TileTable, merge, slides_of, take_over
from pipelines.tiles.tiling import IndexSettings, check_settings

COLUMNS = ("slide", "l0_x", "l0_y", "tissue")


SETTINGS = IndexSettings(tile=512, stride=256)
REFUSED = r"tiles\.parquet is not a tile index of this program.*delete it"
ABSENT = object()
FAULT = {"slide_id": "z", "file_bytes": 3, "asked_mpp": None, "step": "open", "error": "e"}


def table(slides="abc", tiles=4):
    n = len(slides) * tiles
    return TileTable(
        tuple(slides),
        np.repeat(np.arange(len(slides), dtype=np.int32), tiles),
        np.arange(n, dtype=np.int64) * 1000,
        np.arange(n, dtype=np.int64) + 2**33,
        np.linspace(0, 1, n, dtype=np.float32),
        SETTINGS,
        tuple(IndexedSlide(s, 10, None, 0.25, 9000, 8000, "tiled") for s in slides),
        (SlideFault("z", 3, 0.5, "open", "truncated"),),
    )


def with_metadata(path, change):
    """Change the metadata of the index at ``path``, a dictionary; what ``change`` returns is written."""
    read = pq.read_table(path)
    about = change(json.loads(read.schema.metadata[b"megatile"]))
    pq.write_table(read.replace_schema_metadata({b"megatile": json.dumps(about).encode()}), path)


def assert_same(a, b):
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert getattr(a, name).dtype == getattr(b, name).dtype
    assert (a.slides, a.settings, a.sources, a.faults) == (b.slides, b.settings, b.sources, b.faults)


@pytest.mark.parametrize("made", [table(), table().of_slides(["b"]), table().select(np.empty(0, np.int64)), table("")])
def test_what_is_saved_is_loaded(tmp_path, made):
    made.save(tmp_path / "tiles.parquet")
    assert_same(TileTable.load(tmp_path / "tiles.parquet"), made)
    assert [p.name for p in tmp_path.iterdir()] == ["tiles.parquet"]
    plain = pq.read_table(tmp_path / "tiles.parquet")  # for other programs
    assert plain.column_names == list(COLUMNS)
    assert plain.column("slide").to_pylist() == [made.slide_id(k) for k in range(len(made))]


def test_tiles_are_chosen_in_the_order_asked_for_and_joined():
    whole = table()
    assert whole.region(5) == Region(5000, 5 + 2**33, 512, 512, 0.5)
    chosen = whole.select(np.array([7, 0, 7]))
    np.testing.assert_array_equal(chosen.l0_x, [7000, 0, 7000])
    assert [chosen.slide_id(i) for i in range(3)] == ["b", "a", "b"]
    chosen = whole.of_slides(["c", "nowhere", "a", "c"])
    assert chosen.slides == ("c", "a")
    assert [source.slide_id for source in chosen.sources] == ["c", "a"]
    np.testing.assert_array_equal(chosen.l0_x, np.array([8, 9, 10, 11, 0, 1, 2, 3]) * 1000)
    assert chosen.faults == ()
    assert whole.of_slides(["z"]).faults == whole.faults
    assert_same(TileTable.joined(SETTINGS, [whole.of_slides(ids) for ids in (["a"], ["b", "c"], ["z"])]), whole)


def test_other_settings_are_refused_with_every_differing_key():
    found, path = IndexSettings(), Path("run/tiles.parquet")
    check_settings(found, replace(found), path)
    words = (
        r"run/tiles.parquet .* tile is 1024 there, 512 was asked for; min_tissue is 0.25 there, 0.5 was.* another --out"
    )
    with pytest.raises(ValueError, match=words):
        check_settings(found, replace(found, tile=512, min_tissue=0.5), path)


@pytest.mark.parametrize("content", [b"", b"not parquet", None, "truncated"])
def test_a_file_that_is_no_index_is_refused(tmp_path, content):
    path = tmp_path / "tiles.parquet"
    table().save(path)
    if content is None:
        pq.write_table(pa.table({"slide": ["a"]}), path)
    else:
        path.write_bytes(path.read_bytes()[:-100] if content == "truncated" else content)
    with pytest.raises(ValueError, match=REFUSED):
        TileTable.load(path)


@pytest.mark.parametrize("metadata", [b"[1, 2]", b"null", b"[" * 100_000, b"\xff", b"7"])
def test_metadata_that_are_no_object(tmp_path, metadata):
    path = tmp_path / "tiles.parquet"
    pq.write_table(pa.table({"slide": ["a"]}).replace_schema_metadata({b"megatile": metadata}), path)
    with pytest.raises(ValueError, match=REFUSED):
        TileTable.load(path)


def test_an_index_that_was_not_made_from_files_is_read(tmp_path):
    path = tmp_path / "tiles.parquet"
    table().save(path)
    with_metadata(path, lambda about: about | {"sources": []})
    assert TileTable.load(path).sources == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", ABSENT),
        ("format", 2),
        ("settings", ABSENT),
        ("settings", {"tile": "x"}),
        ("settings", {"tile": 512, "depth": 3}),
        ("settings", {"tile": 512, "mpp": "fine"}),
        ("slides", ["a", "a", "c"]),
        ("slides", ["a", "b"]),
        ("slides", 3),
        ("sources", [{"slide_id": "a"}]),
        ("sources", "abc"),
        ("faults", 5),
        ("faults", [FAULT | {"file_bytes": "3"}]),
        ("faults", [FAULT | {"error": 7}]),
    ],
)
def test_rotten_metadata_ends_in_one_message_that_names_the_file(tmp_path, key, value):
    path = tmp_path / "tiles.parquet"
    table().save(path)
    with_metadata(path, lambda about: {k: v for k, v in (about | {key: value}).items() if v is not ABSENT})
    words = "has format 2, this program reads 1; delete it" if value == 2 else REFUSED
    with pytest.raises(ValueError, match=words):
        TileTable.load(path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tile": 0}, "--tile is at least 1 px, or slide; got 0"),
        ({"mpp": 0.0}, "--mpp is 0.05 to 100 um/px; got 0"),
        ({"mpp": float("nan")}, "--mpp is 0.05 to 100 um/px; got nan"),
        ({"stride": 2000}, "--stride is 1 to --tile (1024) px, or tiles leave gaps; got 2000"),
        ({"stride": 0}, "--stride is 1 to"),
        ({"tile": "slide", "stride": 0}, "--stride is at least 1 px with --tile slide; got 0"),
        ({"min_tissue": 25}, "--min-tissue is a part of a tile, 0 to 1; got 25"),
        ({"tissue_mpp": -8}, "--tissue-mpp is 0.05 to 100 um/px; got -8"),
        ({"tile": 8}, "smaller than one px of the tissue mask"),
        ({}, ""),
        ({"tile": 16384, "stride": 1, "min_tissue": 0}, ""),
    ],
)
def test_settings_that_cannot_be_are_named(settings, words):
    faults = IndexSettings(**settings).validate()
    assert len(faults) == bool(words)
    assert words in "".join(faults)


def one(slide_id, tiles, mpp=0.5):
    source, at = IndexedSlide(slide_id, 10, None, mpp, 1000, 1000, "tiled"), np.arange(tiles, dtype=np.int64)
    arrays = np.zeros(tiles, np.int32), at, at, np.ones(tiles, np.float32)
    return TileTable((slide_id,), *arrays, SETTINGS, (source,), ())


def fault(slide_id):
    nothing = (np.empty(0, dtype) for dtype in (np.int32, np.int64, np.int64, np.float32))
    return TileTable((), *nothing, SETTINGS, faults=(SlideFault(slide_id, 10, None, "open", "no slide"),))


def test_the_last_table_of_a_slide_counts():
    before = merge(SETTINGS, [one("a", 2), one("b", 3), one("c", 1), fault("d")])
    joined = merge(SETTINGS, [before, one("b", 5, mpp=0.25), fault("c"), one("d", 4)])
    assert joined.slides == ("a", "b", "d")
    assert np.bincount(joined.slide).tolist() == [2, 5, 4]
    assert [source.mpp for source in joined.sources] == [0.5, 0.25, 0.5]
    assert [f.slide_id for f in joined.faults] == ["c"]
    assert sorted(slides_of(joined)) == ["a", "b", "c", "d"]


def test_tiles_in_other_files_go_before_faults(tmp_path):
    own, wanted = tmp_path / "tiles.parquet", dict.fromkeys("abc", (10, None, None))
    TileTable.joined(SETTINGS, [one("a", 2), one("b", 3), fault("c")]).save(tmp_path / "tiles.part-1-of-2.parquet")
    fault("a").save(tmp_path / "tiles.part-1-of-4.parquet")
    taken = take_over(fault("b"), wanted, own, faults=True)
    assert np.bincount(taken.slide).tolist() == [2, 3]
    assert (taken.slides, [f.slide_id for f in taken.faults]) == (("a", "b"), ["c"])
    known = fault("c")
    assert take_over(known, {"c": wanted["c"]}, own, faults=True) is known


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


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/2/3", "-1/2"])
def test_parts_that_are_none(text):
    with pytest.raises(ValueError, match=r"--part is one of several parts, such as 2/8, from 1/8 to 8/8; got "):
        IndexPart.parse(text)
