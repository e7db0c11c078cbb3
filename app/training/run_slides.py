"""Slides of a run: how they are opened, how they are split, and what its checkpoint keeps of each.

``app.train`` finds its slides here, and ``app.predict`` those that it predicts, with the settings in the checkpoint. A
setting that `slides_in` takes, or a field of `SlideSpec`, therefore reaches prediction without code of its own. They
are split by a file, by folds, by sites, by folders, or by fractions of the patients; ``splits.csv`` in the run folder
is read by a resumed run and by other ranks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.settings.fields import broken
from app.settings.run import DataSettings, RunConfig, slides_in
from app.training.run_folder import RunFolder
from pipelines.catalog.catalog import SlideNames, SlideSpec
from pipelines.catalog.handles import SlideState
from pipelines.catalog.table import LABELS_FILE, read_table
from pipelines.labels.annotations import SlideAnnotations
from pipelines.labels.class_names import patient_note
from pipelines.labels.folds import fold_splits, read_split_file, site_splits
from pipelines.labels.slide_labels import SlideLabels, read_mpp
from pipelines.labels.splits import Splits, fixed_splits, make_splits
from pipelines.slides.slide import SlideError
from pipelines.tiles.tiling import IndexSettings

log = logging.getLogger(__name__)

OF_THE_FILE = frozenset({"slide_id", "path", "state", "backend"})
"""Fields of a `SlideSpec` that no checkpoint keeps: they follow from the file, or, as the backend, change no pixel."""

SlideColumns = Mapping[str, Mapping[str, Any]]
"""Values by slide id, by name: ``split``, ``digest`` of the file, ``patient`` if known, fields of `SlideSpec`."""


def opening(spec: SlideSpec) -> dict[str, Any]:
    """Return the fields of ``spec`` that say how the slide is opened."""
    return {f.name: getattr(spec, f.name) for f in dataclasses.fields(SlideSpec) if f.name not in OF_THE_FILE}


def slide_columns(data: DataSettings, specs: Sequence[SlideSpec], splits: Splits) -> SlideColumns:
    """Return what a checkpoint keeps of the slides of a run; values that ``data`` gives all slides are left out."""
    opened = {
        name: {spec.slide_id: value for spec in specs if (value := getattr(spec, name)) != default}
        for name, default in _opening_for_all(data).items()
    }
    digest = {spec.slide_id: spec.state.digest for spec in specs if spec.state is not None}
    return {"split": dict(splits.split), "digest": digest, "patient": splits.known_patient, **opened}


def predicted_slides(
    trained: DataSettings, index: IndexSettings, columns: SlideColumns, given: Mapping[str, Any]
) -> tuple[SlideSpec, ...]:
    """Return the slides of a prediction, opened by the settings of the run and what the user gives instead.

    Args:
        trained: settings of the run. Its files (labels, annotations) are not read again.
        columns: of the run's slides, which are opened as they were in the run if the files are the same.
        given: settings of the user by name, such as ``slides``; they go before everything else, ``mpp_table`` for the
            slides that it names.

    Raises:
        ValueError: as `slides_in`.
    """
    files = {f.name: f.default for f in dataclasses.fields(DataSettings) if "Path | None" in str(f.type)}
    data = dataclasses.replace(trained, **{**files, **given})
    specs = slides_in(data.slides, data, whole_pictures=index.whole_pictures, labels=data.labels)
    of_user = {name.removeprefix("slide_") for name in given}  # slide_mpp goes before the mpp of each slide
    for_all = {name: value for name, value in _opening_for_all(trained).items() if name not in of_user}
    names = SlideNames(spec.slide_id for spec in specs)
    table = {} if data.mpp_table is None else read_mpp(data.slides, data.mpp_table)
    replaced = {("mpp", names.match(name)) for name in table}

    def as_in_run(spec: SlideSpec) -> SlideSpec:
        slide = spec.slide_id
        values = {
            name: columns.get(name, {}).get(slide, default)
            for name, default in for_all.items()
            if (name, slide) not in replaced
        }
        return dataclasses.replace(spec, **values) if _is_same(spec, columns) else spec

    return tuple(map(as_in_run, specs))


def _opening_for_all(data: DataSettings) -> dict[str, Any]:
    """Return the value that ``data`` gives all slides for each field of `opening`."""
    return {
        f.name: getattr(data, f.name, getattr(data, f"slide_{f.name}", f.default))
        for f in dataclasses.fields(SlideSpec)
        if f.name not in OF_THE_FILE
    }


def _is_same(spec: SlideSpec, columns: SlideColumns) -> bool:
    """Return whether the file is that of the run's slide of this name."""
    digest = columns.get("digest", {}).get(spec.slide_id)
    try:
        return digest is not None and SlideState.now(spec.path).digest == digest
    except (OSError, SlideError):  # reported when it is opened
        return False


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
    known = Splits({}, patients, slide_labels, sites, unknown)
    begun = folder.last.exists()
    saved = read_split_file(folder.splits, patients, begun=begun) if folder.splits.exists() else None
    split = saved
    if saved is None or (config.split.is_asked and not begun):
        has_truth = {*truth.paths, *truth.failed} if isinstance(truth, SlideAnnotations) else {*truth.label}
        split = _asked_split(config, known, given, has_truth.union(truth.unlabelled), progress)
        if saved is None:
            dataclasses.replace(known, split=split).save(folder.splits)
        elif saved != split:
            raise ValueError(
                f"{folder.splits} holds another split than is asked for: delete it, or name another folder with --out"
            )
    assert split is not None
    splits = dataclasses.replace(known, split=split)
    counts = ", ".join(f"{part} {sum(s == part for s in splits.split.values())}" for part in ("train", "val", "test"))
    at_sites = f"; sites in more than one split: {splits.site_overlap()}" if sites else ""
    overlap = f"patients in more than one split: {splits.patient_overlap()}"
    note = patient_note(splits.known_patient, usable)
    if note is not None:
        overlap = note if len(unknown) == len(usable) else f"{overlap}; {note}"
    progress(f"slides by split: {counts}; {overlap}{at_sites}")
    return splits


def _asked_split(
    config: RunConfig, known: Splits, given: dict[str, str], slides: set[str], progress: Callable[[str], None]
) -> dict[str, str]:
    asked, patients, labels = config.split, known.patient, known.label or None
    gives_fraction = asked.validation not in (0, type(asked).validation)  # 0: of app.bench, which scores nothing
    of_another = {
        "--splits, --folds or --split-by": asked.is_asked,
        f"--test {asked.test:g}": asked.test,
        f"--validation {asked.validation:g}": gives_fraction and "val" in given.values(),
    }
    if given and (flags := broken(of_another)):
        raise ValueError(
            f"slides lie in folders called like splits, {', '.join(sorted(set(given.values())))}, and "
            f"{' or '.join(flags)} asks for another split: leave that out, or move the slides out of these folders"
        )
    if asked.splits is not None:
        return read_split_file(asked.splits, patients, slides=slides, fold=asked.fold)
    table = config.data.labels or config.data.slides / LABELS_FILE
    chosen = given or asked.is_asked or asked.test or asked.validation != type(asked).validation
    if not chosen and table.is_file() and "split" in read_table(table, ("slide",)).roles:
        log.warning("labels %s: its column split is not used; add --splits %s", table, table)
    sites = known.site if asked.split_by == "site" else None
    if asked.folds is not None and asked.fold is not None:
        return fold_splits(
            patients, labels, sites, folds=asked.folds, fold=asked.fold, test=asked.test, seed=config.seed
        )
    if sites is not None:
        return site_splits(patients, labels, sites, validation=asked.validation, test=asked.test, seed=config.seed)
    if given:
        progress(f"split by the folders {', '.join(sorted(set(given.values())))}")
        return fixed_splits(given, patients, known.label, validation=asked.validation, seed=config.seed)
    return make_splits(patients, labels, validation=asked.validation, test=asked.test, seed=config.seed)
