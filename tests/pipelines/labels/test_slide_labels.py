"""The four ways to label slides, their order, and every fault of a table."""

import time

import pytest

from pipelines.catalog.catalog import SlideSpec, find_slides
from pipelines.labels.class_names import ClassMap
from pipelines.labels.slide_labels import find_labels, read_mpp, read_mpp_column
from pipelines.labels.splits import split_folders
from tests.helpers.drawings import annotations_in, box, write_geojson


def slides(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return find_slides(root)


def from_table(tmp_path, text, *names, class_map=()):
    specs = slides(tmp_path / "slides", *(names or ("a.svs", "b.svs", "c.svs")))
    (tmp_path / "t.csv").write_text(text)
    joined = ClassMap.parse(tuple(class_map))
    return find_labels(tmp_path / "slides", specs, labels=tmp_path / "t.csv", class_map=joined)


def test_a_table(tmp_path):
    found = from_table(tmp_path, "filename,class,case_id\na.svs,tumour,p1\nslides/b.svs,normal,\nC,tumour,p1\n")
    assert found.classes == ("normal", "tumour")
    assert found.label == {"a": 1, "b": 0, "c": 1}
    assert found.patient == {"a": "p1", "c": "p1"}
    assert found.source == str(tmp_path / "t.csv")
    assert found.unlabelled == ()


@pytest.mark.parametrize(
    ("text", "names", "classes"),
    [
        ("slide,label\na,10\nb,9\nc,0\n", "abc", ("0", "9", "10")),  # numbers are sorted as numbers
        ("slide,label\na,x\na.svs,x\nb,y\nc,y\n", "abc", ("x", "y")),  # the same line twice is one
        (
            "slide,label\na,<1%\nb,>1%\nc,grade 1\nd,grade_1\ne,1e1\nf,10\n",
            "abcdef",
            {"<1%", ">1%", "grade 1", "grade_1", "1e1", "10"},
        ),
    ],
)
def test_classes_of_a_table(tmp_path, text, names, classes):
    found = from_table(tmp_path, text, *(f"{name}.svs" for name in names))
    assert classes in (found.classes, set(found.classes))
    assert found.label.keys() == set(names)


def test_what_does_not_match_is_left_out_and_said(tmp_path, caplog):
    found = from_table(tmp_path, "slide,label\na,x\nb,y\nnobody,y\n,y\n")
    assert set(found.label) == {"a", "b"}
    assert found.unlabelled == ("c",)
    assert "1 slide: c" in caplog.text
    assert "for slides that are not there: 2 labels: nobody, (line 5: no slide)" in caplog.text


@pytest.mark.parametrize("missing", ["", "nan", "NaN", "NA", "n/a", "None", "null", "-", "<NA>", " NA "])
def test_missing_values_are_no_class_no_patient_and_no_mpp(tmp_path, missing, caplog):
    """A table written by pandas or R once made the classes nan and NA of its gaps, and one patient of all of them."""
    text = f"slide,label,patient,mpp\na,x,{missing},{missing}\nb,y,{missing},0.5\nc,{missing},p,\n"
    found = from_table(tmp_path, text)
    assert found.classes == ("x", "y")
    assert not found.patient
    assert found.unlabelled == ("c",)
    assert "missing value" in caplog.text
    assert read_mpp_column(tmp_path / "t.csv") == {"b": 0.5}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0", "0.0"),
        ("1", "01"),
        ("0,5", "0.50"),
        ("Tumor", "tumor"),
        ("grade 1", "Grade  1"),
        ("caf\u00e9", "cafe\u0301"),
        ("Stra\u00dfe", "STRASSE"),
    ],
)
def test_a_class_written_in_two_ways_is_refused_until_it_is_joined(tmp_path, one, other):
    text = f"slide;label\na;{one}\nb;{other}\nc;x\n"
    first, second = sorted([one, other])
    with pytest.raises(ValueError, match="written in several ways") as error:
        from_table(tmp_path, text)
    assert all(word in str(error.value) for word in (repr(one), repr(other), f'--class-map "{second}={first}"'))
    found = from_table(tmp_path, text, class_map=[f"{second}={first}"])
    assert found.classes == (first, "x")
    assert found.label == {"a": 0, "b": 0, "c": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slide,label,site\na,x,UKE\nb,y,uke\n", "sites written in several ways: 'UKE' and 'uke'"),
        ("slide,label,patient\na,x,P1\nb,y,p1\n", "patients written in several ways: 'P1' and 'p1'"),
        ("slide,label,patient\na,x,tcga-aa-0001\nTCGA-AA-0001-01Z,y,\n", "'TCGA-AA-0001' and 'tcga-aa-0001'"),
        ("slide,label,patient\na,x,1.1\nb,y,1.10\n", None),
    ],
)
def test_a_patient_or_site_written_in_two_ways_is_refused(tmp_path, text, words):
    """Such a patient was two, of which one trained and the other validated."""
    names = "a.svs", "b.svs", "TCGA-AA-0001-01Z.svs"
    if words is None:
        assert from_table(tmp_path, text, *names).patient == {"a": "1.1", "b": "1.10"}
        return
    with pytest.raises(ValueError, match=words):
        from_table(tmp_path, text, *names)


def test_class_folders_and_annotations_are_mapped_and_checked_like_labels(tmp_path):
    specs = slides(tmp_path, "Tumor/a.svs", "tumor/b.svs", "normal/c.svs", "normal/d.svs", "blur/e.svs")
    with pytest.raises(ValueError, match=r"several ways: 'Tumor' and 'tumor'"):
        find_labels(tmp_path, specs)
    found = find_labels(tmp_path, specs, class_map=ClassMap.parse(("tumor=Tumor", "blur=ignore")))
    assert found.classes == ("Tumor", "normal")
    assert found.label == {"a": 0, "b": 0, "c": 1, "d": 1}
    assert found.unlabelled == ("e",)
    write_geojson(tmp_path / "drawn" / "a.geojson", box(0, 0, 5, 5, "Tumor"))
    write_geojson(tmp_path / "drawn" / "b.geojson", box(0, 0, 5, 5, "tumor"))
    with pytest.raises(ValueError, match=r'--class-map "tumor=Tumor"'):
        annotations_in(tmp_path / "drawn", "a", "b")
    assert annotations_in(tmp_path / "drawn", "a", "b", class_map=["tumor=Tumor"]).classes == ("background", "Tumor")


def test_terminal_sequences_in_a_table_are_escaped(tmp_path, caplog):
    text = "slide,label,patient\na,x\x1b[2J,p\x07\nb,y\u202e,q\nc,y\u202e,\x9b31m\nz\x1b]0;t\x07,y,r\n"
    found = from_table(tmp_path, text)
    assert found.classes == ("x\\x1b[2J", "y\\u202e")
    assert found.patient == {"a": "p\\x07", "b": "q", "c": "\\x9b31m"}
    assert "for slides that are not there: 1 label: z\\x1b]0;t\\x07" in caplog.text


@pytest.mark.parametrize(
    ("text", "class_map", "words"),
    [
        ("slide,label\na,nan\nb,\n", [], ["no line gives a class to a slide", "nan"]),
        ("slide,label\na,x\nb,x\nc,x\n", [], ["at least two classes", "all 3 labelled slides of the folder are 'x'"]),
        ("slide,label\na,x\nzz,y\n", [], ["at least two classes are needed; all 1 labelled"]),
        ("slide,label\na,x\nb,y\n", ["y=x"], ["at least two classes are needed"]),
        ("slide,label\na,x\nb,y\nc,\n", ["z=x"], ["--class-map names z, which no label", "classes are x, y. "]),
        ("slide,label\nd,x\ne,y\n", [], ["no line names a slide of the folder", "d, e", "a, b, c"]),
        ("name,label\na,x\n", [], ["lacks a column (slide: slide or slide_id or image or filename)", "name, label"]),
        ("slide,grade\na,x\n", [], ["lacks a column (label: label or class or type)", "slide, grade"]),
        (
            "slide,label,patient\na,x,p\na,y,p\nb,y,q\nc,y,r\nc,y,s\n",
            [],
            ["t.csv: line", "line 3: slide 'a' is 'y' here and 'x' before", "slide 'c' has two patients: r, s"],
        ),
    ],
)
def test_tables_that_do_not_do(tmp_path, text, class_map, words):
    with pytest.raises(ValueError, match=r"\w") as error:
        from_table(tmp_path, text, class_map=class_map)
    assert [word for word in words if word not in str(error.value)] == []


def test_many_contradictions_are_a_short_message(tmp_path):
    names = [f"s{k}.svs" for k in range(1000)]
    text = "".join(f"{name},{label}\n" for name in names for label in "ab")
    with pytest.raises(ValueError, match="slide 's0' is 'b' here and 'a' before; keep one") as error:
        from_table(tmp_path, "slide,label\n" + text, *names)
    assert "and 992 more" in str(error.value)
    assert len(str(error.value)) < 2000


def test_the_order_of_the_four_ways(tmp_path):
    root = tmp_path / "slides"
    specs = slides(root, "x/a.svs", "y/b.svs")
    by_folder = find_labels(root, specs)
    assert (by_folder.classes, by_folder.label, by_folder.patient) == (("x", "y"), {"a": 0, "b": 1}, {})
    write_geojson(root / "annotations" / "a.geojson", box(0, 0, 5, 5, "beside"))
    beside = find_labels(root, specs)
    assert (beside.classes, beside.unlabelled) == (("background", "beside"), ("b",))
    (root / "labels.csv").write_text("slide,label\na,1\nb,2\n")
    assert find_labels(root, specs).classes == ("1", "2")
    write_geojson(tmp_path / "drawn" / "b.geojson", box(0, 0, 5, 5, "given"))
    assert find_labels(root, specs, annotations=tmp_path / "drawn").classes == ("background", "given")
    (tmp_path / "t.csv").write_text("slide,label\na,p\nb,q\n")
    assert find_labels(root, specs, labels=tmp_path / "t.csv").classes == ("p", "q")


@pytest.mark.parametrize(
    "names", ["a.svs b.svs", "x/a.svs y/b.svs c.svs", "x/a.svs x/b.svs", "case1/a.svs case2/b.svs case3/c.svs"]
)
def test_no_labels_says_all_four_ways(tmp_path, names):
    with pytest.raises(ValueError, match="have no labels") as error:
        find_labels(tmp_path / "slides", slides(tmp_path / "slides", *names.split()))
    for way in ("--labels FILE.csv", "--annotations DIR", "labels.csv", "CLASS"):
        assert way in str(error.value)


@pytest.mark.parametrize(
    ("names", "label", "splits"),
    [
        ("x/p1/a.svs x/b.svs y/c.svs z/q/r/d.svs", {"a": "x", "b": "x", "c": "y", "d": "z"}, {}),
        # A folder of pictures with train/ and val/ was once learned as two classes of these names.
        (
            "train/normal/a.png train/tumour/b.png Validation/normal/c.png val/tumour/d.png",
            {"a": "normal", "b": "tumour", "c": "normal", "d": "tumour"},
            {"a": "train", "b": "train", "c": "val", "d": "val"},
        ),
        ("test/a.png test/b.png probe/c.png probe/d.png", {"a": "test", "b": "test", "c": "probe", "d": "probe"}, {}),
    ],
    ids=["deep and uneven", "splits", "one class called like a split"],
)
def test_classes_by_folder(tmp_path, names, label, splits):
    specs = slides(tmp_path, *names.split())
    found = find_labels(tmp_path, specs)
    assert {slide: found.classes[k] for slide, k in found.label.items()} == label
    assert found.classes == tuple(sorted(set(label.values())))
    assert split_folders(tmp_path, specs) == splits


@pytest.mark.parametrize("split", ["", "train/"])
def test_folders_that_are_taken_for_no_class_are_named(tmp_path, caplog, split):
    specs = slides(tmp_path, *(f"{split}{name}.png" for name in ("x/a", "y/b", "masks/c", "Annotations/d")))
    assert find_labels(tmp_path, specs).classes == ("x", "y")
    assert "hold annotations: 2 folders: Annotations, masks" in caplog.text


@pytest.mark.parametrize("inner", ["", "x/"])
def test_splits_without_classes_say_what_to_do(tmp_path, inner):
    specs = slides(tmp_path, *(f"{split}/{inner}{split}{k}.png" for split in ("train", "valid") for k in range(2)))
    with pytest.raises(ValueError, match=r"train, val are taken for splits, not for classes: make class folders"):
        find_labels(tmp_path, specs)
    (tmp_path / "labels.csv").write_text("slide,label\ntrain0,a\ntrain1,b\nvalid0,a\n")
    assert find_labels(tmp_path, specs).classes == ("a", "b")


def test_splits_beside_other_folders_are_refused(tmp_path):
    specs = slides(tmp_path, "train/a.png", "val/b.png", "extra/c.png", "d.png")
    with pytest.raises(ValueError, match=r"train, val are splits, and there are slides in extra, none, too"):
        find_labels(tmp_path, specs)


def test_mpp_column(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('slide,mpp\na.svs,0.25\nb,\nc,"0,5"\n')
    assert read_mpp_column(path) == {"a.svs": 0.25, "c": 0.5}
    slides(tmp_path / "slides", "a.svs", "b.svs", "c.svs")
    found = find_slides(tmp_path / "slides", mpp=1.0, mpp_by_slide=read_mpp_column(path))
    assert [spec.mpp for spec in found] == [0.25, 1.0, 0.5]
    path.write_text("slide,label\na,x\n")
    assert read_mpp_column(path) == {}
    path.write_text("slide,mpp\na,0.5\na.svs,0.25\n")
    with pytest.raises(ValueError, match=r"slide 'a' has two mpp, 0.5 and 0.25"):
        find_slides(tmp_path / "slides", mpp_by_slide=read_mpp_column(path))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("a,40\nb,0.5\n", r"line 2 \(a\): is in um/px; got 40, which is a magnification: 40x is about 0.25"),
        ("a,0.5\nb,20x\n", r"line 3 \(b\): .*got 20, which is a magnification"),
        ("a,0.25x\nb,\n", "'0.25x' is a magnification"),
        ("a,264.58\nb,\n", "must be between 0.05 and 100 um/px; got 264.58"),
        ("a,fine\nb,0.5\nc,x\n", r"line 2 \(a\): 'fine'\n  line 4 \(c\): 'x'"),
        ("a,0.5\na,0.25\n", r"line 3 \(a\): 0.25 here and 0.5 before"),
    ],
)
def test_what_is_no_um_per_px_is_named(tmp_path, rows, words):
    (tmp_path / "t.csv").write_text("slide,mpp\n" + rows)
    with pytest.raises(ValueError, match=words):
        read_mpp_column(tmp_path / "t.csv")


def test_mpp_is_taken_from_the_table_else_from_the_labels(tmp_path):
    slides(tmp_path, "a.svs", "b.svs")
    table, labels = tmp_path / "mpp.csv", tmp_path / "truth.csv"
    assert read_mpp(tmp_path, None) == {}
    (tmp_path / "labels.csv").write_text("slide,label,mpp\na,x,0.3\nb,y,\n")
    labels.write_text("slide,label,mpp\na,x,0.4\n")
    table.write_text("slide,mpp\nb,0.5\n")
    assert read_mpp(tmp_path, None) == {"a": 0.3}
    assert read_mpp(tmp_path, None, labels) == {"a": 0.4}
    assert read_mpp(tmp_path, table, labels) == {"b": 0.5}
    table.write_text("slide,um\nb,0.5\n")
    with pytest.raises(ValueError, match=r"lacks a column \(mpp: mpp\)"):
        read_mpp(tmp_path, table)


def test_rows_are_read_in_time_in_proportion(tmp_path, caplog):
    """Every row once looked at every slide: 15 s."""
    names = [f"Slide_{k:04}" for k in range(1000)]
    specs = tuple(SlideSpec(name, tmp_path / f"{name}.svs") for name in names)
    lines = [f"{name.lower()}.svs,{k % 2}" for k, name in enumerate(names)]
    lines += [f"case_{k},{k % 3}" for k in range(20_000)]
    (tmp_path / "labels.csv").write_text("slide,label\n" + "\n".join(lines))
    begun_s = time.process_time()
    found = find_labels(tmp_path, specs)
    assert time.process_time() - begun_s < 5
    assert len(found.label) == 1000
    assert "for slides that are not there: 20000 labels: case_0, case_1" in caplog.text


def test_a_table_of_patients_alone_goes_with_annotations_beside_the_slides(tmp_path):
    specs = slides(tmp_path / "slides", "a.svs", "b.svs")
    (tmp_path / "t.csv").write_text("slide,patient\na,p1\nb,p2\n")
    with pytest.raises(ValueError, match=r"lacks a column .label"):
        find_labels(tmp_path / "slides", specs, labels=tmp_path / "t.csv")
    write_geojson(tmp_path / "slides" / "a.geojson", box(0, 0, 9, 9, "tumour"))
    found = find_labels(tmp_path / "slides", specs, labels=tmp_path / "t.csv")
    assert (found.classes, found.patient) == (("background", "tumour"), {"a": "p1"})


def test_a_table_of_patients_alone_goes_with_class_folders(tmp_path):
    """Its um/px were used and its patients were not, so that a patient could be on both sides of the split."""
    specs = slides(tmp_path, "x/a.svs", "x/b.svs", "y/c.svs")
    (tmp_path / "labels.csv").write_text("slide,patient,site\na,p1,s1\nb,,\nc,p1,s2\n")
    found = find_labels(tmp_path, specs)
    assert (found.classes, found.label) == (("x", "y"), {"a": 0, "b": 0, "c": 1})
    assert (found.patient, found.site) == ({"a": "p1", "c": "p1"}, {"a": "s1", "c": "s2"})
