"""Which way the slides of a run are split: by a file, by folds, by sites, by folders, or by fractions of the patients.

Takes the settings and what is known of the slides; gives ``Splits`` and leaves ``splits.csv`` in the run folder, which
a resumed run and other ranks read. It reports patients and sites in two splits, and slides whose patient is unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from app.settings.run import RunConfig
from app.training.run_folder import RunFolder
from pipelines.labels.annotations import SlideAnnotations
from pipelines.labels.class_names import patient_note
from pipelines.labels.folds import fold_splits, read_split_file, site_splits
from pipelines.labels.slide_labels import SlideLabels
from pipelines.labels.splits import Splits, fixed_splits, make_splits


def choose_splits(
    config: RunConfig,
    folder: RunFolder,
    truth: SlideLabels | SlideAnnotations,
    usable: list[str],
    slide_labels: dict[str, int],
    given: dict[str, str],
    progress: Callable[[str], None],
) -> Splits:
    """Return the splits of the ``usable`` slides: as asked for at first, as the run folder has them from then on.

    Raises:
        ValueError: ones that cannot be, or the run folder has others than are asked for.
    """
    patients = {slide_id: truth.patient.get(slide_id, slide_id) for slide_id in usable}
    unknown = frozenset(usable) - truth.patient.keys()
    sites = {slide_id: truth.site[slide_id] for slide_id in usable if slide_id in truth.site}
    saved = Splits.load(folder.splits, patients) if folder.splits.exists() else None
    splits = saved
    if saved is None or (config.split.is_asked and not folder.last.exists()):
        has_truth = {*truth.paths, *truth.failed} if isinstance(truth, SlideAnnotations) else {*truth.label}
        known = has_truth.union(truth.unlabelled)
        splits = _asked_splits(config, Splits({}, patients, slide_labels, sites), given, known, progress)
        splits = dataclasses.replace(splits, unknown=unknown)
        if saved is None:
            splits.save(folder.splits)
        elif saved.split != splits.split:
            raise ValueError(
                f"{folder.splits} holds another split than is asked for: delete it, or name another folder with --out"
            )
    assert splits is not None
    splits = dataclasses.replace(splits, site=sites, unknown=unknown)
    counts = ", ".join(f"{part} {sum(s == part for s in splits.split.values())}" for part in ("train", "val", "test"))
    at_sites = f"; sites in more than one split: {splits.site_overlap()}" if sites else ""
    overlap = f"patients in more than one split: {splits.patient_overlap()}"
    note = patient_note(splits.known_patient, usable)
    if note is not None:
        overlap = note if len(unknown) == len(usable) else f"{overlap}; {note}"
    progress(f"slides by split: {counts}; {overlap}{at_sites}")
    return splits


def _asked_splits(
    config: RunConfig, known: Splits, given: dict[str, str], slides: set[str], progress: Callable[[str], None]
) -> Splits:
    """The splits that the settings ask for."""
    asked, patients, labels = config.split, known.patient, known.label or None
    if given and asked.is_asked:
        raise ValueError(
            f"slides lie in folders called like splits, {', '.join(sorted(set(given.values())))}, and --splits, "
            "--folds or --split-by asks for another split: leave that out, or move the slides out of these folders"
        )
    if asked.splits is not None:
        splits = read_split_file(asked.splits, patients, slides=slides, fold=asked.fold)
        return dataclasses.replace(splits, label=known.label, site=known.site)
    sites = known.site if asked.split_by == "site" else None
    if asked.folds is not None and asked.fold is not None:
        splits = fold_splits(
            patients, labels, sites, folds=asked.folds, fold=asked.fold, test=asked.test, seed=config.seed
        )
    elif sites is not None:
        splits = site_splits(patients, labels, sites, validation=asked.validation, test=asked.test, seed=config.seed)
    elif given:
        progress(f"split by the folders {', '.join(sorted(set(given.values())))}")
        splits = fixed_splits(given, patients, known.label, validation=asked.validation, seed=config.seed)
    else:
        splits = make_splits(patients, labels, validation=asked.validation, test=asked.test, seed=config.seed)
    return dataclasses.replace(splits, site=known.site)
