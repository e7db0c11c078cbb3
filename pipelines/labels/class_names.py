"""Names of classes: what is learned, what is background, what is ignored, and which drawn names mean the same.

Takes names as they are drawn, gives names as they are learned, and their ids: 0 background, 255 ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from pipelines.catalog.table import listed
from pipelines.labels.drawing import BACKGROUND

IGNORE = 255
"""Written where pixels shall not count: outside no class was decided on."""

IGNORED_CLASS = re.compile(r"ignore|exclude", re.IGNORECASE)
"""Areas of a class that starts like this are not learnt from; QuPath itself has a class ``Ignore*``."""

NEGATIVES = frozenset({"normal", "benign", "negative", BACKGROUND, "0"})
"""Names of a class that, of two, is not the positive one; in any case."""

OTHERS = "*"
"""In a class map: every name that is drawn and not listed."""


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
        classes: names, in order.
        named: ``--positive-class`` of the user. None: the one class that is not called as in ``NEGATIVES``.

    Raises:
        ValueError: ``named`` is none of ``classes``, or these are not two.
    """
    if named is not None and (len(classes) != 2 or named not in classes):
        raise ValueError(f"--positive-class is one of two classes; got {named!r}, the classes are {listed(classes)}")
    if named is not None:
        return classes.index(named)
    positive = [k for k, name in enumerate(classes) if name.casefold() not in NEGATIVES]
    return positive[0] if len(classes) == 2 and len(positive) == 1 else None


@dataclass(frozen=True, slots=True)
class ClassMap:
    """Names to learn by names as drawn; others stay as they are.

    Attributes:
        names: several may lead to the same; ``background`` and ``ignore`` mean what they say. Under ``OTHERS`` what
            becomes of classes that are not listed.
    """

    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, entries: Sequence[str]) -> Self:
        """Return the map of entries like ``Tumor=tumour``.

        Raises:
            ValueError: an entry has no "=" or an empty side, or a name is listed twice.
        """
        names: dict[str, str] = {}
        for entry in entries:
            drawn, equals, learned = (part.strip() for part in entry.partition("="))
            if not (drawn and equals and learned):
                raise ValueError(f"--class-map entries are DRAWN=LEARNED, as Necrosis=ignore; got {entry!r}")
            if names.setdefault(drawn, learned) != learned:
                raise ValueError(f"--class-map has {drawn!r} as {names[drawn]!r} and as {learned!r}; keep one")
        return cls(names)

    def learned(self, drawn: str) -> str:
        """Return the name that a drawn name is learned under."""
        return self.names.get(drawn) or (self.names.get(OTHERS, drawn) if is_learned(drawn) else drawn)

    def check(self, drawn: Collection[str]) -> None:
        """Raises ValueError where the map lists names that no annotation has: a slip would go unseen."""
        if unknown := sorted(set(self.names) - set(drawn) - {OTHERS}):
            raise ValueError(
                f"--class-map names {listed(unknown)}, which no annotation has; drawn are {listed(sorted(drawn))}. "
                "Correct the name, upper and lower case count, or leave it out"
            )
