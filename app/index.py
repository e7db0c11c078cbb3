"""``python -m app.index --slides DIR``: the tissue tiles of every slide, with overlay pictures and a page of them all.

Takes a folder of slides; leaves ``tiles.parquet``, ``tissue/<slide>.png``, ``slides.html``, ``run.log`` with a line for
each slide and, if slides failed, ``failed_slides.csv`` in ``--out``. A second run, or ``app.train`` in that folder,
reuses what is there; the former tries failed slides again. No slide library runs in this process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.launch.host import lock_folder, usable_cores
from app.pages.pictures import FILTERS, slide_rows, small_pictures, write_slides_page
from app.settings.cli import run_command
from app.settings.fields import at_least, broken, error_of
from app.settings.run import OpeningSettings, mpp_errors, slides_in
from app.training.progress import IndexProgress, log_to
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.table import FailedSlides, counted
from pipelines.labels.annotation_files import annotations_beside, annotations_in
from pipelines.labels.annotations import SlideAnnotations, read_annotations
from pipelines.slides.slide import SlideError
from pipelines.tiles.index import build_index
from pipelines.tiles.tile_table import WHOLE_FILE, IndexPart, TileTable, sides_text
from pipelines.tiles.tiling import IndexSettings


@dataclass(frozen=True)
class IndexCommand:
    """Find the tissue tiles of every slide in a folder and draw them."""

    slides: Path
    """Folder of whole-slide images, searched with its sub-folders."""
    out: Path = Path("index")
    """Folder for tiles.parquet, tissue/, slides.html, run.log and failed_slides.csv."""
    annotations: Path | None = None
    """Folder of annotations by slide name, outlined on the pictures of slides.html. Default: those beside the
    slides."""
    index: IndexSettings = field(default_factory=IndexSettings)
    opening: OpeningSettings = field(default_factory=OpeningSettings)
    workers: int = 0
    """Processes, a slide each at a time; 0: one per core."""
    part: str | None = None
    """Index only this part of the slides, such as 2/8; parts may run in parallel, a run without --part joins them."""

    @property
    def processes(self) -> int:
        return self.workers or usable_cores()

    @property
    def chosen_part(self) -> IndexPart | None:
        return None if self.part is None else IndexPart.parse(self.part)

    @property
    def has_page(self) -> bool:
        """Return whether slides.html is made: of all slides, and of slides that have pictures of tissue."""
        return self.part is None and not self.index.whole_pictures

    def validate(self) -> list[str]:
        rules = {
            "--annotations is for slides.html, which is not made with --part or --pictures resize": (
                self.annotations is not None and not self.has_page
            ),
            **at_least(self, workers=0),
        }
        unread = error_of(lambda: self.chosen_part)
        return [*self.index.validate(), *mpp_errors(self.opening.slide_mpp), *broken(rules), *unread]


def index(command: IndexCommand) -> None:
    started_s = time.perf_counter()
    specs = slides_in(command.slides, command.opening, whole_pictures=command.index.whole_pictures)
    part = command.chosen_part
    of_part = "" if part is None else f", {len(part.specs(specs))} of them in part {command.part}"
    print(f"{counted(len(specs), 'slide')} in {command.slides}{of_part}", flush=True)
    if part and specs and not part.specs(specs):
        return  # more tasks than slides is no error
    truth = _annotations(command, specs) if command.has_page else None
    with contextlib.ExitStack() as held:
        held.enter_context(lock_folder(command.out, shared=part is not None))
        if part is not None:
            held.enter_context(lock_folder(command.out, f"{part.file_name}.lock"))
        name = Path(part.file_name if part else "run").with_suffix(".log")
        log_to(command.out / name)
        say = held.enter_context(contextlib.closing(IndexProgress(functools.partial(print, flush=True))))
        failed = FailedSlides(command.out / "failed_slides.csv")
        try:
            table = build_index(
                specs, command.index, command.out, workers=command.processes, progress=say, retry_failed=True, part=part
            )
        except SlideError as fault:  # no slide can be used: their pictures show why
            if part is not None:  # other parts may have some; its own file holds the faults
                print(fault, flush=True)
                return
            if command.has_page:
                found = TileTable.load(command.out / WHOLE_FILE).of_slides(spec.slide_id for spec in specs)
                print("page      {} ({})".format(*_page(command, specs, found, failed, truth)), flush=True)
            raise
        page = _page(command, specs, table, failed, truth) if command.has_page else None
    if table.sides is not None:
        tiles = f"{counted(len(table), 'whole slide')}, {sides_text(table)}"
    else:
        tiles = f"{counted(len(table), 'tile')} of {command.index.tile} px"
    print(
        f"{tiles} at {command.index.mpp:g} um/px on {counted(len(table.slides), 'slide')}, "
        f"{time.perf_counter() - started_s:.1f} s\n"
        f"index     {command.out / (part.file_name if part else WHOLE_FILE)}\n"
        f"pictures  {command.out / 'tissue'}{os.sep}"
    )
    if page is not None:
        print("page      {} ({})".format(*page))
    if rows := failed.rows():
        print(f"failed    {failed.path} ({counted(len({slide for slide, _, _ in rows}), 'slide')})")


def _annotations(command: IndexCommand, specs: Sequence[SlideSpec]) -> SlideAnnotations | None:
    """Return the annotations of the slides. Files next to slides that were not named may be something else."""
    if command.annotations is not None:
        return read_annotations(annotations_in(command.annotations, specs), specs, {})
    try:
        beside = annotations_beside(command.slides, specs)
        return read_annotations(beside, specs, {}) if beside else None
    except ValueError as fault:
        print(f"annotations are not drawn: {fault}", flush=True)
        return None


def _page(
    command: IndexCommand,
    specs: Sequence[SlideSpec],
    table: TileTable,
    failed: FailedSlides,
    truth: SlideAnnotations | None,
) -> tuple[Path, str]:
    """The page of all slides, and what is flagged on it."""
    pictures = small_pictures(command.out / "tissue", specs, truth, command.processes)
    wrong = [(slide, "annotation", fault) for slide, fault in truth.failed.items()] if truth else []
    here = {spec.slide_id for spec in specs}
    rows = slide_rows(table, [row for row in (*failed.rows(), *wrong) if row[0] in here], pictures)
    tile = "whole slides" if table.sides is not None else f"tiles of {command.index.tile} px"
    what = (str(command.slides), f"{tile} at {command.index.mpp:g} um/px")
    path = write_slides_page(command.out / "slides.html", rows, pictures, truth.classes if truth else (), what)
    counts = {text: sum(name in row.flags for row in rows) for name, text in FILTERS.items()}
    return path, ", ".join(f"{text}: {counts[text]}" for text in FILTERS.values())


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(IndexCommand, index, argv, prog="python -m app.index")


if __name__ == "__main__":
    sys.exit(main())
