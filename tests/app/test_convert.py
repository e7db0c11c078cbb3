"""``app.convert`` and ``app.synth`` as a user calls them: files in, files out."""

from pathlib import Path

import imagecodecs
import numpy as np
import pytest

from app import convert, synth
from pipelines.backends.mask import open_mask
from pipelines.labels.geojson import read_geojson
from tests.helpers.dicom_file import write_dicom_slide
from tests.helpers.drawings import annotations_in, box, write_geojson

SAMPLES = Path(__file__).parents[1] / "data" / "annotations"


@pytest.fixture
def slide(tmp_path):
    path = tmp_path / "slide.png"
    path.write_bytes(imagecodecs.png_encode(np.full((60, 80, 3), 255, np.uint8)))
    return str(path)


def test_a_slide_that_would_end_the_process_is_refused(tmp_path, capsys):
    (slide,) = write_dicom_slide(tmp_path / "dicom", [np.zeros((64, 64, 3), np.uint8)], encoding="raw", tile=32)
    data = slide.read_bytes()
    at = data.index(b"\x20\0\x0d\0UI")
    deep = (b"\x09\0\x10\x10SQ\0\0" + b"\xff" * 4 + b"\xfe\xff\x00\xe0" + b"\xff" * 4) * 100_000
    slide.write_bytes(data[:at] + deep + data[at:])
    source = write_geojson(tmp_path / "in.geojson", box(10, 20, 30, 50, "Tumor"))
    assert convert.main([str(source), str(tmp_path / "a.tif"), "--slide", str(slide)]) != 0
    assert "nested more than 64 deep" in capsys.readouterr().err


def test_to_geojson_to_mask_and_back(tmp_path, slide, capsys):
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


def test_a_folder_is_converted_whatever_is_wrong_with_one_file(tmp_path, slide, capsys):
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


@pytest.fixture
def masks(tmp_path, slide):
    """Values in each mask of the folder ``masks``; its slide is in ``slides``."""
    values = {"a": [1], "deep/b": [2], "deeper/c": [1, 2]}
    (tmp_path / "slides").mkdir()
    for name, of_mask in values.items():
        pixels = np.zeros((60, 80), np.uint8)
        for value in of_mask:
            pixels[10 * value : 10 * value + 5, 10:20] = value
        path = tmp_path / "masks" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(imagecodecs.png_encode(pixels))
        (tmp_path / "slides" / path.name).write_bytes(Path(slide).read_bytes())
    return values


def convert_masks(tmp_path, suffix):
    folders = [str(tmp_path / name) for name in ("masks", "out", "slides")]
    return convert.main([*folders[:2], "--slide", folders[2], "--slide-mpp", "0.5", "--to", suffix])


def test_a_value_is_one_class_in_all_masks_of_a_folder(tmp_path, masks):
    # Each mask was named alone: 1 was foreground in a and class_1 in c, and b was refused.
    assert convert_masks(tmp_path, ".geojson") == 0
    assert convert_masks(tmp_path, ".tif") == 0
    for name, values in masks.items():
        made = tmp_path / "out" / name
        assert set(read_geojson(made.with_suffix(".geojson")).classes) == {f"class_{value}" for value in values}
        assert open_mask(made.with_suffix(".tif")).values() == {0, *values}
        assert made.with_name("classes.txt").read_text() == "1 class_1\n2 class_2\n"


def test_sub_folders_have_one_list_of_classes(tmp_path, slide):
    # Each had its own: 1 was tumour in one and stroma in the other, and training refused them.
    (tmp_path / "slides").mkdir()
    for name, drawn in (("a/x", "tumour"), ("b/y", "stroma")):
        write_geojson(tmp_path / "masks" / f"{name}.geojson", box(10, 20, 30, 50, drawn))
        (tmp_path / "slides" / f"{Path(name).name}.png").write_bytes(Path(slide).read_bytes())
    assert convert_masks(tmp_path, ".tif") == 0
    assert (tmp_path / "out" / "classes.txt").read_text() == "1 tumour\n2 stroma\n"
    assert open_mask(tmp_path / "out" / "b" / "y.tif").values() == {0, 2}
    assert annotations_in(tmp_path / "out", "x", "y").classes == ("background", "tumour", "stroma")


def test_nothing_is_converted_where_a_value_has_two_names_or_none(tmp_path, masks, capsys):
    folder = tmp_path / "masks"
    (folder / "classes.txt").write_text("1 Tumor\n2 Fat\n")
    (folder / "deep" / "classes.txt").write_text("2 Tumor\n")
    assert convert_masks(tmp_path, ".geojson") != 0
    assert "id 2 is 'Tumor' here and 'Fat' before" in capsys.readouterr().err
    for name in ("classes.txt", "deep/classes.txt", "a.png", "deeper/c.png"):
        (folder / name).unlink()
    assert convert_masks(tmp_path, ".geojson") != 0
    assert "b.png has 2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("of_folder", [False, True])
def test_um_per_px_of_a_slide_are_those_of_the_table(tmp_path, slide, of_folder, capsys):
    drawn = write_geojson(tmp_path / "drawn" / "slide.geojson", box(10, 20, 30, 50, "Tumor"))
    table = tmp_path / "mpp.csv"
    table.write_text("slide,mpp\nslide.png,0.25\nother,1\n")
    paths = [drawn, tmp_path / "out.png", "--slide", slide]
    if of_folder:
        paths = [drawn.parent, tmp_path / "out", "--to", ".png", "--slide", tmp_path]
    assert convert.main([*map(str, paths), "--mpp", "0.5", "--slide-mpp", "1", "--mpp-table", str(table)]) == 0
    assert "40 x 30 px at 0.5 um/px" in capsys.readouterr().out


def test_makes_slides_and_says_so(tmp_path, capsys):
    arguments = [str(tmp_path), "--slides", "2", "--size", "600", "--workers", "1"]
    assert synth.main(arguments) == 0
    assert "2 slides made" in capsys.readouterr().out
    assert synth.main(arguments) == 0
    assert "0 slides made, 2 were there already" in capsys.readouterr().out
