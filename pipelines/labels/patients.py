"""Patients of slides: named by a table, or recognised in the slides' names, or unknown; never assumed.

Takes the slides' names and the patients that a table names; gives the known patients by slide. A slide whose patient is
not known is split and resampled by itself, and `patient_note` says so: two such slides may be of one patient.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from pipelines.catalog.table import listed

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
        slides: ids of all slides.
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
