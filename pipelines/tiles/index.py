"""The tile index of many slides: made once, reused, continued.

Takes slides and ``IndexSettings``; gives a ``TileTable`` and leaves it as Parquet next to a picture of each slide.
Slides are indexed in processes of their own (``slide_index``); one that fails, or kills its process, is named in
``failed_slides.csv`` and the others go on. An index made with other settings is refused, the differing key named. Parts
of the slides can be indexed by processes that know nothing of each other (``tile_table``).
"""

from __future__ import annotations

import errno
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.processes import WorkerCrashed, map_isolated
from pipelines.catalog.table import FailedSlides, counted, listed
from pipelines.slides.slide import SlideError
from pipelines.tiles.slide_index import SlideResult, SlideTiles, default_threads, file_bytes, index_slide, slide_limits
from pipelines.tiles.tile_table import WHOLE_FILE, IndexPart, SlideFault, TileTable, merge, take_over
from pipelines.tiles.tiling import IndexSettings, check_settings, refuse_other_settings

log = logging.getLogger(__name__)

SAVE_EVERY_S, SAVE_SHARE = 60.0, 0.05
"""An index of many slides is written this often, so that an interrupted one is continued; less often where that would
take a larger part of the time."""

LISTED_FAULTS = 20
"""As many slides are named in a message; all are in ``failed_slides.csv``."""


@dataclass(frozen=True)
class SlideDone:
    """One slide is done: it is number ``done`` of ``total``, and ``what`` became of it."""

    done: int
    total: int
    slide_id: str
    what: str
    failed: bool

    def __str__(self) -> str:
        return f"{self.done}/{self.total}  {self.slide_id}: {self.what}"


def build_index(
    specs: Sequence[SlideSpec],
    settings: IndexSettings,
    out: Path,
    *,
    workers: int = 0,
    progress: Callable[[str | SlideDone], None] = lambda told: None,
    retry_failed: bool = False,
    part: IndexPart | None = None,
    resumed: bool = False,
) -> TileTable:
    """Return the tissue tiles of ``specs``: those that ``out`` has in its index or parts of one, and others found now.

    Writes ``out/tiles.parquet``, ``out/tissue/<slide>.png`` and, for slides that fail, ``out/failed_slides.csv``. A
    slide whose file has changed in size is indexed anew; one that is in the index and not in ``specs`` stays there and
    is not in the result.

    Args:
        workers: processes; 0: one per core.
        progress: called with each finished slide, which the log has, too, and with remarks.
        retry_failed: try slides again that failed before; otherwise only when their file has changed.
        part: only this part of ``specs``, in a file of its own.
        resumed: a run that has used this index continues: a slide that is another now is refused, not indexed anew, and
            one that failed stays left out, though it may have been repaired.

    Raises:
        ValueError: no slides, settings that contradict themselves, an index in ``out`` made with other settings, or a
            slide that changed under a run that is resumed.
        SlideError: no slide has tiles; lists the slides and their faults.
        OSError: ``out`` cannot be written.
    """
    if not specs:
        raise ValueError("an index is of at least one slide; got none: check --slides and the labels")
    if faults := settings.validate():
        raise ValueError("; ".join(faults))
    if part:
        specs = part.specs(specs)
    path = out / (part.file_name if part else WHOLE_FILE)
    (out / "tissue").mkdir(parents=True, exist_ok=True)
    table = TileTable.load(path) if path.exists() else TileTable.joined(settings, [])
    if not len(table) and table.settings != settings:  # every slide failed, perhaps because of these settings
        table = TileTable.joined(settings, [])
    check_settings(table.settings, settings, path)
    _check_overrides(table, specs, path)
    asked_ids = [spec.slide_id for spec in specs]
    if resumed:
        left_out = {fault.slide_id for fault in table.faults}
        specs = [spec for spec in specs if spec.slide_id not in left_out]
    # A slide that failed may be given the mpp or scene it lacked: that is another try, not another index.
    wanted = {spec.slide_id: (file_bytes(spec.path), spec.mpp, spec.scene) for spec in specs}
    indexed = table.tried(faults=False)
    others = {slide_id: what for slide_id, what in wanted.items() if indexed.get(slide_id) != what}
    taken = take_over(table, others, path, faults=not retry_failed)
    if taken is not table:
        table = taken
        table.save(path)
    known = table.tried(faults=not retry_failed)
    for slide_id in _changed(table, specs, resumed):
        del known[slide_id]
    todo = [spec for spec in specs if known.get(spec.slide_id) != wanted[spec.slide_id]]
    if len(todo) < len(specs):
        progress(f"in {path} already: {counted(len(specs) - len(todo), 'slide')}")
    absent = set(table.slides) - {spec.slide_id for spec in specs}
    if absent:
        log.info("%s also holds %s not asked for, e.g. %s", path, counted(len(absent), "slide"), min(absent))
    if todo:
        table = _index_slides(table, todo, path, workers or default_threads(1), progress)
    failed = FailedSlides(out / "failed_slides.csv")
    for fault in table.faults:  # a retry that was interrupted took out the rows of slides that it did not come to
        failed.add_once(fault.slide_id, fault.step, fault.error)
    asked = table.of_slides(asked_ids)
    if not len(asked):
        lines = [f"{fault.slide_id}: {fault.step}: {_first_line(fault.error)}" for fault in asked.faults]
        if len(lines) > LISTED_FAULTS:
            lines[LISTED_FAULTS:] = [f"and {len(lines) - LISTED_FAULTS} more, in {out / 'failed_slides.csv'}"]
        raise SlideError(f"none of {counted(len(asked_ids), 'slide')} can be used:\n  " + "\n  ".join(lines))
    return asked


def _changed(table: TileTable, specs: Sequence[SlideSpec], resumed: bool) -> list[str]:
    """Slides of ``table`` whose files are others now."""
    states = {source.slide_id: source.state for source in table.sources}
    changed = [
        spec.slide_id
        for spec in specs
        if (state := states.get(spec.slide_id)) and not state.is_of(spec.path, thorough=resumed)
    ]
    if changed and resumed:
        raise ValueError(
            "a run is resumed with the slides it began with; these were replaced or changed since: "
            f"{listed(changed, LISTED_FAULTS)}. Put the files back, or begin a new run in another --out"
        )
    return changed


def with_index_state(specs: Sequence[SlideSpec], table: TileTable) -> tuple[SlideSpec, ...]:
    """``specs`` that open only while their files are those of which ``table`` was made."""
    states = {source.slide_id: source.state for source in table.sources}
    return tuple(replace(spec, state=states.get(spec.slide_id)) for spec in specs)


def _index_slides(
    table: TileTable, specs: Sequence[SlideSpec], path: Path, workers: int, progress: Callable[[str | SlideDone], None]
) -> TileTable:
    """``table`` with the tiles or faults of ``specs``, saved as ``path``."""
    out = path.parent
    workers = min(workers, len(specs))
    failed = FailedSlides(out / "failed_slides.csv")
    failed.remove([spec.slide_id for spec in specs])
    threads = default_threads(workers)
    task = functools.partial(index_slide, settings=table.settings, threads=threads)
    tried: dict[str, SlideTiles | SlideFault] = {}
    save_at_s = time.monotonic() + SAVE_EVERY_S
    try:
        for done, (spec, result) in enumerate(map_isolated(task, specs, workers, slide_limits(threads)), 1):
            if isinstance(result, WorkerCrashed):
                result = SlideResult(
                    SlideFault(spec.slide_id, file_bytes(spec.path), spec.mpp, "process", str(result), spec.scene), None
                )
            if result.overlay_png is not None and (fault := _write_overlay(out, spec, result.overlay_png)):
                result = SlideResult(fault, None)
            tried[spec.slide_id] = result.found
            if is_fault := isinstance(found := result.found, SlideFault):
                failed.add(spec.slide_id, found.step, found.error)
            else:
                if found.unreadable_share:
                    share = f"{found.unreadable_share:.1%} of the slide is damaged; tiles there are left out"
                    failed.add(spec.slide_id, "tissue", share)
                if found.damaged[0]:
                    count, first = found.damaged
                    unread = f"left out, as damaged: {counted(count, 'tile')} with tissue: {first}"
                    failed.add(spec.slide_id, "tiles", unread)
            message = SlideDone(done, len(specs), spec.slide_id, _told(found, table.settings), is_fault)
            log.info("%s", message)
            progress(message)
            if (begun_s := time.monotonic()) > save_at_s:
                _merged(table, tried).save(path)
                took_s = time.monotonic() - begun_s
                save_at_s = begun_s + took_s + max(SAVE_EVERY_S, took_s / SAVE_SHARE)
    finally:
        table = _merged(table, tried)
        table.save(path)
    return table


def _write_overlay(out: Path, spec: SlideSpec, picture: bytes) -> SlideFault | None:
    """Write the picture of a slide; the fault of a name that no file can have."""
    path = out / "tissue" / f"{spec.slide_id}.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # a DICOM slide's name may be its path
        path.write_bytes(picture)
    except OSError as fault:
        if fault.errno != errno.ENAMETOOLONG:
            raise
        error = f"{spec.path}: its picture {path.name} has too long a name: rename the slide or its folder"
        return SlideFault(spec.slide_id, file_bytes(spec.path), spec.mpp, "overlay", error, spec.scene)
    return None


def _merged(table: TileTable, tried: Mapping[str, SlideTiles | SlideFault]) -> TileTable:
    """Return ``table`` with what was found added, in place of what it had."""
    return merge(table.settings, [table, *(_one_slide(table.settings, slide) for slide in tried.values())])


def _one_slide(settings: IndexSettings, result: SlideTiles | SlideFault) -> TileTable:
    if isinstance(result, SlideFault):
        return replace(TileTable.joined(settings, []), faults=(result,))
    slide = np.zeros(len(result.l0_x), np.int32)
    source = result.source
    sides = np.tile(np.array(result.size, np.int32), (len(slide), 1)) if settings.tile == "slide" else None
    return TileTable(
        (source.slide_id,), slide, result.l0_x, result.l0_y, result.tissue, settings, (source,), sides=sides
    )


def _told(result: SlideTiles | SlideFault, settings: IndexSettings) -> str:
    if isinstance(result, SlideFault):
        return f"failed at {result.step}: {_first_line(result.error)}"
    source = result.source
    if settings.whole_pictures:
        return f"a picture of {source.width} x {source.height} px, {result.seconds:.3f} s"
    width, height = result.size
    tiles = f"{width} x {height} px of tissue" if settings.tile == "slide" else counted(len(result.l0_x), "tile")
    return (
        f"{tiles}, {source.tissue_share:.0%} tissue, {source.width} x {source.height} px at "
        f"{source.mpp:.4g} um/px, {source.backend}, {result.seconds:.1f} s"
        + (f", {result.unreadable_share:.1%} damaged" if result.unreadable_share else "")
    )


def _first_line(error: str) -> str:
    """First line of an error; the others are in ``failed_slides.csv``."""
    return error.partition("\n")[0]


def _check_overrides(table: TileTable, specs: Sequence[SlideSpec], where: Path) -> None:
    """Refuse an index in which a slide was given another mpp or scene: its tiles would lie elsewhere."""
    before = {source.slide_id: {"slide-mpp": source.asked_mpp, "scene": source.scene} for source in table.sources}
    differing = [
        f"{name} of {spec.slide_id} is {'that of the file' if value is None else value} there, "
        f"{'that of the file' if asked is None else asked} was asked for"
        for spec in specs
        if spec.slide_id in before
        for (name, value), asked in zip(before[spec.slide_id].items(), (spec.mpp, spec.scene), strict=True)
        if value != asked
    ]
    refuse_other_settings([*differing[:3], *([f"and {len(differing) - 3} more"] if differing[3:] else [])], where)
