import json
import os
import re
import sys

import cv2
import numpy as np
import pytest
import tifffile

from app.index import main
from pipelines.catalog.failures import FailedSlides
from pipelines.tiles.index import TileTable
from tests.helpers.real import SVS
from tests.helpers.two_scenes import write_two_scenes


@pytest.fixture
def slides(tmp_path):
    folder = tmp_path / "slides"
    folder.mkdir()
    (folder / "a.svs").hardlink_to(SVS)
    (folder / "text.svs").write_text("not a slide")
    return folder


def test_a_folder_is_indexed(slides, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--slides", str(slides), "--out", str(out), "--tile", "512", "--stride", "256", "--workers", "1"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    table = TileTable.load(out / "tiles.parquet")
    assert (table.settings.tile, table.settings.stride) == (512, 256)
    assert re.match(
        rf"2 slides in {slides}\n\d/2  text: failed at open: .*\nindexed 2 slides in 0:\d\d:\d\d, 1 failed\n", printed
    )
    logged = (out / "run.log").read_text()
    assert "/2  a: " in logged
    assert "/2  text: failed at open: " in logged
    assert f"{len(table)} tiles of 512 px at 0.5 um/px on 1 slide" in printed
    assert f"index     {out / 'tiles.parquet'}\npictures  {out / 'tissue'}/\n" in printed
    assert f"failed    {out / 'failed_slides.csv'} (1 slide)" in printed
    page = out / "slides.html"
    assert f"page      {page} (with faults: 1, little tissue: " in printed
    assert 'src="tissue/small/a.jpg"' in page.read_text()
    assert main(arguments) == 0
    assert f"in {out / 'tiles.parquet'} already: 1 slide" in capsys.readouterr().out
    assert main([*arguments, "--min-tissue", "0.5"]) == 2
    assert "min_tissue is 0.25 there, 0.5 was asked for" in capsys.readouterr().err


def test_odd_files_and_names_are_named_and_the_others_go_on(slides, tmp_path, capsys):
    (slides / "series.dcm").symlink_to(slides / "nowhere.dcm")
    os.mkfifo(slides / "pipe.dcm")
    os.close(os.open(os.fsencode(slides) + b"/caf\xe9.svs", os.O_CREAT, 0o644))
    out = tmp_path / "out"
    assert main(["--slides", str(slides), "--out", str(out), "--tile", "512", "--workers", "1"]) == 0
    capsys.readouterr().out.encode()
    failed = {slide for slide, _, _ in FailedSlides(out / "failed_slides.csv").rows()}
    assert failed == {"series", "pipe", "caf\\xe9", "text"}
    assert TileTable.load(out / "tiles.parquet").slides == ("a",)


def test_the_scene_that_is_asked_for_is_indexed(tmp_path, capsys):
    (tmp_path / "slides").mkdir()
    write_two_scenes(tmp_path / "slides" / "two.tif")
    out = tmp_path / "out"
    arguments = ["--slides", str(tmp_path / "slides"), "--out", str(out), "--tile", "256", "--workers", "1"]
    assert main(arguments) == 1
    assert "choose one with --scene N" in capsys.readouterr().err
    assert main([*arguments, "--scene", "-1"]) == 2
    assert "--scene counts the images of a slide file from 0; got -1" in capsys.readouterr().err
    assert main([*arguments, "--scene", "1"]) == 0
    (source,) = TileTable.load(out / "tiles.parquet").sources
    assert source.scene == 1
    capsys.readouterr()
    assert main([*arguments, "--scene", "0"]) == 2
    assert "scene" in capsys.readouterr().err


def test_faults_of_the_settings_are_told_at_once(slides, tmp_path, capsys):
    assert main(["--slides", str(slides), "--tile", "0", "--slide-mpp", "500", "--workers", "-1"]) == 2
    said = capsys.readouterr().err
    assert all(
        text in said
        for text in ("--tile is at least 1 px, or slide; got 0", "got 500", "--workers is at least 0; got -1")
    )


def test_an_empty_folder_is_a_wrong_call(tmp_path, capsys):
    assert main(["--slides", str(tmp_path)]) == 2
    assert "holds no slide" in capsys.readouterr().err


def test_a_folder_of_bad_slides_fails(slides, tmp_path, capsys):
    (slides / "a.svs").unlink()
    assert main(["--slides", str(slides), "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert "none of 1 slide can be used:\n  text: open: " in printed.err
    page = tmp_path / "out" / "slides.html"
    assert f"page      {page} (with faults: 1, " in printed.out
    assert "text" in page.read_text()


def test_a_folder_that_cannot_be_written_fails(slides, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["--slides", str(slides), "--out", str(tmp_path / "file" / "out")]) == 1
    assert "file" in capsys.readouterr().err


@pytest.mark.process
def test_no_deep_learning_library_is_loaded(slides, tmp_path):
    import subprocess

    code = "import sys, app.index, pipelines.tiles.slide_index; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_part_is_indexed_and_one_too_many_is_not_wrong(slides, tmp_path, capsys):
    arguments = ["--slides", str(slides), "--out", str(tmp_path / "out"), "--tile", "512", "--workers", "1"]
    assert main([*arguments, "--part", "1/2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"2 slides in {slides}, 1 of them in part 1/2\nindexed 1 slide in ")
    assert "1/1  a: " in (tmp_path / "out" / "tiles.part-1-of-2.log").read_text()
    assert f"index     {tmp_path / 'out' / 'tiles.part-1-of-2.parquet'}\n" in printed
    assert main([*arguments, "--part", "3/3"]) == 0
    assert capsys.readouterr().out == f"2 slides in {slides}, 0 of them in part 3/3\n"
    assert main([*arguments, "--part", "1/2", "--annotations", str(slides)]) == 2
    assert "which is not made with --part or --pictures resize" in capsys.readouterr().err
    assert main([*arguments, "--part", "3/2"]) == 2
    assert "--part is one of several parts" in capsys.readouterr().err


def test_what_is_drawn_on_slides_is_outlined(slides, tmp_path, capsys):
    box = [[400, 400], [1800, 400], [1800, 2400], [400, 2400], [400, 400]]
    for slide, name in (("a", "tumour"), ("text", "stroma")):
        geometry = {"type": "Polygon", "coordinates": [box]}
        area = {"type": "Feature", "geometry": geometry, "properties": {"classification": {"name": name}}}
        (slides / f"{slide}.geojson").write_text(json.dumps([area]))
    arguments = ["--slides", str(slides), "--out", str(tmp_path / "out"), "--tile", "512", "--workers", "1"]
    assert main(arguments) == 0
    assert "annotated: 1)" in capsys.readouterr().out
    page = (tmp_path / "out" / "slides.html").read_text()
    assert page.count('<ul class="legend">') == 1
    assert ">tumour</li>" in page
    assert 'src="tissue/annotated/a.jpg"' in page
    plain, outlined = (cv2.imread(str(tmp_path / "out" / "tissue" / f / "a.jpg")) for f in ("small", "annotated"))
    changed = np.argwhere(np.abs(plain.astype(int) - outlined).max(2) > 60)
    scale = plain.shape[0] / 2967
    assert changed.min(0) == pytest.approx([400 * scale] * 2, abs=4)
    assert changed.max(0) == pytest.approx([2400 * scale, 1800 * scale], abs=4)
    assert main([*arguments, "--annotations", str(tmp_path / "nowhere")]) == 2
    assert "must be a folder of annotation files" in capsys.readouterr().err


def test_slides_without_mpp_are_indexed_by_a_table(tmp_path, capsys):
    """Two TIFFs of different um/px and a picture, none of which records any."""
    folder = tmp_path / "slides"
    folder.mkdir()
    for name in ("a", "b"):
        write_tissue(folder / f"{name}.tif")
    cv2.imwrite(str(folder / "c.png"), np.full((600, 600, 3), (180, 90, 200), np.uint8))
    arguments = ["--slides", str(folder), "--tile", "256", "--workers", "1", "--out"]
    assert main([*arguments, str(tmp_path / "none")]) == 1
    said = capsys.readouterr().err
    assert all(f"{name}: open: {folder}/{name}" in said for name in "abc"), "a picture, too, is never taken at --mpp"
    assert "does not record its um/px (mpp); give it with --slide-mpp" in said

    table = tmp_path / "mpp.csv"
    table.write_text("slide,mpp\na,0.5\nb.tif,0.25\n")
    assert main([*arguments, str(tmp_path / "out"), "--mpp-table", str(table)]) == 0
    sources = {source.slide_id: source for source in TileTable.load(tmp_path / "out" / "tiles.parquet").sources}
    assert {name: source.mpp for name, source in sources.items()} == {"a": 0.5, "b": 0.25}
    (folder / "labels.csv").write_text("slide,mpp\na,0.5\nb.tif,0.25\nc,0.5\n")
    capsys.readouterr()
    assert main([*arguments, str(tmp_path / "out")]) == 0
    assert "on 3 slides" in capsys.readouterr().out
    table.write_text("slide,mpp\na,40\n")
    assert main([*arguments, str(tmp_path / "out"), "--mpp-table", str(table)]) == 2
    assert "magnification" in capsys.readouterr().err


def write_tissue(path):
    pixels = np.random.default_rng(0).integers((150, 60, 160), (220, 120, 220), (600, 600, 3), np.uint8)
    tifffile.imwrite(path, pixels, tile=(256, 256), photometric="rgb", metadata=None)
