"""Folders as people have them, and which slides they hold."""

import os
import pickle

import pytest

from pipelines.catalog.catalog import SlideNames, find_slides, slide_stem
from pipelines.slides.slide import SlideError
from tests.helpers.real import REAL


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (root / name).mkdir()
        else:
            (root / name).touch()


def ids(root):
    return [spec.slide_id for spec in find_slides(root)]


def dicom(path, series, size, explicit=True):
    uid = series.encode() + b"\0" * (len(series) % 2)
    head = b"UI" + len(uid).to_bytes(2, "little") if explicit else len(uid).to_bytes(4, "little")
    path.parent.mkdir(parents=True, exist_ok=True)
    syntax = b"" if explicit else b"\2\0\x10\0UI\x12\x001.2.840.10008.1.2\0"
    path.write_bytes((bytes(128) + b"DICM" + syntax + b"\x20\0\x0e\0" + head + uid).ljust(size, b"\0"))


REFERENCED = b"\x20\0\x0e\0UI\x06\x001.9.9\0"


@pytest.mark.parametrize("undefined", [False, True])
def test_a_referenced_series_is_not_the_series_of_a_dicom_file(tmp_path, undefined):
    length = b"\xff\xff\xff\xff" if undefined else len(REFERENCED).to_bytes(4, "little")
    item = b"\xfe\xff\x00\xe0" + length + REFERENCED + (b"\xfe\xff\x0d\xe0" + bytes(4)) * undefined
    sequence = b"\x08\0\x15\x11SQ\0\0" + (b"\xff" * 4 if undefined else len(item).to_bytes(4, "little")) + item
    sequence += (b"\xfe\xff\xdd\xe0" + bytes(4)) * undefined
    for name in ("1", "2"):
        own = b"\x20\0\x0e\0UI\x06\x001.2.%s\0" % name.encode()
        (tmp_path / f"{name}.dcm").write_bytes(bytes(128) + b"DICM" + sequence + own)
    assert ids(tmp_path) == ["1", "2"]


def test_damaged_dicom_files_of_one_name_cost_no_other_slide(tmp_path):
    for case, uid in (("a", "1.2.3"), ("b", "1.2.4")):
        for name in ("1", "2"):
            dicom(tmp_path / case / f"{name}.dcm", uid, 500)
        touch(tmp_path / case, "9.dcm")
    assert ids(tmp_path) == ["a", "a/9", "b", "b/9"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (
            "a.svs b.tif c.TIFF d.btf e.ndpi f.mrxs g.scn h.bif i.vms j.vmu k.svslide l.dcm m.png n.jpg o.jpeg t.qptiff"
            " p.ome.tif q.ome.zarr/ deep/er/r.zarr/ deep/s.v2.svs",
            "a b c d e f g h i j k l m n o p q r s.v2 t",
        ),
        (
            "a.svs a_mask.tif a-mask.png a_mask.ome.tif a_mask.zarr/0.png a.geojson labels.csv .hidden.svs ._a.svs"
            " .cache/b.svs annotations/c.png x/Masks/d.png run/tissue/e.png run/run.log"
            " f.mrxs f/Data0000.dat f/thumbnail.png g.zarr/0/0.png .h.zarr/0.png",
            "a f g",
        ),
        (
            "a.tif pred/predict.json pred/overlays/a.png pred/heat_maps/a.Tumor.tif pred/masks/a.png predict.json"
            " data/b.svs overlays/a.png heat_maps/a.b.tif masks/a.png run/tissue/a.png run/tiles.part-1-of-2.parquet"
            " project.qpproj q/P.QPPROJ data/1/thumbnail.jpg data/2/thumbnail.jpg q/data/1/thumbnail.jpg"
            " other/overlays/c.png other/data/1/d.png",
            "a b c d",
        ),
        # A class of this name was once left out without a word.
        ("tissue/a.png stroma/b.png", "a b"),
    ],
    ids=["every known name", "what is no slide", "outputs and QuPath projects", "a class named tissue"],
)
def test_which_names_are_slides(tmp_path, names, found):
    touch(tmp_path, *names.split())
    assert ids(tmp_path) == found.split()


def test_links_are_followed_and_pictures_of_a_vms_slide_are_its_own(tmp_path):
    touch(tmp_path, "elsewhere/b.svs", "slides/a.svs", "vms/s.jpg", "vms/s_map.jpg", "vms/other.jpg")
    (tmp_path / "slides" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "slides")
    assert ids(tmp_path / "slides") == ["a", "b"]
    about = "[Virtual Microscope Specimen]\r\nImageFile=s.jpg\r\nMapFile=s_map.jpg\r\n"
    (tmp_path / "vms" / "s.vms").write_text(about)
    assert ids(tmp_path / "vms") == ["other", "s"]


def test_pictures_of_other_types_fail_by_name(tmp_path):
    """A GIF in a class folder was once left out without a word."""
    touch(tmp_path, "x/a.png", "x/b.GIF", "x/a.webp", "x/.c.gif", "x/notes.txt", "slides/s.svs", "slides/s.gif")
    found = {spec.slide_id: spec for spec in find_slides(tmp_path)}
    assert sorted(found) == ["a", "a.webp", "b.GIF", "s"]
    found["b.GIF"].path.write_bytes(b"GIF89a\x01\0\x01\0\x80\0\0" + bytes(30))
    with pytest.raises(SlideError, match=r"pictures of type \.GIF are not read; save it as PNG"):
        found["b.GIF"].open()


@pytest.mark.parametrize(
    ("given", "mpps"),
    [
        ({}, [None] * 4),
        ({"mpp_by_slide": {"d": 0.3}}, [None, None, None, 0.3]),
        ({"mpp": 0.25}, [0.25] * 4),
        ({"whole_pictures": True}, [0.5, 0.5, None, 0.5]),  # which changes nothing of them
    ],
)
def test_pictures_take_no_mpp_but_a_given_one(tmp_path, given, mpps):
    touch(tmp_path, "a.png", "b.JPG", "c.tif", "d.png")
    assert [spec.mpp for spec in find_slides(tmp_path, **given)] == mpps


def test_dicom_files_of_one_series_are_one_slide(tmp_path):
    dicom(tmp_path / "case7" / "1.dcm", "1.2.3", 900)
    dicom(tmp_path / "case7" / "2.dcm", "1.2.3", 5000)
    for name, series, size in [("a", "1.2.4", 700), ("b", "1.2.5", 800), ("c", "1.2.4", 900)]:
        dicom(tmp_path / "flat" / f"{name}.dcm", series, size, explicit=False)
    touch(tmp_path, "odd/x.dcm", "odd/y.dcm")
    found = {spec.slide_id: spec.path.name for spec in find_slides(tmp_path)}
    assert found == {"case7": "2.dcm", "b": "b.dcm", "c": "c.dcm", "x": "x.dcm", "y": "y.dcm"}
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "patient").symlink_to(tmp_path / "case7")
    assert ids(tmp_path / "links") == ["patient"]


def test_real_slides_open_under_their_id():
    found = find_slides(REAL, mpp_by_slide={"highdicom_sm_image.dcm": 0.5})
    assert {"CMU-1-Small-Region", "cmu-small", "test3-DAPI-2-387", "highdicom_sm_image"} <= {s.slide_id for s in found}
    by_id = {spec.slide_id: spec for spec in found}
    assert by_id["highdicom_sm_image"].mpp == 0.5
    with pickle.loads(pickle.dumps(by_id["CMU-1-Small-Region"])).open() as slide:
        assert (slide.levels[0].width, slide.levels[0].height) == (2220, 2967)


def test_mpp_for_all_and_for_one(tmp_path):
    touch(tmp_path, "a.svs", "b.svs")
    found = find_slides(tmp_path, mpp=0.5, mpp_by_slide={"B.svs": 0.25, "nobody": 1.0}, backend="openslide")
    assert [(s.mpp, s.backend) for s in found] == [(0.5, "openslide"), (0.25, "openslide")]
    for arguments, words in (
        ({"mpp": 0.0}, "--slide-mpp must be between 0.05 and 100 um/px"),
        ({"mpp": 40}, "--slide-mpp is in um/px; got 40, which is a magnification"),
    ):
        with pytest.raises(ValueError, match=words):
            find_slides(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", "does not exist"),
        ("file.svs", "is a file. Give its folder"),
        ("s.zarr", "is one slide. Give its folder"),
        ("empty", "holds no slide: looked"),
        ("two", r"'a': .*x.a\.svs and .*y.a\.ome\.tif\nrename"),
    ],
)
def test_folders_without_slides_or_with_two_of_one_name(tmp_path, name, words):
    touch(tmp_path, "file.svs", "empty/notes.txt", "s.zarr/0", "two/x/a.svs", "two/y/a.ome.tif", "two/y/b.svs")
    with pytest.raises(ValueError, match=words):
        find_slides(tmp_path / name)


def test_names_in_tables():
    cases = {"a.1": "a.1", "a.1.svs": "a.1", "x/y/a.1.ome.tif": "a.1", "C:\\s\\a.1.tif": "a.1", "B.svs": "B", "b": "b"}
    cases |= {"case.svs": "Case", "CASE": "Case", "c": None, "": None, "a": None, "a.1.ome": "a.1", "case.OME": "Case"}
    names = SlideNames({"a.1", "B", "b", "Case"})
    assert {name: names.match(name) for name in cases} == cases
    assert SlideNames({"x", "y"}).match("X") == "x"
    assert SlideNames({"ab", "AB"}).match("aB") is None
    # Cells of tables lose blanks at their ends, and a run with a file "S1 .svs" could not be resumed.
    assert [SlideNames({name}).match(name.strip()) for name in ("S1 ", "train/S1 ")] == ["S1 ", "train/S1 "]
    assert SlideNames({"S1 ", "S1"}).match("S1") == "S1"
    composed, decomposed = "M\u00fcller", "Mu\u0308ller"  # the latter of files from a Mac
    assert SlideNames({decomposed}).match(f"{composed}.svs") == decomposed
    assert SlideNames({composed}).match(decomposed) == composed
    assert slide_stem("x.ome.zarr") == slide_stem("x.SVS") == slide_stem("x") == "x"


def test_odd_files_cost_themselves_only(tmp_path, monkeypatch):
    touch(tmp_path, "ok.svs", "locked/s.svs")
    for name in (b"caf\xe9.svs", b"two\nlines.svs"):
        os.close(os.open(os.fsencode(tmp_path) + b"/" + name, os.O_CREAT, 0o644))
    for pipe in ("pipe.svs", "series.dcm", "other.vms"):
        os.mkfifo(tmp_path / pipe)
    (tmp_path / "gone.dcm").symlink_to(tmp_path / "nowhere.dcm")
    scandir = os.scandir

    def locked(path):  # root may list everything
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    specs = {spec.slide_id: spec for spec in find_slides(tmp_path)}
    faults = dict.fromkeys(("pipe", "series", "other"), "pipe, socket or device") | {
        "caf\\xe9": "must be UTF-8",
        "two\\x0alines": "without control characters",
        "gone": "a link that leads nowhere",
        "locked/": "cannot be listed: Permission denied",
    }
    assert specs.keys() == {"ok", *faults}
    for slide_id, words in faults.items():
        with pytest.raises(SlideError, match=words) as error:
            specs[slide_id].open()
        str(error.value).encode()
