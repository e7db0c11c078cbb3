"""Which slides train, which validate, which test: decided per patient, so that no patient is on two sides.

Takes the patient and the label of every slide; gives the split of each, which a run writes to ``splits.csv``. Patients
are shared out within each class (stratified) in an order drawn from the seed and the patient's name alone: the order of
the slides does not matter, another slide of the same patient changes nothing.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.table import listed, shown, write_rows

logger = logging.getLogger(__name__)

NAMES = ("train", "val", "test")

SPELLINGS = {"training": "train", "validation": "val", "valid": "val", "dev": "val", "testing": "test"} | {
    name: name for name in NAMES
}
"""What a split may be called in a file."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The split of every slide.

    Attributes:
        split: train, val or test, by slide id.
        patient: by slide id; of a slide whose patient is unknown, the slide id.
        label: class index by slide id; empty where slides have no label of their own (segmentation).
        site: by slide id, of slides whose site is known.
        unknown: slides whose patient is unknown.
    """

    split: Mapping[str, str]
    patient: Mapping[str, str]
    label: Mapping[str, int] = field(default_factory=dict)
    site: Mapping[str, str] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()

    def patient_overlap(self) -> int:
        """Number of patients with slides in more than one split. 0, or scores are worth nothing."""
        return len(split_twice(self.split, self.patient))

    @property
    def known_patient(self) -> dict[str, str]:
        """Patient by slide id, of slides whose patient is known."""
        return {slide: who for slide, who in self.patient.items() if slide not in self.unknown}

    def site_overlap(self) -> int:
        """Number of sites with slides in more than one split: scores then also show how well sites are recognised."""
        return len(split_twice({slide: self.split[slide] for slide in self.site}, self.site))

    def save(self, path: Path) -> None:
        """Write columns slide, patient (empty where unknown), label, split, and site where sites are known."""
        columns: list[tuple[str, Mapping[str, object]]] = [
            ("patient", self.known_patient),
            ("label", self.label),
            ("split", self.split),
            *([("site", self.site)] if self.site else []),
        ]
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = ([slide, *(values.get(slide) for _, values in columns)] for slide in sorted(self.split))
            write_rows(file, [["slide", *(name for name, _ in columns)], *rows])


def split_folders(root: Path, specs: Sequence[SlideSpec]) -> dict[str, str]:
    """Return the split of every slide by slide id, where all lie in folders of ``root`` that are called like splits
    (``train/``, ``val/``, ...); nothing where they do not.

    Raises:
        ValueError: some do, in folders of two splits or more, and some do not.
    """
    folder = {spec.slide_id: next(iter(folders_of(root, spec)), "") for spec in specs}
    split = {slide: SPELLINGS[name.casefold()] for slide, name in folder.items() if name.casefold() in SPELLINGS}
    if len(split) == len(specs):
        return split
    if len(set(split.values())) > 1:
        others = sorted({name or "none" for slide, name in folder.items() if slide not in split})
        named = sorted({folder[slide] for slide in split})
        raise ValueError(
            f"folders called like splits hold every slide of {root} or none: {', '.join(named)} are splits, and there "
            f"are slides in {listed(others)}, too. Move these into train/, val/ or test/, or give the folders of "
            "splits other names"
        )
    return {}


def folders_of(root: Path, spec: SlideSpec) -> tuple[str, ...]:
    """Return the folders from ``root`` down to a slide; none of one that is elsewhere."""
    return spec.path.relative_to(root).parts[:-1] if spec.path.is_relative_to(root) else ()


def fixed_splits(
    split: Mapping[str, str], patient: Mapping[str, str], label: Mapping[str, int], *, validation: float, seed: int
) -> dict[str, str]:
    """Return ``split``, given by slide id; where none is "val", patients of "train" are drawn for it, as
    ``make_splits`` does.

    Raises:
        ValueError: a patient is on two sides, or no slide is in train.
    """
    refuse_faults("folders of splits", [], split, patient)
    if "val" in split.values():
        return dict(split)
    train = {slide: patient[slide] for slide, name in split.items() if name == "train"}
    labels = {slide: label[slide] for slide in train} if label else None
    return {**split, **make_splits(train, labels, validation=validation, seed=seed)}


def make_splits(
    patient: Mapping[str, str],
    label: Mapping[str, int] | None = None,
    *,
    validation: float = 0.2,
    test: float = 0.0,
    seed: int,
) -> dict[str, str]:
    """Return the split of every slide: the patients of each class are shared out by the asked fractions.

    A patient counts for the rarest class among their slides. Of a class with two patients or more at least one trains.
    Where a fraction is asked, at least one validates (then tests), so that small sets are scored on every class. Each
    part is off its fraction by at most one patient per class. A class with one patient only trains, and this is
    logged.

    Args:
        patient: patient of every slide, by slide id.
        label: class of every slide, by slide id; None: slides have no class (segmentation).
        validation, test: fractions of the patients, each at least 0, together below 1.
        seed: of the order in which patients are drawn.

    Raises:
        ValueError: no slides, or fractions out of range.
    """
    strata, classes = strata_of(patient, label)
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise ValueError(f"fractions are at least 0 and together below 1; got validation {validation:g}, test {test:g}")
    name_of: dict[str, str] = {}
    for stratum, members in sorted(strata.items()):
        ordered = shuffled(members, seed)
        val, tests = _counts(len(ordered), validation, test)
        names = ["val"] * val + ["test"] * tests + ["train"] * (len(ordered) - val - tests)
        name_of.update(zip(ordered, names, strict=True))
        lacking = [n for n, fraction, got in (("val", validation, val), ("test", test, tests)) if fraction and not got]
        if lacking:
            of_class = f" of class {stratum}" if label else ""
            logger.warning(
                "too few patients%s (%d) for every split: none in %s", of_class, len(ordered), " and ".join(lacking)
            )
    _keep_classes_in_train(name_of, classes)
    return {slide: name_of[who] for slide, who in patient.items()}


def shuffled(names: Iterable[str], seed: int) -> list[str]:
    """Return ``names`` in an order drawn from the seed and each name alone."""
    return sorted(names, key=lambda name: blake2b(f"{seed}:{name}".encode()).digest())


def strata_of(
    patient: Mapping[str, str], label: Mapping[str, int] | None
) -> tuple[dict[int, list[str]], dict[str, set[int]]]:
    """Return the patients by the class they count for, the rarest of theirs; and the classes of each."""
    if not patient:
        raise ValueError("a split needs at least one slide; got none")
    classes: defaultdict[str, set[int]] = defaultdict(set)
    for slide, who in patient.items():
        classes[who].add(label[slide] if label else 0)
    frequency = Counter(c for of_patient in classes.values() for c in of_patient)
    strata: defaultdict[int, list[str]] = defaultdict(list)
    for who, of_patient in classes.items():
        strata[min(of_patient, key=lambda c: (frequency[c], c))].append(who)
    return strata, classes


def _counts(patients: int, validation: float, test: float) -> tuple[int, int]:
    """Numbers of ``patients`` that validate and that test; at least one is left to train."""
    val, tests = (max(1, math.floor(patients * f + 0.5)) if f else 0 for f in (validation, test))
    while val + tests > patients - 1:
        if tests >= val:
            tests -= 1
        else:
            val -= 1
    return val, tests


def _keep_classes_in_train(name_of: dict[str, str], classes: Mapping[str, set[int]]) -> None:
    """Move a patient to train for every class that only patients counted for another class have."""
    in_train: set[int] = set()
    for who, name in name_of.items():
        if name == "train":
            in_train |= classes[who]
    for who in sorted(name_of):
        if not classes[who] <= in_train:
            name_of[who] = "train"
            in_train |= classes[who]


def split_twice(split: Mapping[str, str], patient: Mapping[str, str]) -> list[str]:
    """Return the patients (or sites) of the slides of ``split`` that are on two sides, sorted."""
    sides: defaultdict[str, set[str]] = defaultdict(set)
    for slide, name in split.items():
        sides[patient[slide]].add(name)
    return sorted(who for who, names in sides.items() if len(names) > 1)


def refuse_faults(where: str, faults: list[str], split: Mapping[str, str], patient: Mapping[str, str]) -> None:
    """Raise ValueError for ``faults`` of a split, patients with slides in two splits, or where no slide is in train."""
    both = split_twice(split, patient)
    slides_of: dict[str, list[str]] = {who: [] for who in both}
    for slide in sorted(split):
        if patient[slide] in slides_of:
            slides_of[patient[slide]].append(slide)
    for who in both:
        sides = ", ".join(f"{slide} in {split[slide]}" for slide in slides_of[who])
        faults.append(f"patient {who!r} is on two sides ({sides}); put all slides of a patient in one split")
    if not faults and "train" not in split.values():
        faults.append("no slide is in train")
    if faults:
        raise ValueError(f"{where}: {shown(faults)}")
