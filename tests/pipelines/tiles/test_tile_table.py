import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.slides.geometry import Region
from pipelines.tiles.index_settings import IndexSettings, check_settings
from pipelines.tiles.tile_table import IndexedSlide, SlideFault, TileTable

COLUMNS = ("slide", "l0_x", "l0_y", "tissue")


def table(slides="abc", tiles=4, settings=IndexSettings(tile=512, stride=256)):  # noqa: B008 - it is frozen
    n = len(slides) * tiles
    return TileTable(
        tuple(slides),
        np.repeat(np.arange(len(slides), dtype=np.int32), tiles),
        np.arange(n, dtype=np.int64) * 1000,
        np.arange(n, dtype=np.int64) + 2**33,
        np.linspace(0, 1, n, dtype=np.float32),
        settings,
        tuple(IndexedSlide(s, 10, None, 0.25, 9000, 8000, "tiled") for s in slides),
        (SlideFault("z", 3, 0.5, "open", "truncated"),),
    )


def assert_same(a, b):
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert getattr(a, name).dtype == getattr(b, name).dtype
    assert (a.slides, a.settings, a.sources, a.faults) == (b.slides, b.settings, b.sources, b.faults)


@pytest.mark.parametrize("made", [table(), table().of_slides(["b"]), table().select(np.empty(0, np.int64)), table("")])
def test_what_is_saved_is_loaded(tmp_path: Path, made):
    made.save(tmp_path / "tiles.parquet")
    assert_same(TileTable.load(tmp_path / "tiles.parquet"), made)
    assert [p.name for p in tmp_path.iterdir()] == ["tiles.parquet"]


def test_the_file_is_plain_parquet_for_other_programs(tmp_path: Path):
    table().save(tmp_path / "tiles.parquet")
    read = pq.read_table(tmp_path / "tiles.parquet")
    assert read.column_names == list(COLUMNS)
    assert read.column("slide").to_pylist()[3:5] == ["a", "b"]


def test_regions_are_at_the_mpp_of_the_settings():
    assert table().region(5) == Region(5000, 5 + 2**33, 512, 512, 0.5)
    assert table().slide_id(5) == "b"


def test_select_keeps_the_order_asked_for():
    rows = np.array([7, 0, 7])
    chosen = table().select(rows)
    np.testing.assert_array_equal(chosen.l0_x, [7000, 0, 7000])
    assert [chosen.slide_id(i) for i in range(3)] == ["b", "a", "b"]


def test_of_slides_has_the_tiles_of_these_slides_in_this_order():
    chosen = table().of_slides(["c", "nowhere", "a", "c"])
    assert chosen.slides == ("c", "a")
    assert [source.slide_id for source in chosen.sources] == ["c", "a"]
    np.testing.assert_array_equal(chosen.l0_x, np.array([8, 9, 10, 11, 0, 1, 2, 3]) * 1000)
    assert chosen.faults == ()
    assert table().of_slides(["z"]).faults == table().faults


def test_joined_tables_hold_all_tiles():
    whole = table()
    parts = [whole.of_slides(["a"]), whole.of_slides(["b", "c"]), whole.of_slides(["z"])]
    assert_same(TileTable.joined(whole.settings, parts), whole)


def test_other_settings_are_refused_with_every_differing_key():
    found = IndexSettings()
    check_settings(found, replace(found), Path("run/tiles.parquet"))
    said = (
        r"run/tiles.parquet .* tile is 1024 there, 512 was asked for; "
        r"min_tissue is 0.25 there, 0.5 was asked for. Give another --out"
    )
    with pytest.raises(ValueError, match=said):
        check_settings(found, replace(found, tile=512, min_tissue=0.5), Path("run/tiles.parquet"))


@pytest.mark.parametrize("content", [b"", b"not parquet", None])
def test_a_file_that_is_no_index_is_refused(tmp_path: Path, content):
    path = tmp_path / "tiles.parquet"
    if content is None:
        pq.write_table(pa.table({"slide": ["a"]}), path)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tiles.parquet is not a tile index of this program.*delete it"):
        TileTable.load(path)


def test_an_index_with_figures_of_quality_is_read(tmp_path: Path):
    path = tmp_path / "tiles.parquet"
    table().save(path)
    read = pq.read_table(path)
    about = json.loads(read.schema.metadata[b"megatile"])
    about["sources"] = [source | {"sharpness": 1.0, "blurred": 0.0, "pen_mm2": None} for source in about["sources"]]
    pq.write_table(read.replace_schema_metadata({b"megatile": json.dumps(about).encode()}), path)
    assert TileTable.load(path).sources == table().sources


def test_a_truncated_index_is_refused(tmp_path: Path):
    path = tmp_path / "tiles.parquet"
    table().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a tile index"):
        TileTable.load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "absent"),
        ("settings", "absent"),
        ("settings", {"tile": "x"}),
        ("settings", {"tile": 512, "depth": 3}),
        ("settings", {"tile": 512, "mpp": "fine"}),
        ("slides", ["a", "a", "c"]),
        ("slides", ["a", "b"]),
        ("slides", 3),
        ("sources", []),
        ("sources", [{"slide_id": "a"}]),
        ("sources", "abc"),
        ("faults", 5),
        ("faults", [{"slide_id": "z", "file_bytes": "3", "asked_mpp": None, "step": "open", "error": "e"}]),
        ("faults", [{"slide_id": "z", "file_bytes": 3, "asked_mpp": None, "step": "open", "error": 7}]),
    ],
)
def test_rotten_metadata_ends_in_one_message_that_names_the_file(tmp_path: Path, key, value):
    path = tmp_path / "tiles.parquet"
    table().save(path)
    read = pq.read_table(path)
    about = json.loads(read.schema.metadata[b"megatile"]) | {key: value}
    if value == "absent":
        del about[key]
    pq.write_table(read.replace_schema_metadata({b"megatile": json.dumps(about).encode()}), path)
    if (key, value) == ("sources", []):  # as of a table that was not made from files
        assert TileTable.load(path).sources == ()
        return
    with pytest.raises(ValueError, match=r"tiles\.parquet is not a tile index of this program, or damaged .*delete it"):
        TileTable.load(path)


@pytest.mark.parametrize("metadata", [b"[1, 2]", b"null", b"[" * 100_000, b"\xff", b"7"])
def test_metadata_that_are_no_object(tmp_path: Path, metadata):
    path = tmp_path / "tiles.parquet"
    pq.write_table(pa.table({"slide": ["a"]}).replace_schema_metadata({b"megatile": metadata}), path)
    with pytest.raises(ValueError, match=r"tiles\.parquet is not a tile index"):
        TileTable.load(path)


def test_another_format_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("pipelines.tiles.tile_table.FORMAT", 2)
    table().save(tmp_path / "tiles.parquet")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has format 2, this program reads 1; delete it"):
        TileTable.load(tmp_path / "tiles.parquet")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (IndexSettings(tile=0), "--tile is at least 1 px, or slide; got 0"),
        (IndexSettings(mpp=0.0), "--mpp is 0.05 to 100 um/px; got 0"),
        (IndexSettings(mpp=float("nan")), "--mpp is 0.05 to 100 um/px; got nan"),
        (IndexSettings(stride=2000), r"--stride is 1 to --tile \(1024\) px, or tiles leave gaps; got 2000"),
        (IndexSettings(stride=0), "--stride is 1 to"),
        (IndexSettings(min_tissue=25), "--min-tissue is a part of a tile, 0 to 1; got 25"),
        (IndexSettings(tissue_mpp=-8), "--tissue-mpp is 0.05 to 100 um/px; got -8"),
        (IndexSettings(tile=8), "smaller than one px of the tissue mask"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, message):
    (fault,) = settings.validate()
    with pytest.raises(ValueError, match=message):
        raise ValueError(fault)


def test_good_settings_have_no_fault():
    assert IndexSettings().validate() == IndexSettings(tile=16384, stride=1, min_tissue=0).validate() == []
