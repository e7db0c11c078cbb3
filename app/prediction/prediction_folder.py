"""The folder of predictions: which file is where, what it was made with, and which slides are done.

``predict.json`` says what the files were made with; ``slides/<slide>.json`` is written last of a slide and says that it
is done. Another start goes on with the others. One with other settings is refused by name.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from app.settings.data_file import read_data
from pipelines.catalog.catalog import PREDICTIONS_FILE
from pipelines.catalog.csv_cells import write_rows
from pipelines.catalog.failures import FailedSlides
from pipelines.catalog.slide_state import SlideState

SETTINGS, TABLE = PREDICTIONS_FILE, "slides.csv"


class PredictionFolder:
    """Paths and records of the predictions of one model.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed = FailedSlides(path / "failed_slides.csv")
        self.table = path / TABLE

    def open(self, settings: Mapping[str, Any]) -> None:
        """Make the folder, or check that what is there was made with ``settings``.

        Raises:
            ValueError: it was not; names what differs.
            OSError: it cannot be written.
        """
        for name in ("heat_maps", "overlays", "geojson", "masks", "areas", "tiles", "slides"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        path = self.path / SETTINGS
        if not path.exists():
            _write_json(path, settings)
        made_with = read_data(path)
        differing = [
            f"{key}: made with {made_with.get(key)!r}, asked is {value!r}"
            for key, value in settings.items()
            if made_with.get(key) != value
        ]
        if differing:
            raise ValueError(
                f"{self.path} holds predictions made with other settings; use the same, or another --out:\n       "
                + "\n       ".join(differing)
            )

    def heat_map(self, slide_id: str, class_name: str) -> Path:
        """Path of the heat map of one class."""
        return self.path / "heat_maps" / f"{slide_id}.{file_name(class_name)}.tif"

    def overlay(self, slide_id: str) -> Path:
        return self.path / "overlays" / f"{slide_id}.png"

    def geojson(self, slide_id: str) -> Path:
        return self.path / "geojson" / f"{slide_id}.geojson"

    def mask(self, slide_id: str) -> Path:
        return self.path / "masks" / f"{slide_id}.png"

    def areas(self, slide_id: str) -> Path:
        return self.path / "areas" / f"{slide_id}.csv"

    def tiles(self, slide_id: str) -> Path:
        return self.path / "tiles" / f"{slide_id}.csv"

    def record(self, slide_id: str) -> Path:
        """Path of what says that the slide is done."""
        return self.path / "slides" / f"{slide_id}.json"

    def is_done(self, slide_id: str, path: Path) -> bool:
        """Return whether the slide, whose file is ``path`` now, was predicted as it is."""
        record = self.record(slide_id)
        return record.exists() and SlideState(**_read_record(record)["state"]).is_of(path)

    def finish(
        self, row: Mapping[str, Any], state: SlideState, canvas: Mapping[str, Any], opening: Mapping[str, Any]
    ) -> None:
        """Record that a slide is done: its row of the table, where its maps lie, and how it was opened."""
        record = {"row": dict(row), "state": asdict(state), "canvas": dict(canvas), "opening": dict(opening)}
        _write_json(self.record(row["slide"]), record)

    def settings(self) -> dict[str, Any]:
        """Return what the predictions were made with.

        Raises:
            ValueError: the folder holds none.
        """
        path = self.path / SETTINGS
        if not path.is_file():
            raise ValueError(f"{self.path} holds no predictions: {path} is not there; give the --out of app.predict")
        return read_data(path)

    def records(self) -> list[dict[str, Any]]:
        """Return ``row``, ``state``, ``canvas`` and ``opening`` of all slides that are done, by slide."""
        return [_read_record(path) for path in sorted((self.path / "slides").rglob("*.json"))]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all slides that are done, by slide."""
        return [record["row"] for record in self.records()]

    def write_table(self) -> None:
        """Write ``slides.csv`` anew; of several ranks one after the other, so that the last has all rows."""
        with self._alone():
            rows = self.rows()
            if rows:
                temporary = self.table.with_suffix(".tmp")
                with temporary.open("w", newline="", encoding="utf-8") as file:
                    write_rows(file, [list(rows[0]), *(list(row.values()) for row in rows)])
                temporary.replace(self.table)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        descriptor = os.open(self.path / "table.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def file_name(class_name: str) -> str:
    """``class_name`` as a part of a file's name.

    >>> file_name("Tumor: Positive/3")
    'Tumor__Positive_3'
    """
    return "".join(c if c.isalnum() or c in "-+." else "_" for c in class_name)


def _read_record(path: Path) -> dict[str, Any]:
    """Return what ``PredictionFolder.finish`` wrote.

    Raises:
        ValueError: it is damaged.
    """
    record = read_data(path)
    whole = all(isinstance(record.get(name), dict) for name in ("row", "state", "canvas"))
    if not whole or record["state"].keys() != {field.name for field in fields(SlideState)}:
        raise ValueError(f"{path} is not the record of a slide: remove it, then run app.predict again")
    return record


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(dict(value), indent=2) + "\n")
    os.replace(temporary, path)
