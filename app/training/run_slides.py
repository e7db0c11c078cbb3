"""Slides as a run opens them, and what its checkpoint keeps of each: its split, its patient and how it was opened.

``app.train`` finds its slides here, and ``app.predict`` those that it predicts, with the settings in the checkpoint. A
setting that `find_slides` takes, or a field of `SlideSpec`, therefore reaches prediction without code of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from app.settings.run import DataSettings
from pipelines.catalog.catalog import SlideNames, SlideSpec, find_slides
from pipelines.catalog.handles import SlideState
from pipelines.labels.slide_labels import read_mpp
from pipelines.labels.splits import Splits
from pipelines.slides.slide import SlideError
from pipelines.tiles.index_settings import IndexSettings

OF_THE_FILE = frozenset({"slide_id", "path", "state", "backend"})
"""Fields of a `SlideSpec` that no checkpoint keeps: they follow from the file, or, as the backend, change no pixel."""

SlideColumns = Mapping[str, Mapping[str, Any]]
"""Values by slide id, by name: ``split``, ``digest`` of the file, ``patient`` if known, fields of `SlideSpec`."""


def find_run_slides(data: DataSettings, index: IndexSettings) -> tuple[SlideSpec, ...]:
    """Return the slides in ``data.slides`` as the settings open them.

    Raises:
        ValueError: there are none, or the table of labels cannot be read.
    """
    return find_slides(
        data.slides,
        mpp=data.slide_mpp,
        mpp_by_slide=read_mpp(data.slides, data.mpp_table, data.labels),
        whole_pictures=index.whole_pictures,
        backend=data.backend,
        scene=data.scene,
        labels=data.labels,
    )


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
        ValueError: as `find_run_slides`.
    """
    files = {f.name: f.default for f in dataclasses.fields(DataSettings) if "Path | None" in str(f.type)}
    data = dataclasses.replace(trained, **{**files, **given})
    specs = find_run_slides(data, index)
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
