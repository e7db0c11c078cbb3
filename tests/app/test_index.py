"""``app.index`` as a user calls it: the table, the pages, parts, scenes, um/px and files that cannot be read."""

import json
import os
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile

from app.index import IndexCommand
from pipelines.catalog.table import FailedSlides
from pipelines.tiles.tile_table import TileTable
from tests.helpers.in_process import call
from tests.helpers.real import SVS
from tests.helpers.two_scenes import write_two_scenes


@pytest.fixture
def slides(tmp_path):
    folder = tmp_path / "slides"
    folder.mkdir()
    (folder / "a.svs").hardlink_to(SVS)
    (folder / "text.svs").write_text("not a slide")
    return folder


def index(folder, *words, code=0, tile="512"):
    """Index ``folder/slides``."""
    asked = ("--slides", folder / "slides", "--out", folder / "out", "--tile", tile, "--workers", "1")
    return call("app.index", *asked, *words, code=code)


def table_of(folder):
    return TileTable.load(folder / "out" / "tiles.parquet")


def test_a_folder_is_indexed(slides, tmp_path):
    out = tmp_path / "out"
    printed, table = index(tmp_path, "--stride", "256").stdout, table_of(tmp_path)
    assert (table.settings.tile, table.settings.stride) == (512, 256)
    failed = r"\d/2  text: failed at open: .*"
    assert re.match(rf"2 slides in {slides}\n{failed}\nindexed 2 slides in 0:\d\d:\d\d, 1 failed\n", printed)
    logged, page = (out / "run.log").read_text(), out / "slides.html"
    assert "/2  a: " in logged
    assert "/2  text: failed at open: " in logged
    for words in (
        f"{len(table)} tiles of 512 px at 0.5 um/px on 1 slide",
        f"index     {out / 'tiles.parquet'}\npictures  {out / 'tissue'}/\n",
        f"failed    {out / 'failed_slides.csv'} (1 slide)",
        f"page      {page} (with faults: 1, little tissue: ",
    ):
        assert words in printed
    assert 'src="tissue/small/a.jpg"' in page.read_text()
    assert f"in {out / 'tiles.parquet'} already: 1 slide" in index(tmp_path, "--stride", "256").stdout
    refused = index(tmp_path, "--stride", "256", "--min-tissue", "0.5", code=2)
    assert "min_tissue is 0.25 there, 0.5 was asked for" in refused.stderr


def test_a_quota_limits_the_processes(monkeypatch):
    monkeypatch.setattr("app.index.usable_cores", lambda: 3)
    assert [IndexCommand(Path("slides"), workers=n).processes for n in (0, 2)] == [3, 2]


def test_odd_files_and_names_are_named_and_the_others_go_on(slides, tmp_path):
    (slides / "series.dcm").symlink_to(slides / "nowhere.dcm")
    os.mkfifo(slides / "pipe.dcm")
    os.close(os.open(os.fsencode(slides) + b"/caf\xe9.svs", os.O_CREAT, 0o644))
    index(tmp_path).stdout.encode()
    failed = {slide for slide, _, _ in FailedSlides(tmp_path / "out" / "failed_slides.csv").rows()}
    assert failed == {"series", "pipe", "caf\\xe9", "text"}
    assert table_of(tmp_path).slides == ("a",)


def test_the_scene_that_is_asked_for_is_indexed(tmp_path):
    (tmp_path / "slides").mkdir()
    write_two_scenes(tmp_path / "slides" / "two.tif")
    assert "choose one with --scene N" in index(tmp_path, tile="256", code=1).stderr
    index(tmp_path, "--scene", "1", tile="256")
    assert [source.scene for source in table_of(tmp_path).sources] == [1]
    assert "scene" in index(tmp_path, "--scene", "0", tile="256", code=2).stderr


def test_a_folder_of_bad_slides_fails(slides, tmp_path):
    (slides / "a.svs").unlink()
    done, page = index(tmp_path, code=1), tmp_path / "out" / "slides.html"
    assert "none of 1 slide can be used:\n  text: open: " in done.stderr
    assert f"page      {page} (with faults: 1, " in done.stdout
    assert "text" in page.read_text()


def test_a_part_is_indexed_and_one_of_bad_slides_or_none_is_not_wrong(slides, tmp_path):
    part, printed = tmp_path / "out" / "tiles.part-1-of-2.parquet", index(tmp_path, "--part", "1/2").stdout
    assert printed.startswith(f"2 slides in {slides}, 1 of them in part 1/2\nindexed 1 slide in ")
    assert "1/1  a: " in part.with_suffix(".log").read_text()
    assert f"index     {part}\n" in printed
    assert "none of 1 slide can be used:\n  text: open: " in index(tmp_path, "--part", "2/2").stdout
    assert (tmp_path / "out" / "tiles.part-2-of-2.parquet").exists()
    assert index(tmp_path, "--part", "3/3").stdout == f"2 slides in {slides}, 0 of them in part 3/3\n"


def test_what_is_drawn_on_slides_is_outlined(slides, tmp_path):
    box = [[400, 400], [1800, 400], [1800, 2400], [400, 2400], [400, 400]]
    for slide, name in (("a", "tumour"), ("text", "stroma")):
        geometry = {"type": "Polygon", "coordinates": [box]}
        area = {"type": "Feature", "geometry": geometry, "properties": {"classification": {"name": name}}}
        (slides / f"{slide}.geojson").write_text(json.dumps([area]))
    assert "annotated: 1)" in index(tmp_path).stdout
    page = (tmp_path / "out" / "slides.html").read_text()
    assert page.count('<ul class="legend">') == 1
    assert ">tumour</li>" in page
    assert 'src="tissue/annotated/a.jpg"' in page
    plain, outlined = (cv2.imread(str(tmp_path / "out" / "tissue" / f / "a.jpg")) for f in ("small", "annotated"))
    changed = np.argwhere(np.abs(plain.astype(int) - outlined).max(2) > 60)
    scale = plain.shape[0] / 2967
    assert changed.min(0) == pytest.approx([400 * scale] * 2, abs=4)
    assert changed.max(0) == pytest.approx([2400 * scale, 1800 * scale], abs=4)


def test_slides_without_mpp_are_indexed_by_a_table(tmp_path):
    """Two TIFFs of different um/px and a picture, none of which records any; a picture is never taken at --mpp."""
    folder, table = tmp_path / "slides", tmp_path / "mpp.csv"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers((150, 60, 160), (220, 120, 220), (600, 600, 3), np.uint8)
    for name in ("a", "b"):
        tifffile.imwrite(folder / f"{name}.tif", pixels, tile=(256, 256), photometric="rgb", metadata=None)
    cv2.imwrite(str(folder / "c.png"), np.full((600, 600, 3), (180, 90, 200), np.uint8))
    said = index(tmp_path, "--out", tmp_path / "none", tile="256", code=1).stderr
    assert all(f"{name}: open: {folder}/{name}" in said for name in "abc")
    assert "does not record its um/px (mpp); give it with --slide-mpp" in said
    table.write_text("slide,mpp\na,0.5\nb.tif,0.25\n")
    index(tmp_path, "--mpp-table", table, tile="256")
    assert {source.slide_id: source.mpp for source in table_of(tmp_path).sources} == {"a": 0.5, "b": 0.25}
    (folder / "labels.csv").write_text("slide,mpp\na,0.5\nb.tif,0.25\nc,0.5\n")
    assert "on 3 slides" in index(tmp_path, tile="256").stdout
    table.write_text("slide,mpp\nA 1,0.5\n")
    said = index(tmp_path, "--mpp-table", table, tile="256", code=2).stderr
    assert f"gives the um/px of no slide of {folder}: it names A 1, the slides are a, b, c" in said
    table.write_text("slide,mpp\na,40\n")
    assert "magnification" in index(tmp_path, "--mpp-table", table, tile="256", code=2).stderr
