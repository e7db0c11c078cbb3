"""Labels of the slides: one class per slide, or a drawing per slide.

Takes the slides and what the user said (``--labels``, ``--annotations``, or nothing); gives ``SlideLabels`` for
classification or ``SlideAnnotations`` for segmentation. The four ways are tried in the order of ``find_labels``.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.catalog.catalog import SKIPPED_FOLDERS, SlideNames, SlideSpec
from pipelines.catalog.table import LABELS_FILE, MISSING, Table, listed, original, read_table, shown, warn_of
from pipelines.labels.annotation_files import annotations_beside, annotations_in
from pipelines.labels.annotations import SlideAnnotations, read_annotations
from pipelines.labels.class_names import IGNORED_CLASS, ClassMap, check_spellings, known_patients
from pipelines.labels.splits import folders_of, split_folders
from pipelines.slides.geometry import mpp_fault
from pipelines.slides.slide import printable

logger = logging.getLogger(__name__)

LONGEST_NUMBER = 18
"""Digits of a class name that is sorted as a number."""


@dataclass(frozen=True, slots=True)
class SlideLabels:
    """One class per slide.

    Attributes:
        classes: names in the order of their index: by number where all are numbers, else by name.
        label: index into ``classes``, by slide id; only slides that have one.
        patient: by slide id, of slides whose patient is known.
        source: where the labels come from, for the log.
        unlabelled: slides of the folder without a label; they take no part.
        site: by slide id, of slides whose site the table names.
    """

    classes: tuple[str, ...]
    label: Mapping[str, int]
    patient: Mapping[str, str]
    source: str
    unlabelled: tuple[str, ...] = ()
    site: Mapping[str, str] = field(default_factory=dict)


def find_labels(
    root: Path,
    specs: Sequence[SlideSpec],
    *,
    labels: Path | None = None,
    annotations: Path | None = None,
    class_map: ClassMap = ClassMap(),  # noqa: B008 - frozen
    patient_pattern: str | None = None,
) -> SlideLabels | SlideAnnotations:
    """Return the labels of ``specs``, from the first of these that is there.

    1. ``labels``: a table with columns slide and label, and as it likes patient, site and mpp.
    2. ``annotations``: a folder of ``<slide>.geojson``, ``.xml`` of ASAP or ImageScope, mask ``.tif`` or ``.png``, or
       DICOM Segmentation ``.dcm``.
    3. next to the slides: ``labels.csv``, or such annotation files, also in ``annotations/`` and ``masks/``.
    4. class sub-folders of ``root``: ``root/CLASS/slide.svs``, or ``root/SPLIT/CLASS/slide.svs`` where the folders are
       called like splits (``train``, ``val``, ``test``).

    With annotations, the table may lack a label column, and with class folders ``labels.csv`` may: it then gives only
    the patients and sites. Slides without a label and labels without a slide are logged. ``class_map`` renames the
    classes of all of them. Patients that no table names are looked for in the slides' names by ``known_patients``.

    Raises:
        ValueError: none of them, all faults of the one that was found, or a class, a patient or a site that is written
            in several ways.
    """
    truth: SlideLabels | SlideAnnotations | None
    table_path = labels if labels is not None else root / LABELS_FILE
    table = read_table(table_path, ("slide",)) if labels is not None or table_path.is_file() else None
    files = annotations_in(annotations, specs) if annotations is not None else None
    if files is None and table is not None and "label" in table.roles:
        truth = _labels_from_table(table, specs, class_map, patient_pattern)
    elif files := files or annotations_beside(root, specs):
        truth = read_annotations(files, specs, *_patients_and_sites(table, specs, patient_pattern), class_map)
    elif labels is not None:  # a column that is written otherwise must not make classes of folders
        truth = _labels_from_table(read_table(labels, ("slide", "label")), specs, class_map, patient_pattern)
    else:
        truth = _labels_from_folders(root, specs, table, class_map, patient_pattern)
    if truth is None:
        raise ValueError(
            f"the slides of {root} have no labels. Give them in one of four ways:\n"
            "  1. --labels FILE.csv with a line per slide and columns slide,label (patient and mpp are read too)\n"
            "  2. --annotations DIR with <slide>.geojson from QuPath, <slide>.xml from ASAP or ImageScope, masks "
            "<slide>.tif or <slide>.png, or DICOM SEG <slide>.dcm\n"
            f"  3. the same beside the slides: {root / LABELS_FILE}, <slide>.geojson or .xml, <slide>_mask.tif or "
            ".png, or folders annotations/ or masks/\n"
            f"  4. a sub-folder per class: {root / 'CLASS' / 'slide.svs'}, at least two classes, every slide in one; "
            f"folders named {' and '.join(sorted(SKIPPED_FOLDERS))} are not searched for slides"
            + (
                f"\nIts folders {', '.join(sorted(set(splits.values())))} are taken for splits, not for classes: make "
                f"class folders in each of them, as {root / 'train' / 'CLASS' / 'slide.svs'}"
                if (splits := split_folders(root, specs))
                else ""
            )
        )
    check_spellings(truth.classes, truth.source)
    check_spellings(truth.patient.values(), truth.source, "patients")
    check_spellings(truth.site.values(), truth.source, "sites")
    return truth


def read_mpp(slides: Path, table: Path | None, labels: Path | None = None) -> dict[str, float]:
    """Return um/px of level 0 by slide name: of ``--mpp-table``, else of the column ``mpp`` of the labels, if any.

    Raises:
        ValueError: as ``read_mpp_column``, or ``table`` has no column mpp.
    """
    if table is not None:
        return read_mpp_column(table, ("slide", "mpp"))
    labels = labels or slides / LABELS_FILE
    return read_mpp_column(labels) if labels.is_file() else {}


def read_mpp_column(path: Path, required: tuple[str, ...] = ("slide",)) -> dict[str, float]:
    """um/px of level 0 by slide name, from the ``mpp`` column of a table; blanks and a missing column give nothing.

    Raises:
        ValueError: the table cannot be read; or values that are no um/px, or differ for one name; names all.
    """
    mpp_by_slide: dict[str, float] = {}
    faults: list[str] = []
    for row in read_table(path, required).rows:
        text, slide = row["mpp"], row["slide"]
        try:
            # A decimal comma is what a German Excel writes; 40x is a magnification.
            mpp = float(re.sub(r"(?<=\d)\s*[xX×]$", "", text.replace(",", "."))) if text else None
        except ValueError:
            faults.append(f"line {row.line} ({slide}): {text!r}")
            continue
        if mpp is None:
            continue
        if fault := mpp_fault(mpp):
            faults.append(f"line {row.line} ({slide}): {fault}")
        elif text[-1] in "xX×":
            faults.append(f"line {row.line} ({slide}): {text!r} is a magnification, not um/px")
        elif mpp_by_slide.setdefault(slide, mpp) != mpp:
            faults.append(f"line {row.line} ({slide}): {mpp:g} here and {mpp_by_slide[slide]:g} before; keep one")
    if faults:
        raise ValueError(f"{path}: column mpp is a number in um/px or empty; got {shown(faults)}")
    return mpp_by_slide


def _labels_from_table(
    table: Table, specs: Sequence[SlideSpec], class_map: ClassMap, pattern: str | None
) -> SlideLabels:
    ids = {spec.slide_id for spec in specs}
    names, learned = SlideNames(ids), class_map.learned
    faults: list[str] = []
    name_of: dict[str, str] = {}
    unknown: list[str] = []
    for row in table.rows:
        slide = names.match(original(row["slide"]))
        if slide is None:
            unknown.append(row["slide"] or f"(line {row.line}: no slide)")
        elif row["label"] and learned(name_of.setdefault(slide, row["label"])) != learned(row["label"]):
            faults.append(
                f"line {row.line}: slide {slide!r} is {row['label']!r} here and {name_of[slide]!r} before; keep one"
            )
    patients, patient_faults = values_by_slide(table, ids, "patient")
    sites, site_faults = values_by_slide(table, ids, "site")
    faults += patient_faults + site_faults
    if not name_of and not faults:
        faults.append(
            f"no line gives a class to a slide; empty and {', '.join(sorted(MISSING))} are missing values"
            if any(names.match(row["slide"]) for row in table.rows)
            else f"no line names a slide of the folder; the file has {listed(unknown)}, the folder "
            f"{listed(sorted(ids))}. A slide is named by its file name, with or without the extension"
        )
    if faults:
        raise ValueError(f"labels {table.path}: {shown(faults)}")
    patients = known_patients(sorted(ids), patients, pattern)
    class_map.check({row["label"] for row in table.rows} - {""})
    name_of = _mapped(name_of, class_map, f"labels {table.path}")
    return _labels(name_of, patients, specs, str(table.path), unknown, sites)


def _mapped(name_of: Mapping[str, str], class_map: ClassMap, source: str) -> dict[str, str]:
    """Return the classes by slide as ``class_map`` names them, without the slides whose class it ignores."""
    mapped = {slide: class_map.learned(name) for slide, name in name_of.items()}
    ignored = sorted(s for s, name in mapped.items() if name != name_of[s] and IGNORED_CLASS.match(name))
    if ignored:
        logger.warning("%s: --class-map leaves out %d slides: %s", source, len(ignored), listed(ignored))
        mapped = {slide: name for slide, name in mapped.items() if slide not in set(ignored)}
    if len(set(mapped.values())) < 2:
        raise ValueError(
            f"{source}: at least two classes are needed; all {len(mapped)} labelled slides of the folder are "
            f"{next(iter(mapped.values()), None)!r}"
        )
    return mapped


def _labels_from_folders(
    root: Path, specs: Sequence[SlideSpec], table: Table | None, class_map: ClassMap, pattern: str | None
) -> SlideLabels | None:
    """Labels from class folders; None where slides lie outside, one folder has all, or each slide has its own."""
    name_of: dict[str, str] = {}
    below_root = 1 if split_folders(root, specs) else 0
    for spec in specs:
        folders = folders_of(root, spec)[below_root:]
        if not folders or folders[0] == spec.slide_id:
            return None
        name_of[spec.slide_id] = printable(folders[0])
    classes = len(set(name_of.values()))
    if classes < 2 or (classes == len(name_of) and classes > 2):
        return None
    source = f"class sub-folders of {root}"
    paths = root.glob("*/*" if below_root else "*")
    skipped = sorted({path.name for path in paths if path.name.lower() in SKIPPED_FOLDERS and path.is_dir()})
    warn_of(logger, f"{source}: left out, as folders so named hold annotations", skipped, "folder")
    class_map.check(set(name_of.values()))
    patients, sites = _patients_and_sites(table, specs, pattern)
    return _labels(_mapped(name_of, class_map, source), patients, specs, source, [], sites)


def _labels(
    name_of: Mapping[str, str],
    patients: Mapping[str, str],
    specs: Sequence[SlideSpec],
    source: str,
    unknown: list[str],
    sites: Mapping[str, str],
) -> SlideLabels:
    names = set(name_of.values())
    numbers = all(name.isdecimal() and len(name) <= LONGEST_NUMBER for name in names)
    classes = tuple(sorted(names, key=lambda name: (int(name) if numbers else 0, name)))
    index = {name: number for number, name in enumerate(classes)}
    unlabelled = tuple(sorted(spec.slide_id for spec in specs if spec.slide_id not in name_of))
    without = "left out, without a label (none, empty, or a missing value such as nan)"
    warn_of(logger, f"{source}: {without}", unlabelled, "slide")
    warn_of(logger, f"{source}: for slides that are not there", unknown, "label")
    return SlideLabels(
        classes,
        {slide: index[name] for slide, name in sorted(name_of.items())},
        {slide: patients[slide] for slide in sorted(name_of) if slide in patients},
        source,
        unlabelled,
        {slide: sites[slide] for slide in sorted(name_of) if slide in sites},
    )


def _patients_and_sites(
    table: Table | None, specs: Sequence[SlideSpec], pattern: str | None
) -> tuple[dict[str, str], dict[str, str]]:
    """The patients that are known, and the sites that the table names, by slide id."""
    ids = {spec.slide_id for spec in specs}
    if table is None:
        return known_patients(sorted(ids), {}, pattern), {}
    named, faults = values_by_slide(table, ids, "patient")
    sites, site_faults = values_by_slide(table, ids, "site")
    if faults + site_faults:
        raise ValueError(f"labels {table.path}: {shown(faults + site_faults)}")
    return known_patients(sorted(ids), named, pattern), sites


def values_by_slide(table: Table, ids: set[str], role: str) -> tuple[dict[str, str], list[str]]:
    """Return the values of a column, without blanks, by slide of ``ids``; and a line for each slide that has two."""
    named: defaultdict[str, set[str]] = defaultdict(set)
    names = SlideNames(ids)
    for row in table.rows:
        slide = names.match(original(row["slide"]))
        if slide is not None and row[role]:
            named[slide].add(row[role])
    faults = [f"slide {s!r} has two {role}s: {', '.join(sorted(v))}; keep one" for s, v in named.items() if len(v) > 1]
    return {slide: min(values) for slide, values in named.items()}, faults
