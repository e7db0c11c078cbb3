"""Slides as a run opens them, and what its checkpoint keeps of each: its split, its patient and how it was opened.

``app.train`` finds its slides here, and ``app.predict`` those that it predicts, with the settings in the checkpoint. A
setting that `find_slides` takes, or a field of `SlideSpec`, therefore reaches prediction without code of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.settings.run import DataSettings
from pipelines.catalog.catalog import SlideSpec, find_slides
from pipelines.catalog.slide_state import SlideState
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
    )


def opening(spec: SlideSpec) -> dict[str, Any]:
    """Return the fields of ``spec`` that say how the slide is opened."""
    return {f.name: getattr(spec, f.name) for f in dataclasses.fields(SlideSpec) if f.name not in OF_THE_FILE}


def slide_columns(data: DataSettings, specs: Sequence[SlideSpec], splits: Splits) -> SlideColumns:
    """Return what a checkpoint keeps of the slides of a run; values that ``data`` gives all slides are left out."""
    defaults = {
        f.name: getattr(data, f.name, getattr(data, f"slide_{f.name}", f.default))
        for f in dataclasses.fields(SlideSpec)
        if f.name not in OF_THE_FILE
    }
    opened = {
        name: {spec.slide_id: value for spec in specs if (value := getattr(spec, name)) != default}
        for name, default in defaults.items()
    }
    digest = {spec.slide_id: spec.state.digest for spec in specs if spec.state is not None}
    return {"split": dict(splits.split), "digest": digest, "patient": splits.known_patient, **opened}


def predicted_slides(
    trained: DataSettings, index: IndexSettings, columns: SlideColumns, given: Mapping[str, Any]
) -> tuple[DataSettings, tuple[SlideSpec, ...]]:
    """Return the settings and slides of a prediction: those of the run, with what the user gives instead.

    Args:
        trained: settings of the run. Its files (labels, annotations) are not read again.
        columns: of the run's slides, which are opened as they were in the run if the files are the same.
        given: settings of the user by name, such as ``slides``; they go before everything else.

    Raises:
        ValueError: as `find_run_slides`.
    """
    files = {f.name: f.default for f in dataclasses.fields(DataSettings) if f.type == "Path | None"}
    data = dataclasses.replace(trained, **{**files, **given})
    specs = find_run_slides(data, index)
    words = {word for name in given for word in name.split("_")}  # slide_mpp goes before the mpp of each slide
    own = {name: columns[name] for name in opening(SlideSpec("", Path())) if name in columns and name not in words}

    def as_in_run(spec: SlideSpec) -> SlideSpec:
        values = {name: of_slides[spec.slide_id] for name, of_slides in own.items() if spec.slide_id in of_slides}
        return dataclasses.replace(spec, **values) if values and _is_same(spec, columns) else spec

    return data, tuple(map(as_in_run, specs))


def _is_same(spec: SlideSpec, columns: SlideColumns) -> bool:
    """Whether the file is that of the run's slide of this name."""
    try:
        return SlideState.now(spec.path).digest == columns["digest"].get(spec.slide_id)
    except (OSError, SlideError):  # reported when it is opened
        return False
