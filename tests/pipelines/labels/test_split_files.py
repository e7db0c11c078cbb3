"""Split files as CLAM, nnU-Net and this program write them, and every fault of one by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.labels.folds import read_split_file
from pipelines.labels.splits import Splits

PATIENT = {"1": "p", "2": "q", "c": "r", "d": "r", "e": "s"}
SPLIT = {"1": "train", "2": "val", "c": "train", "d": "train", "e": "test"}


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


# pandas writes a column of numbers with gaps as floats
CLAM = ",train,val,test\n0,1.0,2.0,e\n1,c,,\n2,d,,\n"
CLAM_BOOL = ",train,val,test\n1,True,False,False\nc.svs,True,False,False\nd,True,False,False\n2,False,True,False\n"
CLAM_BOOL += "e,False,False,True\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("splits_0.csv", CLAM),
        ("splits_0_bool.csv", CLAM_BOOL),
        ("own.csv", "slide;split\n1;train\n2;validation\nc;train\nd;train\ne;test\n".replace(";", ",")),
        ("splits_final.json", json.dumps([{"train": ["1", "c", "d"], "val": ["2"], "test": ["e"]}])),
    ],
)
def test_each_kind_says_the_same(tmp_path: Path, name: str, text: str) -> None:
    assert read_split_file(written(tmp_path, name, text), PATIENT) == Splits(SPLIT, PATIENT)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("text", [CLAM, CLAM_BOOL, "slide,split\n1,train\n2,val\nc,train\nd,train\ne,test\n"])
def test_line_ends_and_separators_of_other_programs(tmp_path: Path, newline: str, delimiter: str, text: str) -> None:
    """Line ends of a classic Mac were once a traceback, and a semicolon the name of a column."""
    path = tmp_path / "splits.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.replace(",", delimiter).replace("\n", newline).encode())
    assert read_split_file(path, PATIENT).split == SPLIT


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("f.csv", b"", "is empty"),
        ("f.csv", b'train,val\n"a,b\n', "a double quote"),
        ("f.json", b"[" * 100_000, "is not JSON"),
    ],
)
def test_a_damaged_split_file_is_named(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} .*{complaint}"):
        read_split_file(tmp_path / name, PATIENT)


def test_the_file_of_a_run_is_one(tmp_path: Path) -> None:
    splits = Splits(SPLIT, PATIENT, site=dict.fromkeys(SPLIT, "x"))
    splits.save(tmp_path / "splits.csv")
    assert Splits.load(tmp_path / "splits.csv") == splits
    assert read_split_file(tmp_path / "splits.csv", PATIENT).split == SPLIT


def test_a_fold_of_nnunet(tmp_path: Path) -> None:
    folds = [{"train": ["a"], "val": ["b"]}, {"train": ["b"], "val": ["a"]}]
    path = written(tmp_path, "splits_final.json", json.dumps(folds))
    patient = {"a": "a", "b": "b"}
    assert read_split_file(path, patient, fold=1).split == {"a": "val", "b": "train"}
    with pytest.raises(ValueError, match="has 2 folds: say which with --fold 0 to --fold 1"):
        read_split_file(path, patient)
    with pytest.raises(ValueError, match="has 2 folds, numbered from 0; got --fold 2"):
        read_split_file(path, patient, fold=2)


def test_all_faults_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "splits_0.csv", ",train,val,test\n0,1,1,\n1,c,ghost,lost\n2,d,,\n3,,c2,\n")
    with pytest.raises(ValueError, match=r"--splits .*splits_0\.csv") as caught:
        read_split_file(path, PATIENT | {"c2": "r"}, slides=["lost"])
    message = str(caught.value)
    assert "slide '1' is in train and in val; keep one" in message
    assert "slides that are not there: ghost; take them out" in message  # lost is there, but cannot be used
    assert "slides that it does not name: 2, e; put each into a split" in message
    assert "patient 'r' is on two sides (c in train, c2 in val, d in train)" in message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f.json", "{", "is not JSON"),
        ("f.json", '{"train": []}', "a list of folds"),
        ("f.json", '[{"train": ["1"]}]', "a list of folds"),
        ("f.csv", "slide,split\n1,trian\n", "line 2: a split is train, val or test; got 'trian'"),
        ("f.csv", ",train,val,test\n1,True,True,False\n", "line 2: slide '1' is in 2 splits"),
        ("f.csv", "train,val\nTrue,False\n", "names the slide in another column"),
        ("f.csv", "image,label\n1,2\n", "lacks a column"),
        ("f.csv", ",val,train\n0,1,\n1,2,\n2,c,\n3,d,\n4,e,\n", "no slide is in train"),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_split_file(written(tmp_path, name, text), PATIENT)


def test_a_fold_of_a_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--fold 1 chooses one of the folds of a \.json file"):
        read_split_file(written(tmp_path, "splits_0.csv", CLAM), PATIENT, fold=1)
