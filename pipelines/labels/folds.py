"""Folds of patients, and splits that keep sites whole: groups dealt out so that every part has its share of each class.

Takes the patient, the label and, for preserved sites, the site of every slide; gives ``Splits``. Slides of one site
share its scanner and its stain, which a model can tell instead of the disease: validated on a site that it was trained
on, it scores too well (Howard et al. 2021, "The impact of site-specific digital histology signatures on deep learning
model accuracy and bias").
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.table import listed
from pipelines.labels.splits import Splits, strata_of

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
) -> Splits:
    """Return the splits in which one of several folds validates and the others train.

    Patients, or whole sites, are dealt out to a test part and the folds before it is asked which fold validates: over
    the folds every patient that is not in test validates exactly once, and test is the same in all.

    Args:
        patient: patient of every slide, by slide id.
        label: class of every slide, by slide id; None: slides have no class (segmentation).
        site: site of every slide, none of which is shared out; None: patients are dealt out one by one.
        folds: at least 2.
        fold: that validates, from 0.
        test: fraction of the patients in no fold, at least 0, below 1.
        seed: of the order in which groups of the same size are dealt out.

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
) -> Splits:
    """Return splits of whole sites that come as near to the asked fractions of patients as sites of their sizes do.

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
) -> Splits:
    """Splits by parts of these shares of the patients, each called by one of ``names``; parts of share 0 stay empty."""
    if not patient:
        raise ValueError("a split needs at least one slide; got none")
    if not (min(shares) >= 0 and shares[0] > 0):
        raise ValueError(f"fractions are at least 0 and together below 1; got {', '.join(f'{s:g}' for s in shares)}")
    classes: defaultdict[str, set[int]] = defaultdict(set)
    for slide, who in patient.items():
        classes[who].add(label[slide] if label else 0)
    strata = sorted(strata_of(classes).items())
    group_of = {who: who for who in classes} if site is None else _joined_sites(patient, site)
    row_of = {group: k for k, group in enumerate(_shuffled(set(group_of.values()), seed))}
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
    for part in sorted({names.index("val")} & set(asked)):
        _tell_lacking(part, {c: Counter(part_of[who] for who in members) for c, members in strata}, bool(label))
    return Splits(
        {slide: names[part_of[who]] for slide, who in patient.items()},
        dict(patient),
        dict(label or {}),
        dict(site or {}),
    )


def assign_groups(sizes: NDArray[np.int64], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the part of each group, (n,): large groups first, each where it brings the parts nearest to their shares.

    What is kept small is the sum of squares of what parts have above or below their share of each class, as in
    StratifiedGroupKFold of scikit-learn, but with shares of any size; with groups of one patient each class is then
    even among parts of one share to one patient, and so are all classes together. No part stays empty.

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


def _shuffled(names: set[str], seed: int) -> list[str]:
    """``names`` in an order drawn from the seed and each name alone."""
    return sorted(names, key=lambda name: blake2b(f"{seed}:{name}".encode()).digest())


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


def _tell_lacking(validates: int, parts_of_class: Mapping[int, Counter[int]], has_classes: bool) -> None:
    """Log classes that are not scored, or not learned, with part ``validates`` held out."""
    if not has_classes:
        return
    for number, parts in parts_of_class.items():
        if not parts[validates]:
            logger.warning("no patient of class %d validates: too few patients or sites of it", number)
        elif parts[validates] == parts.total():
            logger.warning("all patients of class %d validate: it is not learned in this run", number)
