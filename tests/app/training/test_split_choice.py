"""The split that a run takes: what was asked for, then what its folder has, and no third thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.settings.run import DataSettings, RunConfig, SplitSettings
from app.training.run_folder import RunFolder
from app.training.split_choice import choose_splits
from pipelines.labels.slide_labels import SlideLabels
from pipelines.labels.splits import Splits

SLIDES = [f"s{i}" for i in range(12)]
LABELS = {slide: i % 2 for i, slide in enumerate(SLIDES)}


def chosen(
    folder: Path,
    said: list[str] | None = None,
    given: dict[str, str] | None = None,
    patient: dict[str, str] | None = None,
    **split: Any,
) -> Splits:
    site = {slide: f"site{i // 3}" for i, slide in enumerate(SLIDES)}
    patient = {s: s for s in SLIDES} if patient is None else patient
    truth = SlideLabels(("a", "b"), LABELS, patient, "here", ("unlabelled",), site=site)
    folder.mkdir(exist_ok=True)
    config = RunConfig(DataSettings(folder), split=SplitSettings(**split), out=folder)
    told = (said if said is not None else []).append
    return choose_splits(config, RunFolder(folder), truth, SLIDES, LABELS, given or {}, told)


def test_folds_and_sites_are_told_and_saved(tmp_path: Path) -> None:
    said: list[str] = []
    runs = [chosen(tmp_path / str(k), said, folds=4, fold=k, split_by="site") for k in range(4)]
    assert sorted(slide for run in runs for slide in run.slides("val")) == sorted(SLIDES)
    assert said[0].endswith("patients in more than one split: 0; sites in more than one split: 0")
    assert Splits.load(tmp_path / "0" / "splits.csv") == runs[0]
    chosen(tmp_path / "by patient", said, folds=4, fold=1)
    assert "sites in more than one split: 2" in said[-1]


def test_unknown_patients_are_said_and_saved(tmp_path: Path) -> None:
    said: list[str] = []
    none_known = chosen(tmp_path / "none", said, patient={})
    assert "patients unknown: slides are split one by one" in said[-1]
    assert "in more than one split: 0; sites" not in said[-1]
    assert Splits.load(tmp_path / "none" / "splits.csv").unknown == none_known.unknown == frozenset(SLIDES)
    chosen(tmp_path / "some", said, patient=dict.fromkeys(SLIDES[:2], "p"))
    assert "patients in more than one split: 0; patients of 10 of 12 slides unknown: these are split one by" in said[-1]


def test_slides_of_one_patient_share_a_split(tmp_path: Path) -> None:
    for seed in range(5):
        folder = tmp_path / str(seed)
        splits = chosen(folder, patient={slide: f"p{i // 2}" for i, slide in enumerate(SLIDES)}, validation=0.3)
        assert not splits.patient_overlap()
        assert all(splits.split[a] == splits.split[b] for a, b in zip(SLIDES[::2], SLIDES[1::2], strict=True))


def test_a_folder_with_another_split_is_refused(tmp_path: Path) -> None:
    first = chosen(tmp_path, folds=3, fold=0)
    assert chosen(tmp_path, folds=3, fold=0) == first
    with pytest.raises(ValueError, match=r"splits\.csv holds another split than is asked for"):
        chosen(tmp_path, folds=3, fold=1)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()  # resumed: its settings were compared before
    assert chosen(tmp_path, folds=3, fold=0).split == first.split


def test_a_file_decides_alone(tmp_path: Path) -> None:
    lines = [f"{slide},{'val' if i < 2 else 'train'}" for i, slide in enumerate(SLIDES)]
    file = tmp_path / "own.csv"
    file.write_text("\n".join(["slide,split", *lines, "unlabelled,test"]))
    assert chosen(tmp_path / "run", splits=file).slides("val") == ("s0", "s1")
    with pytest.raises(ValueError, match="folders called like splits, train, and --splits"):
        chosen(tmp_path / "other", given=dict.fromkeys(SLIDES, "train"), splits=file)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"folds": 1}, "--folds is at least 2; got 1"),
        ({"folds": 5}, "--folds 5 needs --fold 0 to --fold 4; got None"),
        ({"folds": 5, "fold": 5}, "--folds 5 needs --fold 0 to --fold 4; got 5"),
        ({"fold": 1}, "--fold 1 needs --folds, or --splits FILE.json"),
        ({"splits": Path("f"), "split_by": "site"}, "--splits FILE decides alone"),
        ({"patient_pattern": "("}, "--patient-pattern is a regular expression"),
        ({"folds": 5, "fold": 0, "validation": 0.3}, "--folds says what validates: leave out --validation 0.3"),
    ],
)
def test_settings_that_contradict_each_other(split: dict[str, Any], message: str) -> None:
    assert [fault for fault in SplitSettings(**split).validate() if message in fault]
