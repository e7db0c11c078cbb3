"""``failed_slides.csv``: the slides that were left out of a run, at which step, and why.

Takes (slide, step, error) from any thread or process, also of several ranks; gives a CSV with these columns. A lock on
the file makes an append one piece and the header appear once.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipelines.catalog.table import read_rows, write_rows
from pipelines.slides.slide import printable

COLUMNS = ("slide", "step", "error")


class FailedSlides:
    """The failures recorded at ``path``; the file appears with the first one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: set[tuple[str, str, str]] | None = None
        self._once = threading.Lock()

    def add_once(self, slide: str, step: str, error: str | BaseException) -> bool:
        """Append a failure unless its row was there when the first was added, or was added since; return whether not.
        For what fails again each time it is tried. Safe in threads."""
        row = (slide, step, _one_line(error))
        with self._once:
            if self._written is None:
                self._written = set(self.rows())
            if row in self._written:
                return False
            self.add(*row)
            self._written.add(row)
            return True

    def add(self, slide: str, step: str, error: str | BaseException) -> None:
        """Append one failure. Safe in threads and processes; a full disk raises ``OSError``.

        Args:
            slide: the slide's id.
            step: what was being done: open, tissue, tiles, read, ...
            error: message; line breaks become spaces, so that a row stays a line.
        """
        with names_file(self.path), self._locked() as descriptor:
            rows = [(slide, step, _one_line(error))]
            if os.fstat(descriptor).st_size == 0:
                rows.insert(0, COLUMNS)
            os.lseek(descriptor, 0, os.SEEK_END)
            _write(descriptor, rows)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return every failure, oldest first; none when there is no file."""
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            return [(row["slide"], row["step"], row["error"]) for row in read_rows(file)]

    def forget(self, slides: Collection[str]) -> None:
        """Take out the failures of these slides: they are about to be tried again."""
        if not self.path.exists():
            return
        with self._locked() as descriptor:
            kept = [row for row in self.rows() if row[0] not in slides]
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            if kept:
                _write(descriptor, [COLUMNS, *kept])
            else:
                self.path.unlink()  # whoever waits for the lock of this file looks for another

    @contextmanager
    def _locked(self) -> Iterator[int]:
        # One descriptor per use: flock excludes other descriptors, those of threads of this process included.
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if self._is_at_path(descriptor):
                    yield descriptor
                    return
            finally:
                os.close(descriptor)

    def _is_at_path(self, descriptor: int) -> bool:
        """False when ``forget`` has taken the file away while its lock was waited for."""
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False


def _one_line(error: str | BaseException) -> str:
    return printable(" ".join((str(error) or type(error).__name__).split()))


def _write(descriptor: int, rows: Sequence[Sequence[str]]) -> None:
    text = io.StringIO()
    write_rows(text, rows)
    data = text.getvalue().encode(errors="surrogateescape")  # of a file name that is not UTF-8
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def names_file(path: Path) -> Iterator[None]:
    """Let an ``OSError`` that names no file name ``path``."""
    try:
        yield
    except OSError as fault:
        if fault.filename is None:
            fault.filename = str(path)
        raise
