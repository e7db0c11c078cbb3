"""Split files as CLAM, nnU-Net and this program write them, and every fault of one by name."""

import csv
import json

import pytest

from pipelines.labels.folds import read_split_file
from pipelines.labels.splits import Splits

PATIENT = {"1": "p", "2": "q", "c": "r", "d": "r", "e": "s"}
SPLIT = {"1": "train", "2": "val", "c": "train", "d": "train", "e": "test"}


def written(folder, name, text):
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
def test_each_kind_says_the_same(tmp_path, name, text):
    path, unusable = written(tmp_path, name, text), {"1"}
    assert read_split_file(path, PATIENT) == SPLIT
    without = {slide: split for slide, split in SPLIT.items() if slide not in unusable}
    assert read_split_file(path, {slide: PATIENT[slide] for slide in without}, slides=unusable) == without


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("text", [CLAM, CLAM_BOOL, "slide,split\n1,train\n2,val\nc,train\nd,train\ne,test\n"])
def test_line_ends_and_separators_of_other_programs(tmp_path, newline, delimiter, text):
    """Line ends of a classic Mac were once a traceback, and a semicolon the name of a column."""
    path = tmp_path / "splits.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.replace(",", delimiter).replace("\n", newline).encode())
    assert read_split_file(path, PATIENT) == SPLIT


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("f.csv", "", r"f\.csv .*is empty"),
        ("f.csv", 'train,val\n"a,b\n', r"f\.csv .*a double quote"),
        ("f.json", "[" * 100_000, r"f\.json .*is not JSON"),
        ("f.json", "{", "is not JSON"),
        ("f.json", '{"train": []}', "a list of folds"),
        ("f.json", '[{"train": ["1"]}]', "a list of folds"),
        ("f.csv", "slide,split\n1,trian\n", "line 2: a split is train, val or test; got 'trian'"),
        ("f.csv", ",train,val,test\n1,True,True,False\n", "line 2: slide '1' is in 2 splits"),
        ("f.csv", "train,val\nTrue,False\n", "names the slide in another column"),
        ("f.csv", "image,label\n1,2\n", "lacks a column"),
        ("f.csv", ",val,train\n0,1,\n1,2,\n2,c,\n3,d,\n4,e,\n", "no slide is in train"),
    ],
    ids=range(11),
)
def test_damaged_files_and_files_of_other_kinds_are_named(tmp_path, name, text, words):
    with pytest.raises(ValueError, match=words):
        read_split_file(written(tmp_path, name, text), PATIENT)


def test_the_file_of_a_run_with_sites_is_one(tmp_path):
    path = tmp_path / "splits.csv"
    Splits(SPLIT, PATIENT, site=dict.fromkeys(SPLIT, "x")).save(path)
    assert {row["site"] for row in csv.DictReader(path.read_text().splitlines())} == {"x"}
    assert read_split_file(path, PATIENT) == SPLIT


def test_a_fold_of_nnunet(tmp_path):
    folds = [{"train": ["a"], "val": ["b"]}, {"train": ["b"], "val": ["a"]}]
    path, patient = written(tmp_path, "splits_final.json", json.dumps(folds)), {"a": "a", "b": "b"}
    assert read_split_file(path, patient, fold=1) == {"a": "val", "b": "train"}
    for fold, words in ((None, "say which with --fold 0 to --fold 1"), (2, "numbered from 0; got --fold 2")):
        with pytest.raises(ValueError, match=f"has 2 folds.*{words}"):
            read_split_file(path, patient, fold=fold)
    with pytest.raises(ValueError, match=r"--fold 1 chooses one of the folds of a \.json file"):
        read_split_file(written(tmp_path, "splits_0.csv", CLAM), PATIENT, fold=1)


def test_all_faults_at_once(tmp_path):
    path = written(tmp_path, "splits_0.csv", ",train,val,test\n0,1,1,\n1,c,ghost,lost\n2,d,,\n3,,c2,\n")
    with pytest.raises(ValueError, match=r"split file .*splits_0\.csv") as caught:
        read_split_file(path, PATIENT | {"c2": "r"}, slides=["lost"])
    for words in (
        "slide '1' is in train and in val; keep one",
        "slides that are not there: ghost; take them out",  # lost is there, but cannot be used
        "slides that it does not name: 2, e; put each into a split",
        "patient 'r' is on two sides (c in train, c2 in val, d in train)",
    ):
        assert words in str(caught.value)
