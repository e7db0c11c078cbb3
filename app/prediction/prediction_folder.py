"""The folder of predictions: which file is where, what it was made with, and which slides are done.

``predict.json`` says what the files were made with; ``slides/<slide>.json`` is written last of a slide and says that it
is done. Another start continues with the others. One with other settings is refused by name.
"""

from __future__ import annotations

import io
import itertools
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.settings.fields import differing, read_data, write_json
from app.training.run_slides import opening
from pipelines.catalog.catalog import PREDICTIONS_FILE, SlideSpec
from pipelines.catalog.handles import SlideState
from pipelines.catalog.table import FailedSlides, shown, write_rows
from pipelines.slides.whole_files import write_text

SETTINGS, TABLE = PREDICTIONS_FILE, "slides.csv"
SUFFIXES = {"overlays": "png", "geojson": "geojson", "masks": "png", "areas": "csv", "tiles": "csv", "slides": "json"}
"""Of the files of a slide, by folder."""
TRAINING_PATIENTS = "training_patients"
"""Not compared: they follow from the checkpoint, and older folders do not have them."""
LONGEST_PART = 60
"""Characters of a class in the name of its heat map; most file systems allow 255 bytes for all of it."""


class PredictionFolder:
    """Paths and records of the predictions of one model."""

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
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / SETTINGS
        if not path.exists():
            write_json(path, dict(settings), nan=True)
        self._refuse(differing(read_data(path), settings, "made with", {TRAINING_PATIENTS}))

    def heat_map(self, slide_id: str, part: str) -> Path:
        """Path of the heat map of one class, whose ``part`` of the name is that of ``file_names``."""
        return self._in("heat_maps", f"{slide_id}.{part}.tif")

    def file(self, folder: str, slide_id: str) -> Path:
        """Path of a file of a slide; that in ``slides`` says that the slide is done."""
        return self._in(folder, f"{slide_id}.{SUFFIXES[folder]}")

    def _in(self, folder: str, name: str) -> Path:
        """Return the path of a file whose own folder is there: the name of a picture or a DICOM slide is a path."""
        path = self.path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def done(self, specs: Iterable[SlideSpec]) -> set[str]:
        """Return the slides of ``specs`` that are predicted, their files being the same.

        Raises:
            ValueError: some were opened otherwise than ``specs`` say, as at another um/px; names what differs. Or
                predictions are of other slides with the same names.
        """
        done, others, namesakes = set(), [], []
        for spec in specs:
            path = self.file("slides", spec.slide_id)
            record = read_data(path) if path.exists() else None
            if record is None:
                continue
            state, predicted = SlideState(**record["state"]), record["canvas"].get("path")
            if state.is_of(spec.path):
                done.add(spec.slide_id)
                faults = differing(record["opening"], opening(spec), "made with")
                others += [f"{spec.slide_id}: {fault}" for fault in faults]
            elif predicted is not None and state.is_of(Path(predicted)):
                namesakes.append(f"{spec.slide_id}: {predicted} is predicted, asked is {spec.path}")
        if namesakes:
            what = f"{self.path} holds predictions of other slides of the same names; use another --out"
            raise ValueError(f"{what}:\n  {shown(namesakes)}")
        self._refuse(others)
        return done

    def forget(self, slide_ids: Sequence[str]) -> None:
        """Remove all files and failures of slides that are predicted anew: the slides may have changed."""
        self.failed.remove(slide_ids)
        parts = [*file_names(self.settings()["shown"]).values(), "attention_weights"]
        ends = [*SUFFIXES.items(), *(("heat_maps", f"{part}.tif") for part in parts)]
        for slide_id, (folder, end) in itertools.product(slide_ids, ends):
            (self.path / folder / f"{slide_id}.{end}").unlink(missing_ok=True)

    def finish(
        self, row: Mapping[str, Any], state: SlideState, canvas: Mapping[str, Any], opening: Mapping[str, Any]
    ) -> None:
        """Record that a slide is done: its row of the table, where its maps lie, and how it was opened."""
        record = {"row": dict(row), "state": asdict(state), "canvas": dict(canvas), "opening": dict(opening)}
        write_json(self.file("slides", row["slide"]), record, nan=True)

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
        found = sorted((self.path / "slides").rglob("*.json"))
        return [read_data(path) for path in found if path.exists()]  # another rank may ``forget`` a slide

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all slides that are done, by slide."""
        return [record["row"] for record in self.records()]

    def write_table(self) -> None:
        """Write ``slides.csv`` anew; repeat if a slide was finished meanwhile, as another rank may have written its
        row before this one replaced the file."""
        written: str | None = None  # no lock: some disks have none
        while (text := self._table_text()) != written:
            if text:
                write_text(self.table, text)
            else:
                self.table.unlink(missing_ok=True)
            written = text

    def _table_text(self) -> str:
        text = io.StringIO(newline="")
        if rows := self.rows():
            write_rows(text, [list(rows[0]), *(list(row.values()) for row in rows)])
        return text.getvalue()

    def _refuse(self, others: Sequence[str]) -> None:
        if others:
            what = f"{self.path} holds predictions made with other settings; use the same, or another --out"
            raise ValueError(f"{what}:\n  {shown(others)}")


def file_names(classes: Sequence[str]) -> dict[str, str]:
    """Return a part of a file's name for each class, no two alike, on file systems that ignore case either.

    Letters, digits, ``-`` and ``+`` stay, others become ``_``; a name that is taken gets a number.

    >>> file_names(["Tumor: Positive/3", "<1%", ">1%", "a", "A"])
    {'Tumor: Positive/3': 'Tumor__Positive_3', '<1%': '_1_', '>1%': '_1_~2', 'a': 'a', 'A': 'A~2'}
    """
    parts: dict[str, str] = {}
    taken: set[str] = set()
    for name in classes:
        plain = "".join(c if c.isalnum() or c in "-+" else "_" for c in name[:LONGEST_PART])
        part, number = plain, 1
        while _folded(part) in taken:
            number += 1
            part = f"{plain}~{number}"
        taken.add(_folded(part))
        parts[name] = part
    return parts


def _folded(part: str) -> str:
    return unicodedata.normalize("NFKC", part).casefold()
