"""Tables as people and spreadsheet programs write them, and cells of ours that a spreadsheet would run."""

import csv
import io
import os
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.pages.run_files import _rows
from app.training.metrics_log import MetricsLog
from app.training.run_folder import RunFolder
from app.training.validation import Scores
from pipelines.catalog.table import ALIASES, FailedSlides, as_text, listed, original, read_rows, read_table, write_rows
from pipelines.labels.folds import read_split_file
from pipelines.labels.splits import Splits
from pipelines.slides.slide import printable


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_separators_marks_and_line_ends(tmp_path, delimiter, encoding, newline):
    lines = [["Slide", "other", " LABEL "], ["a", "1", " bösartig "], ["", "", ""], [f'"b{delimiter}c"', "2", "x"]]
    text = newline.join(["", *(delimiter.join(line) for line in lines), ""])
    table = read_table(write(tmp_path / "t.csv", text, encoding), ("slide", "label"))
    assert table.roles == {"slide", "label"}
    assert [(r.line, r["slide"], r["label"], r["patient"]) for r in table.rows] == [
        (3, "a", "bösartig", ""),
        (5, printable(f"b{delimiter}c"), "x", ""),
    ]


def test_every_name_of_a_column_is_known_and_the_first_counts(tmp_path):
    for role, names in ALIASES.items():
        for name in names:
            columns = [name] if role == "slide" else ["slide", name.upper()]
            text = ",".join(columns) + "\n" + ",".join("v" * len(columns)) + "\n"
            assert read_table(write(tmp_path / "t.csv", text), (role,)).rows[0][role] == "v"
    table = read_table(write(tmp_path / "t.csv", "type,image,label,slide\nt,i,l,s\n"), ("slide", "label"))
    assert (table.rows[0]["slide"], table.rows[0]["label"]) == ("s", "l")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", r"t\.csv must hold a table with a header line; it is empty"),
        (b"\n \n", "it is empty"),
        (b"slide,label\n", r"must name at least one slide; it has a header \(slide, label\)"),
        (b"name;grade\na;1\n", r"lacks a column \(slide: slide or slide_id or image or filename; label: .*name, grade"),
        (b"slide,label\na,1,2\nb,1\n", "as many values as the header, 2; line 2 has 3"),
        (b"slide,label\n\xff\xfa,1\n", r"CSV text file in UTF-8; byte 12, in line 2, is not"),
        ("slide,label\na,1\nbösartig,1\n".encode("latin-1"), r"UTF-8; byte 17, in line 3, is not. Save it as UTF-8"),
        (b"slide,label\na,1\nb\0,1\n", "line 3 has a NUL"),
        ("slide,label\na,1\n".encode("utf-16-le"), "line 1 has a NUL"),
        (b'slide,label\na,1\nb,"1\nc,2\nd,3\n', r"line 3: a double quote \(\"\) is not closed"),
        (b'slide,label\na,1\nb,"1\nc,2\nd,"3\n', r"line 3: a double quote"),
        (b'slide,label\na,1\n"b,1\nc",2\n', r"line 3: a double quote"),
        (b'slide,label\na,"1"st\n', r"line 2: a double quote .* stands within a value"),
        (b'slide,label\na,1\nb,"' + b"1\n" * 100_000, r"line 3: a double quote"),
        (b'"slide,label\na,1\n', r"line 1: a double quote"),
    ],
)
def test_faults(tmp_path, content, complaint):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        read_table(tmp_path / "t.csv", ("slide", "label"))


def test_no_file_a_folder_and_a_pipe(tmp_path):
    """A pipe once kept the command waiting for ever."""
    os.mkfifo(tmp_path / "pipe.csv")
    for path, words in (
        (tmp_path / "gone.csv", r"gone\.csv cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "pipe.csv", "must be a file: it is read more than once"),
    ):
        with pytest.raises(ValueError, match=words):
            read_table(path, ("slide",))


def test_listed():
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(i) for i in range(10)], most=3) == "0, 1, 2 and 7 more"


def test_a_cell_that_is_not_ours_to_read_may_have_line_breaks(tmp_path):
    """Excel writes remarks of several lines so; a form feed or Unicode's line separator ends no line."""
    text = 'slide,remark,label\na,"two\nlines",1\nb\x0c,x\u2028y,2\n'
    rows = read_table(write(tmp_path / "t.csv", text), ("slide", "label")).rows
    assert [(row.line, row["slide"], row["label"]) for row in rows] == [(2, "a", "1"), (4, "b", "2")]


FORMULAS = ("=1+1", "+cmd|' /C calc'!A0", "-2+SUM(A1)", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''@x", "'-b")
PLAIN = ("slide 1", "a-b", "-TCGA-AA-0001", "+49", "'quoted'", "-0.5", "1e-5", "+3", "-inf", "", "x=1")


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1))
def test_rows_come_back_as_they_were(cells):
    file = io.StringIO(newline="")
    names = [f"c{k}" for k in range(len(cells))]
    write_rows(file, [names, cells])
    file.seek(0)
    assert list(read_rows(file)) == [dict(zip(names, cells, strict=True))]


@pytest.mark.parametrize("cell", [*FORMULAS, *PLAIN, -0.5, 3, None])
def test_a_formula_is_marked_and_what_computes_nothing_stays(cell):
    assert as_text(cell) == ("'" + cell if cell in FORMULAS else cell)
    assert not isinstance(cell, str) or original(as_text(cell)) == cell
    assert original("'-TCGA-1") == "-TCGA-1", "marks of older files stood before every sign"


def test_every_file_of_a_run(tmp_path):
    name = "=cmd|' /C calc'!A0"
    folder = RunFolder(tmp_path)
    failed = FailedSlides(folder.failed_slides)
    failed.add(name, "open", "@SUM(1)")
    failed.remove(["another"])
    assert failed.rows() == [(name, "open", "@SUM(1)")]
    Splits({name: "train", "b": "val"}, {name: "+patient", "b": "b"}, {name: 0, "b": 1}).save(folder.splits)
    assert read_split_file(folder.splits, {name: "p", "b": "b"})[name] == "train"
    with closing(MetricsLog(folder, 0, (name, "-b"))) as log:
        log.validation(1, Scores({"loss": -0.5}, [{"slide": name, "label": "-b", "tiles": 1, "score_-b": -0.5}]))
    assert _rows(folder.predictions)[0] == {"slide": name, "label": "-b", "tiles": "1", "score_-b": "-0.5"}
    cells = {}
    for path in (folder.failed_slides, folder.splits, folder.predictions, folder.validation):
        with path.open(newline="") as file:
            cells[path] = [cell for row in csv.reader(file) for cell in row]
        assert not [cell for cell in cells[path] if cell[:1] in ("=", "@")]
    assert "-b" in cells[folder.predictions]
    assert "-0.5" in cells[folder.validation]
