"""Names of classes, the class of a tile, and the patients of slides.

Class ids of annotations are 0 for background and 255 for ignored. A patient is named by a table, recognised in the
slide's name, or unknown; a slide of unknown patient is split and resampled alone.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.table import listed, shown
from pipelines.labels.drawing import BACKGROUND

IGNORE = 255
"""Written where pixels shall not count: outside no class was decided on."""

IGNORED_CLASS = re.compile(r"ignore|exclude", re.IGNORECASE)
"""Areas of a class that starts like this are not learnt from; QuPath itself has a class ``Ignore*``."""

NEGATIVES = frozenset({"normal", "benign", "negative", BACKGROUND, "0"})
"""Names of a class that, of two, is not the positive one, in any spelling: also Normal and 0.0."""

OTHERS = "*"
"""In a class map: every name that is drawn, and is neither listed nor what a listed name is learned as."""


def is_learned(name: str) -> bool:
    """Return whether a class has an id of its own: it is neither ignored nor the background."""
    return not IGNORED_CLASS.match(name) and name.casefold() != BACKGROUND


def class_id(name: str, classes: Sequence[str]) -> int:
    """Return what is painted for a class name: its id, ``IGNORE``, or 0 for an area that is named background."""
    if IGNORED_CLASS.match(name):
        return IGNORE
    return classes.index(name) if is_learned(name) else 0


def positive_class(classes: Sequence[str], named: str | None = None) -> int | None:
    """Return the index of the positive class of two; None where it is not known, and of any other number of classes.

    Args:
        named: ``--positive-class`` of the user. None: the one class that is not called as in ``NEGATIVES``.

    Raises:
        ValueError: ``named`` is none of ``classes``, or these are not two.
    """
    if named is not None and (len(classes) != 2 or named not in classes):
        raise ValueError(f"--positive-class is one of two classes; got {named!r}, the classes are {listed(classes)}")
    if named is not None:
        return classes.index(named)
    negatives = {_spelling_key(name, is_class=True) for name in NEGATIVES}
    positive = [k for k, name in enumerate(classes) if _spelling_key(name, is_class=True) not in negatives]
    return positive[0] if len(classes) == 2 and len(positive) == 1 else None


NUMBER = re.compile(r"[+-]?([0-9]+[.,]?[0-9]*|[.,][0-9]+)")


def check_spellings(names: Iterable[str], source: str, what: str = "classes") -> None:
    """Refuse names that are one class, patient or site written in several ways, as Tumor and tumor.

    Args:
        what: "classes", "patients" or "sites". Equal numbers, as 0 and 0.0, are one class; they may be two patients.

    Raises:
        ValueError: there are such names; lists them, classes with the ``--class-map`` that joins them.
    """
    spellings: defaultdict[str | Decimal, list[str]] = defaultdict(list)
    for name in sorted(set(names)):
        spellings[_spelling_key(name, what == "classes")].append(name)
    several = [written for written in spellings.values() if len(written) > 1]
    if several:
        entries = [f'"{other}={kept}"' for kept, *others in several for other in others]
        joined = " in --labels, or of the slides"
        if what == "classes":
            joined = f", or join them with --class-map {' '.join(entries)}"
        raise ValueError(
            f"{source}: {what} written in several ways: "
            + shown([" and ".join(map(repr, written)) for written in several])
            + f"\nCorrect the names{joined}"
        )


def _spelling_key(name: str, is_class: bool) -> str | Decimal:
    """Return a value that all spellings of a name have in common; a decimal comma is what a German Excel writes."""
    if is_class and NUMBER.fullmatch(name):
        return Decimal(name.replace(",", "."))
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


@dataclass(frozen=True, slots=True)
class ClassMap:
    """Names to learn by names as drawn; others stay as they are.

    Attributes:
        names: several may lead to the same; ``background`` and ``ignore`` mean what they say. The value of ``OTHERS``
            is the learned name of all other classes.
    """

    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, entries: Sequence[str]) -> Self:
        """Return the map of entries like ``Tumor=tumour``.

        Raises:
            ValueError: an entry has no "=", several, or an empty side, or a name is listed twice.
        """
        names: dict[str, str] = {}
        for entry in entries:
            drawn, equals, learned = (part.strip() for part in entry.partition("="))
            if not (drawn and equals and learned) or "=" in learned:
                raise ValueError(
                    "--class-map entries are DRAWN=LEARNED, as Necrosis=ignore, and in a YAML file a list of them, as "
                    f"class_map: [Tumor=tumour, Necrosis=ignore]; got {entry!r}"
                )
            if names.setdefault(drawn, learned) != learned:
                raise ValueError(f"--class-map has {drawn!r} as {names[drawn]!r} and as {learned!r}; keep one")
        return cls(names)

    def learned(self, drawn: str) -> str:
        """Return the name that a drawn name is learned under."""
        if drawn in self.names or drawn in self.names.values() or not is_learned(drawn):
            return self.names.get(drawn, drawn)
        return self.names.get(OTHERS, drawn)

    def check(self, drawn: Collection[str]) -> None:
        """Raises ValueError for listed names that no label or annotation has, and as `check_others`."""
        if unknown := sorted(set(self.names) - set(drawn) - {OTHERS}):
            raise ValueError(
                f"--class-map names {listed(unknown)}, which no label or annotation has; classes are "
                f"{listed(sorted(drawn))}. "
                "Correct the name, upper and lower case count, or leave it out"
            )
        self.check_others(drawn)

    def check_others(self, drawn: Collection[str]) -> None:
        """Raises ValueError for other spellings of listed or learned names that ``OTHERS`` would take unseen."""
        others = self.names.get(OTHERS)
        named = {_spelling_key(name, is_class=True): name for entry in self.names.items() for name in entry}
        taken = {
            name: same
            for name in sorted(set(drawn) - set(self.names))
            if (same := named.get(_spelling_key(name, is_class=True)))
            and others == self.learned(name) != self.learned(same)
        }
        if taken:
            entries = " ".join(f'"{name}={self.learned(same)}"' for name, same in taken.items())
            raise ValueError(
                f'--class-map "{OTHERS}={others}" would take other spellings of '
                f"{listed([*dict.fromkeys(taken.values())])}: {listed([*taken])}. "
                f"Correct the names, or list them in training, too: {entries}"
            )


NOTHING_COUNTS = -1
"""Class of a tile all of which is ignored."""


@dataclass(frozen=True, slots=True)
class TileLabel:
    """Rule by which a tile gets its class.

    Attributes:
        least: fraction of what counts on the tile that the largest drawn class must cover, 0 for any of it, or else
            the tile is background. None: the class that covers most, background included.
    """

    least: float | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the rule called majority or any, or of a fraction.

        Raises:
            ValueError: it is none of them.
        """
        if text == "majority":
            return cls(None)
        if text == "any":
            return cls(0.0)
        if not re.fullmatch(r"[0-9]*\.?[0-9]+", text) or not 0 < float(text) <= 1:
            raise ValueError(f"--tile-label is majority, any, or a fraction above 0 and up to 1; got {text!r}")
        return cls(float(text))

    def classes(self, areas: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the class of each tile, int64 (n,), or ``NOTHING_COUNTS``.

        Args:
            areas: (n, C), of each class on each tile; what is ignored is in none of them.
        """
        counted = areas.sum(axis=1)
        if self.least is None:
            classes = areas.argmax(axis=1)
        else:
            drawn = areas[:, 1:]
            covers = (drawn.max(axis=1) >= self.least * counted) & (drawn.max(axis=1) > 0)
            classes = np.where(covers, drawn.argmax(axis=1) + 1, 0)
        return np.where(counted > 0, classes, NOTHING_COUNTS).astype(np.int64)


TCGA_PATIENT = re.compile(r"(?<![A-Z0-9])(TCGA-[A-Z0-9]{2}-[A-Z0-9]{4})(?![A-Z0-9])", re.IGNORECASE)
"""Project, tissue source site and participant of a TCGA barcode, as in TCGA-AA-0001-01Z-00-DX1."""


def patient_in(slide: str, pattern: str | None = None) -> str | None:
    """Return the patient that a slide's name says; None: it says none. ``pattern`` as for `known_patients`."""
    if pattern is None:
        barcode = TCGA_PATIENT.search(slide)
        return barcode[1].upper() if barcode else None
    match = re.search(pattern, slide)
    return match[min(1, match.re.groups)] or None if match else None


def known_patients(slides: Collection[str], named: Mapping[str, str], pattern: str | None = None) -> dict[str, str]:
    """Return the patient of every slide whose patient is known, by slide id.

    Args:
        named: patients that a table names, which go first.
        pattern: regular expression for the other slides, searched in the id: its first group is the patient, or the
            whole match without a group. None: TCGA barcodes are recognised.

    Raises:
        ValueError: no id matches ``pattern``.
    """
    known, unnamed = dict(named), [slide for slide in slides if slide not in named]
    known |= {slide: patient for slide in unnamed if (patient := patient_in(slide, pattern))}
    if pattern is not None and unnamed and not any(slide in known for slide in unnamed):
        raise ValueError(
            f"--patient-pattern {pattern!r} finds no patient in the slides' names, such as {min(unnamed)!r}: give an "
            "expression whose first group is the patient, such as '^(P[0-9]+)_'"
        )
    return known


def patient_note(known: Collection[str], slides: Collection[str], what: str = "split") -> str | None:
    """Return a line about slides whose patient is unknown; None where all are known.

    Args:
        known: slides whose patient is known.
        what: is done with slides one by one.
    """
    unknown = sorted(set(slides) - set(known))
    if not unknown:
        return None
    remedy = "a column patient in --labels or --patient-pattern names them"
    if len(unknown) == len(slides):
        return f"patients unknown: slides are {what} one by one; {remedy}"
    count = f"patients of {len(unknown)} of {len(slides)} slides unknown"
    return f"{count}: these are {what} one by one ({listed(unknown)}); {remedy}"


def pattern_fault(pattern: str | None) -> str | None:
    """Return what is wrong with a ``--patient-pattern``; None: nothing."""
    try:
        re.compile(pattern or "")
    except re.error as fault:
        return f"--patient-pattern is a regular expression, such as '^(P[0-9]+)_'; got {pattern!r}: {fault}"
    return None
