"""``app.convert`` as a user calls it: files in, files out, and one message where that cannot be."""

from __future__ import annotations

from pathlib import Path

import imagecodecs
import numpy as np
import pytest

from app import convert
from pipelines.labels.geojson import read_geojson
from tests.helpers.dicom_file import write_dicom_slide
from tests.helpers.drawings import box, write_geojson

SAMPLES = Path(__file__).parents[1] / "data" / "annotations"


@pytest.fixture
def slide(tmp_path: Path) -> str:
    path = tmp_path / "slide.png"
    path.write_bytes(imagecodecs.png_encode(np.full((60, 80, 3), 255, np.uint8)))
    return str(path)


def test_a_slide_that_would_end_the_process_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (slide,) = write_dicom_slide(tmp_path / "dicom", [np.zeros((64, 64, 3), np.uint8)], encoding="raw", tile=32)
    data = slide.read_bytes()
    at = data.index(b"\x20\0\x0d\0UI")
    deep = (b"\x09\0\x10\x10SQ\0\0" + b"\xff" * 4 + b"\xfe\xff\x00\xe0" + b"\xff" * 4) * 100_000
    slide.write_bytes(data[:at] + deep + data[at:])
    source = write_geojson(tmp_path / "in.geojson", box(10, 20, 30, 50, "Tumor"))
    assert convert.main([str(source), str(tmp_path / "a.tif"), "--slide", str(slide)]) != 0
    assert "nested more than 64 deep" in capsys.readouterr().err


def test_to_geojson_to_mask_and_back(tmp_path: Path, slide: str, capsys: pytest.CaptureFixture[str]) -> None:
    point = {"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, 2]}}
    source = write_geojson(tmp_path / "in.geojson", box(10, 20, 30, 50, "Tumor"), box(1, 1, 5, 5, "Stroma"), point)
    given = ["--slide", slide, "--slide-mpp", "0.5"]
    made = [tmp_path / name for name in ("a.geojson", "out/c.tif", "d.geojson")]
    for path, extra in zip(made, ([], ["--mpp", "0.5"], []), strict=True):
        assert convert.main([str(source), str(path), *given, *extra]) == 0
        source = path
    said = capsys.readouterr().out
    assert "2 polygons of 10 points, classes Tumor, Stroma; left out: 1 x Point" in said
    assert "c.tif: 80 x 60 px at 0.5 um/px" in said
    drawing = read_geojson(made[2])
    boxes = {drawing.classes[k]: drawing.box[i].tolist() for i, k in enumerate(drawing.polygon_class)}
    assert boxes == {"Tumor": [10, 20, 30, 50], "Stroma": [1, 1, 5, 5]}


def test_faults_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there.geojson").write_text("")
    assert convert.main([str(tmp_path / "a.svs"), str(tmp_path / "there.geojson"), "--mpp", "1"]) == 2
    said = capsys.readouterr().err
    for fault in (
        "IN must end in .geojson",
        "a.svs is none",
        "there.geojson does. Remove it",
        "--mpp is the resolution",
    ):
        assert fault in said
    assert convert.main([str(SAMPLES / "asap-polygon.xml"), str(tmp_path / "a.tif")]) == 2
    assert "a.tif: a mask covers a slide: give --slide FILE" in capsys.readouterr().err


def test_a_damaged_file_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.xml").write_text("<!DOCTYPE x><Annotations/>")
    assert convert.main([str(tmp_path / "a.xml"), str(tmp_path / "a.geojson")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "declares a document type ('x')" in said
    assert not (tmp_path / "a.geojson").exists()


def test_a_folder_is_converted_whatever_is_wrong_with_one_file(
    tmp_path: Path, slide: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, slides = tmp_path / "drawn", tmp_path / "slides"
    (drawn / "deep").mkdir(parents=True)
    slides.mkdir()
    for name in ("a", "deep/b", "c"):
        write_geojson(drawn / f"{name}.geojson", box(10, 20, 30, 50, "Tumor"))
        (slides / f"{Path(name).name}.png").write_bytes(Path(slide).read_bytes())
    (drawn / "a.json").write_bytes((drawn / "a.geojson").read_bytes())
    (drawn / "bad.xml").write_text("<Annotations")
    (drawn / "other.xml").write_bytes((SAMPLES / "asap-polygon.xml").read_bytes())
    arguments = [str(drawn), str(tmp_path / "out"), "--to"]
    assert convert.main([*arguments, ".geojson"]) == 1
    said = capsys.readouterr()
    made = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.geojson"))
    assert made == ["a.geojson", "c.geojson", "deep/b.geojson", "other.geojson"]
    assert "4 of 6 files converted, 0 were there already, 2 failed" in said.out
    assert said.out.count("no --slide given") == 1
    assert "a.geojson is made of" in said.err
    assert "bad.xml: not converted: " in said.err
    (drawn / "a.json").unlink()
    (drawn / "bad.xml").unlink()
    assert convert.main([*arguments, ".geojson"]) == 0
    assert "0 of 4 files converted, 4 were there already, 0 failed" in capsys.readouterr().out
    given = ["--slide", str(slides), "--slide-mpp", "0.5", "--mpp", "1"]
    assert convert.main([*arguments, ".png", *given]) == 1
    said = capsys.readouterr()
    assert "deep/b.png: 40 x 30 px at 1 um/px, 1 polygons" in said.out
    assert "no slide in" in said.err
    assert "the name of other.xml" in said.err
    mask = imagecodecs.png_decode((tmp_path / "out" / "c.png").read_bytes())
    assert (mask[10:25, 5:15] == 1).all()
    assert mask.sum() == 150


@pytest.mark.parametrize("of_folder", [False, True])
def test_um_per_px_of_a_slide_are_those_of_the_table(
    tmp_path: Path, slide: str, of_folder: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = write_geojson(tmp_path / "drawn" / "slide.geojson", box(10, 20, 30, 50, "Tumor"))
    table = tmp_path / "mpp.csv"
    table.write_text("slide,mpp\nslide.png,0.25\nother,1\n")
    paths = [drawn, tmp_path / "out.png", "--slide", slide]
    if of_folder:
        paths = [drawn.parent, tmp_path / "out", "--to", ".png", "--slide", tmp_path]
    assert convert.main([*map(str, paths), "--mpp", "0.5", "--slide-mpp", "1", "--mpp-table", str(table)]) == 0
    assert "40 x 30 px at 0.5 um/px" in capsys.readouterr().out


def test_what_a_folder_needs_is_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("")
    assert convert.main([str(tmp_path), str(tmp_path / "out"), "--slide", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    for fault in ("say what to make, as --to .geojson", "out is a file", "--slide must be a folder"):
        assert fault in said
    assert convert.main([str(tmp_path), str(tmp_path / "new"), "--to", ".tif"]) == 2
    assert "a mask covers a slide: give --slide FOLDER" in capsys.readouterr().err
    assert convert.main([str(tmp_path), str(tmp_path / "new"), "--to", ".geojson"]) == 2
    assert "IN holds no annotation file" in capsys.readouterr().err
    assert convert.main([str(SAMPLES / "asap-polygon.xml"), str(tmp_path / "a.xml")]) == 2
    assert "OUT must end in .geojson" in capsys.readouterr().err
    assert convert.main([str(SAMPLES / "asap-polygon.xml"), str(tmp_path / "a.json"), "--to", ".geojson"]) == 2
    assert "--to is for a folder" in capsys.readouterr().err
