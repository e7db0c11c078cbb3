"""Tables as people and spreadsheet programs write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelines.catalog.table import ALIASES, listed, read_table
from pipelines.slides.slide import printable


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_separators_marks_and_line_ends(tmp_path: Path, delimiter: str, encoding: str, newline: str) -> None:
    lines = [["Slide", "other", " LABEL "], ["a", "1", " bösartig "], ["", "", ""], [f'"b{delimiter}c"', "2", "x"]]
    text = newline.join(["", *(delimiter.join(line) for line in lines), ""])
    table = read_table(write(tmp_path / "t.csv", text, encoding), ("slide", "label"))
    assert table.roles == {"slide", "label"}
    assert [(r.line, r["slide"], r["label"], r["patient"]) for r in table.rows] == [
        (3, "a", "bösartig", ""),
        (5, printable(f"b{delimiter}c"), "x", ""),
    ]


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in ALIASES.items() for name in names])
def test_every_name_of_a_column(tmp_path: Path, role: str, name: str) -> None:
    header = name if role == "slide" else f"slide,{name.upper()}"
    table = read_table(write(tmp_path / "t.csv", f"{header}\nv,v\n" if role != "slide" else f"{header}\nv\n"), (role,))
    assert table.rows[0][role] == "v"


def test_the_first_name_counts(tmp_path: Path) -> None:
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
def test_faults(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        read_table(tmp_path / "t.csv", ("slide", "label"))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.csv cannot be read: No such file"):
        read_table(tmp_path / "gone.csv", ("slide",))
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_table(tmp_path, ("slide",))


def test_listed() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(i) for i in range(10)], most=3) == "0, 1, 2 and 7 more"


def test_a_cell_that_is_not_ours_to_read_may_have_line_breaks(tmp_path: Path) -> None:
    """As Excel writes remarks of several lines; a form feed or Unicode's line separator ends no line."""
    text = 'slide,remark,label\na,"two\nlines",1\nb\x0c,x\u2028y,2\n'
    rows = read_table(write(tmp_path / "t.csv", text), ("slide", "label")).rows
    assert [(row.line, row["slide"], row["label"]) for row in rows] == [(2, "a", "1"), (4, "b", "2")]


def test_a_pipe_is_no_table(tmp_path: Path) -> None:
    """It once kept the command waiting for ever."""
    os.mkfifo(tmp_path / "t.csv")
    with pytest.raises(ValueError, match="must be a file: it is read more than once"):
        read_table(tmp_path / "t.csv", ("slide",))
