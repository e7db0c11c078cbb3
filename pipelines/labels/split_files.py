"""Files that fix the splits: a table of slide and split, CLAM's columns or booleans, nnU-Net's list of folds.

Takes such a file and the patient of every slide; gives ``Splits``. Slides are named as in a table of labels. The file
decides for all slides of the run or for none: what it says of slides that are not there, and what it does not say of
those that are, is refused by name.

    splits_0.csv         ,train,val,test        a row is a number and a slide of each split (CLAM)
    splits_0_bool.csv    ,train,val,test        a row is a slide and True in the column of its split (CLAM)
    splits_final.json    [{"train": [...], "val": [...]}, ...]      a fold each (nnU-Net)
    splits.csv           slide,split            what a run leaves
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.catalog.catalog import SlideNames
from pipelines.catalog.table import listed, original, read_cells, read_table, read_text, shown
from pipelines.labels.splits import NAMES, SPELLINGS, Splits, leakage_errors
from pipelines.slides.slide import printable

TRUTHS = {"true": True, "1": True, "false": False, "0": False, "": False}
"""How pandas and spreadsheet programs write a boolean."""


def read_split_file(
    path: Path, patient: Mapping[str, str], *, slides: Collection[str] = (), fold: int | None = None
) -> Splits:
    """Return the splits of the slides of ``patient`` that a file of one of the four kinds fixes.

    Args:
        path: a file whose name ends in ``.json`` is nnU-Net's; others are tables, distinguished by their columns.
        patient: patient of every slide of the run.
        slides: of the folder; the file may name those of them that the run cannot use.
        fold: of nnU-Net's list, from 0; may be left out where there is one.

    Raises:
        ValueError: the file cannot be read, is of none of these kinds, or has faults, all of them named: a slide in
            two splits, slides that are not there or have no split, a patient on two sides, nothing to train on.
    """
    named = list(_of_folds(path, fold) if path.suffix.lower() == ".json" else _of_table(path, fold))
    names, known = SlideNames(patient), SlideNames({*slides, *patient})
    split: dict[str, str] = {}
    faults: list[str] = []
    unknown: dict[str, None] = {}
    for name, part in named:
        slide = names.match(name) or names.match(name.removesuffix(".0"))  # a column with gaps is float to pandas
        if slide is None:
            if known.match(name) is None:
                unknown[name] = None
        elif split.setdefault(slide, part) != part:
            faults.append(f"slide {slide!r} is in {split[slide]} and in {part}; keep one")
    missing = sorted(set(patient) - set(split))
    if unknown:
        faults.append(f"names of slides that are not there: {listed([*unknown])}; take them out, or add the slides")
    if missing:
        faults.append(f"slides that it does not name: {listed(missing)}; put each into a split")
    faults += leakage_errors(split, patient)
    if not faults and "train" not in split.values():
        faults.append("no slide is in train")
    if faults:
        raise ValueError(f"--splits {path}: {shown(faults)}")
    return Splits(split, dict(patient))


def _of_folds(path: Path, fold: int | None) -> Iterator[tuple[str, str]]:
    """Slide and split of each entry of one fold of nnU-Net's list."""
    try:
        folds: Any = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as fault:
        raise ValueError(f"--splits {path} is not JSON: {fault}") from fault
    if not isinstance(folds, list) or not folds or not all(_is_fold(each) for each in folds):
        raise ValueError(
            f'--splits {path}: a .json file is a list of folds, as nnU-Net writes it: [{{"train": [slides], "val": '
            "[slides]}, ...]"
        )
    if fold is None and len(folds) > 1:
        raise ValueError(f"--splits {path} has {len(folds)} folds: say which with --fold 0 to --fold {len(folds) - 1}")
    if not 0 <= (fold or 0) < len(folds):
        raise ValueError(f"--splits {path} has {len(folds)} folds, numbered from 0; got --fold {fold}")
    for part, slides in folds[fold or 0].items():
        for slide in slides:
            yield printable(slide), part


def _is_fold(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"train", "val"} <= value.keys() <= set(NAMES)
        and all(isinstance(slides, list) and all(isinstance(s, str) for s in slides) for slides in value.values())
    )


def _of_table(path: Path, fold: int | None) -> Iterator[tuple[str, str]]:
    """Slide and split of each entry of a table of any of the three kinds."""
    if fold is not None:
        raise ValueError(f"--fold {fold} chooses one of the folds of a .json file; {path} has one split: leave it out")
    rows = [(line, [printable(cell.strip()) for cell in cells]) for line, cells in read_cells(path)]
    header = [name.casefold() for name in rows[0][1]]
    columns = {k: SPELLINGS[name] for k, name in enumerate(header) if name in SPELLINGS}
    if "train" not in columns.values() or "split" in header:
        yield from _of_lines(path)
        return
    body = [(line, row + [""] * (len(header) - len(row))) for line, row in rows[1:] if any(row)]
    cells = {row[k].casefold() for _, row in body for k in columns}
    if cells <= TRUTHS.keys() and cells & {"true", "false"}:
        first = min(set(range(len(header))) - columns.keys(), default=None)
        if first is None:
            raise ValueError(f"--splits {path}: a table of booleans names the slide in another column; got {header}")
        for line, row in body:
            parts = [part for k, part in columns.items() if TRUTHS[row[k].casefold()]]
            if len(parts) != 1:
                raise ValueError(
                    f"--splits {path} line {line}: slide {row[first]!r} is in {len(parts)} splits, not in one"
                )
            yield original(row[first]), parts[0]
        return
    for _, row in body:
        for k, part in columns.items():
            if row[k]:
                yield original(row[k]), part


def _of_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Slide and split of each line of a table with these two columns."""
    for row in read_table(path, ("slide", "split")).rows:
        part = SPELLINGS.get(row["split"].casefold())
        if part is None:
            raise ValueError(f"--splits {path} line {row.line}: a split is train, val or test; got {row['split']!r}")
        yield original(row["slide"]), part
