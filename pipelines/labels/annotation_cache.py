"""Annotation files kept open or parsed while their slides are in use.

Takes paths, gives ``Drawing`` or ``Mask``; the least recently used are let go beyond a number of files and of bytes. An
empty cache is what goes to another process.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

from pipelines.backends.mask import Mask, open_mask
from pipelines.labels.annotation_files import RASTER_SUFFIXES, XML_SUFFIX
from pipelines.labels.annotation_xml import read_xml
from pipelines.labels.drawing import Drawing
from pipelines.labels.geojson import read_geojson
from pipelines.slides.slide import SlideError

FILES, TOTAL_BYTES = 512, 512 << 20
"""Kept files, more than slides are open at once, as each mask holds a file of its own open; and their memory."""


@contextlib.contextmanager
def damaged_is_slide_error(path: Path) -> Iterator[None]:
    """Whatever is raised inside is the fault of the file: of a damaged one, libraries raise anything."""
    try:
        yield
    except SlideError:
        raise
    except Exception as fault:
        text = f"{type(fault).__name__}: {fault}".strip(": ")
        raise SlideError(f"annotation {path} is damaged ({text}). Export it again") from fault


def read_annotation(path: Path) -> Drawing | Mask:
    """Return what a file of annotations holds, by its suffix. Raises SlideError where it cannot be read."""
    suffix = path.suffix.lower()
    if suffix in RASTER_SUFFIXES:
        return open_mask(path)
    return read_xml(path) if suffix == XML_SUFFIX else read_geojson(path)


class _Reading:
    """Lock of a file that is being read, and the threads that need it."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.threads = 0


class AnnotationCache:
    """Safe in many threads; two threads that need the same file read it once.

    Args:
        files, total_bytes: how many files, and how much memory, are kept; the latest is kept whatever its size.
    """

    def __init__(self, files: int = FILES, total_bytes: int = TOTAL_BYTES) -> None:
        self._files, self._total_bytes = files, total_bytes
        self._lock = Lock()
        self._kept: OrderedDict[Path, Drawing | Mask] = OrderedDict()
        self._reading: dict[Path, _Reading] = {}

    def get(self, path: Path) -> Drawing | Mask:
        """Return the annotation in ``path``. Raises SlideError where it is damaged, however that shows."""
        with self._lock:
            if path in self._kept:
                self._kept.move_to_end(path)
                return self._kept[path]
            reading = self._reading.setdefault(path, _Reading())
            reading.threads += 1
        try:
            with reading.lock:
                with self._lock:
                    if path in self._kept:
                        return self._kept[path]
                with damaged_is_slide_error(path):
                    annotation = read_annotation(path)
                with self._lock:
                    self._kept[path] = annotation
                    self._let_go()
                return annotation
        finally:
            with self._lock:
                reading.threads -= 1
                if not reading.threads:
                    del self._reading[path]

    def _let_go(self) -> None:
        kept_bytes = sum(annotation.nbytes for annotation in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > self._files or kept_bytes > self._total_bytes):
            # a mask's file is closed when the last thread that reads from it drops it
            kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    def __reduce__(self) -> tuple[type[AnnotationCache], tuple[int, int]]:
        return AnnotationCache, (self._files, self._total_bytes)
