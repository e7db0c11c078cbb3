"""Splits by folds of patients, by whole sites, and by files that fix them.

Groups are dealt out so that every part has its share of each class. Slides of one site share its scanner and its stain,
which a model can tell instead of the disease: validated on a site that it was trained on, it scores too well (Howard et
al. 2021, "The impact of site-specific digital histology signatures on deep learning model accuracy and bias"). A file
decides for all slides of the run or for none:

    splits_0.csv         ,train,val,test        a row is a number and a slide of each split (CLAM)
    splits_0_bool.csv    ,train,val,test        a row is a slide and True in the column of its split (CLAM)
    splits_final.json    [{"train": [...], "val": [...]}, ...]      a fold each (nnU-Net)
    splits.csv           slide,split            what a run leaves
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.catalog import SlideNames
from pipelines.catalog.table import listed, original, read_cells, read_table, read_text
from pipelines.labels.splits import NAMES, SPELLINGS, refuse_faults, shuffled, strata_of
from pipelines.slides.slide import printable

logger = logging.getLogger(__name__)


def fold_splits(
    patient: Mapping[str, str],
    label: Mapping[str, int] | None = None,
    site: Mapping[str, str] | None = None,
    *,
    folds: int,
    fold: int,
    test: float = 0.0,
    seed: int,
) -> dict[str, str]:
    """Return the split of every slide by id: one of several folds validates and the others train.

    Patients, or whole sites, are dealt out to a test part and the folds before it is asked which fold validates: over
    the folds every patient that is not in test validates exactly once, and test is the same in all.

    Args:
        patient, label: as for ``make_splits``.
        site: site of every slide, none of which is shared out; None: patients are dealt out one by one.
        fold: that validates, from 0.
        test: fraction of the patients in no fold, at least 0, below 1.

    Raises:
        ValueError: numbers out of range, slides without a site, or fewer groups than parts.
    """
    if not (folds >= 2 and 0 <= fold < folds):
        raise ValueError(f"folds are at least 2, and the one that validates is 0 to {folds - 1}; got {fold} of {folds}")
    names = ["train"] * folds + ["test"]
    names[fold] = "val"
    return _dealt_splits(patient, label, site, names, [(1 - test) / folds] * folds + [test], seed)


def site_splits(
    patient: Mapping[str, str],
    label: Mapping[str, int] | None,
    site: Mapping[str, str],
    *,
    validation: float,
    test: float = 0.0,
    seed: int,
) -> dict[str, str]:
    """Return the split of every slide by id: of whole sites, as near to the asked fractions of patients as they allow.

    Raises:
        ValueError: fractions out of range, slides without a site, or fewer sites than parts.
    """
    shares = [1 - validation - test, validation, test]
    return _dealt_splits(patient, label, site, ["train", "val", "test"], shares, seed)


def _dealt_splits(
    patient: Mapping[str, str],
    label: Mapping[str, int] | None,
    site: Mapping[str, str] | None,
    names: Sequence[str],
    shares: Sequence[float],
    seed: int,
) -> dict[str, str]:
    """Splits by parts of these shares of the patients, each called by one of ``names``; parts of share 0 stay empty."""
    by_class, classes = strata_of(patient, label)
    if not (min(shares) >= 0 and shares[0] > 0):
        raise ValueError(f"fractions are at least 0 and together below 1; got {', '.join(f'{s:g}' for s in shares)}")
    strata = sorted(by_class.items())
    group_of = {who: who for who in classes} if site is None else _joined_sites(patient, site)
    row_of = {group: k for k, group in enumerate(shuffled(set(group_of.values()), seed))}
    sizes = np.zeros((len(row_of), len(strata)), np.int64)
    for column, (_, members) in enumerate(strata):
        for who in members:
            sizes[row_of[group_of[who]], column] += 1
    asked = [k for k, share in enumerate(shares) if share]
    if len(row_of) < len(asked):
        what = "patients" if site is None else "sites (those that share a patient count as one)"
        raise ValueError(
            f"{len(asked)} parts need at least {len(asked)} {what}; got {len(row_of)}: {listed([*row_of])}"
        )
    dealt = assign_groups(sizes, np.array([shares[k] for k in asked]))
    part_of = {who: asked[dealt[row_of[group]]] for who, group in group_of.items()}
    return {slide: names[part_of[who]] for slide, who in patient.items()}


def assign_groups(sizes: NDArray[np.int64], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the part of each group, (n,): large groups first, each where it brings the parts nearest to their shares.

    Minimises the sum of squares of what parts have above or below their share of each class, as StratifiedGroupKFold of
    scikit-learn does, but with shares of any size. With groups of one patient each class is then even among parts of
    one share to one patient, and so are all classes together. No part stays empty.

    Args:
        sizes: (n, classes), patients of each class in each group; of groups of one size the first come first.
        shares: (parts,), above 0.
    """
    wanted = np.outer(shares / shares.sum(), sizes.sum(0))
    held = np.zeros_like(wanted)
    taken = np.zeros(len(shares), np.int64)
    dealt = np.empty(len(sizes), np.int64)
    order = np.lexsort((sizes.argmax(1), -sizes.max(1)))
    for left, group in zip(range(len(order), 0, -1), order.tolist(), strict=True):
        empty = taken == 0
        cost = (held - wanted) @ sizes[group]
        filled = held.sum(1) / shares
        allowed = empty if left <= empty.sum() else np.ones_like(empty)
        best = min(np.flatnonzero(allowed).tolist(), key=lambda k: (round(float(cost[k]), 9), filled[k], k))
        held[best] += sizes[group]
        taken[best] += 1
        dealt[group] = best
    return dealt


def _joined_sites(patient: Mapping[str, str], site: Mapping[str, str]) -> dict[str, str]:
    """The site of every patient; sites that share one are joined under the first of their names."""
    without = sorted(slide for slide in patient if not site.get(slide))
    if without:
        raise ValueError(
            f"--split-by site needs a site for every slide, column site of the labels; without: {listed(without)}"
        )
    head = {name: name for name in site.values()}

    def first(name: str) -> str:
        while head[name] != name:
            name = head[name]
        return name

    of_patient: dict[str, str] = {}
    for slide, who in sorted(patient.items()):
        a, b = sorted((first(site[slide]), first(of_patient.setdefault(who, site[slide]))))
        head[b] = a
    return {who: first(name) for who, name in of_patient.items()}


TRUTHS = {"true": True, "1": True, "false": False, "0": False, "": False}
"""How pandas and spreadsheet programs write a boolean."""


def read_split_file(
    path: Path,
    patient: Mapping[str, str],
    *,
    slides: Collection[str] = (),
    fold: int | None = None,
    begun: bool | None = None,
) -> dict[str, str]:
    """Return the split by id, of the slides of ``patient``, that a file of one of the four kinds fixes.

    Args:
        path: a file whose name ends in ``.json`` is nnU-Net's; others are tables, distinguished by their columns.
        patient: patient of every slide of the run.
        slides: of the folder; the file may name those of them that the run cannot use.
        fold: of nnU-Net's list, from 0; may be left out where there is one.
        begun: of the file in a run folder, whether the run has a checkpoint, and thus trains on no other slides than
            before. Slides that only this file names are logged. None: a file of the user.

    Raises:
        ValueError: the file cannot be read, is of none of these kinds, or has faults, all of them named: an unknown
            split, a slide in two splits, slides that are not there or have no split (they are not guessed into one:
            scores would no longer be those of the file's test set), a patient on two sides, nothing to train on.
    """
    entries = _of_folds(path, fold) if path.suffix.lower() == ".json" else _of_table(path, fold)
    names = SlideNames({*slides, *patient})
    split: dict[str, str] = {}
    faults: list[str] = []
    unknown: dict[str, None] = {}
    missing = set(patient)
    for line, name, written in entries:
        slide = names.match(name) or names.match(name.removesuffix(".0"))  # a column with gaps is float to pandas
        if slide is None:
            unknown[name] = None
            continue
        missing.discard(slide)
        part = SPELLINGS.get(written.casefold())
        if part is None:
            faults.append(f"{line}a split is train, val or test; got {written!r}")
        elif slide in patient and split.setdefault(slide, part) != part:
            faults.append(f"{line}slide {slide!r} is in {split[slide]} and in {part}; keep one")
    if unknown and begun is None:
        faults.append(f"names of slides that are not there: {listed([*unknown])}; take them out, or add the slides")
    if missing:
        remedies = {
            None: "put each into a split",
            False: "add a line for each, or delete the file to split anew",
            True: "the run has a checkpoint without them: take them out, or begin another run with another --out",
        }
        faults.append(f"slides that it does not name: {listed(sorted(missing))}; {remedies[begun]}")
    refuse_faults(f"split file {path}", faults, split, patient)
    if unknown:
        logger.warning("%s: left out, not among the slides of this run: %s", path, listed([*unknown]))
    return split


Entry = tuple[str, str, str]
"""Line for a message, where it helps, slide and split, as a file has them."""


def _of_folds(path: Path, fold: int | None) -> Iterator[Entry]:
    """Entries of one fold of nnU-Net's list."""
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
            yield "", printable(slide), part


def _is_fold(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"train", "val"} <= value.keys() <= set(NAMES)
        and all(isinstance(slides, list) and all(isinstance(s, str) for s in slides) for slides in value.values())
    )


def _of_table(path: Path, fold: int | None) -> Iterator[Entry]:
    """Entries of a table of any of the three kinds."""
    if fold is not None:
        raise ValueError(f"--fold {fold} chooses one of the folds of a .json file; {path} has one split: leave it out")
    rows = [(line, [printable(cell.strip()) for cell in cells]) for line, cells in read_cells(path)]
    header = [name.casefold() for name in rows[0][1]]
    columns = {k: SPELLINGS[name] for k, name in enumerate(header) if name in SPELLINGS}
    if "train" not in columns.values() or "split" in header:
        for values in read_table(path, ("slide", "split")).rows:
            yield f"line {values.line}: ", original(values["slide"]), values["split"]
        return
    body = [(line, row + [""] * (len(header) - len(row))) for line, row in rows[1:] if any(row)]
    cells = {row[k].casefold() for _, row in body for k in columns}
    if cells <= TRUTHS.keys() and cells & {"true", "false"}:
        first = min(set(range(len(header))) - columns.keys(), default=None)
        if first is None:
            raise ValueError(f"split file {path}: a table of booleans names the slide in another column; got {header}")
        for line, row in body:
            parts = [part for k, part in columns.items() if TRUTHS[row[k].casefold()]]
            if len(parts) != 1:
                raise ValueError(
                    f"split file {path} line {line}: slide {row[first]!r} is in {len(parts)} splits, not in one"
                )
            yield "", original(row[first]), parts[0]
        return
    for _, row in body:
        for k, part in columns.items():
            if row[k]:
                yield "", original(row[k]), part
