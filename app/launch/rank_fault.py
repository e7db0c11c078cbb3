"""One report of a failed run: the first rank writes the run's fault file, whoever comes later keeps silent."""

from __future__ import annotations

import time
from pathlib import Path

TOGETHER_S = 0.4
"""MPICH kills all ranks within milliseconds of the first death; of deaths so close the earliest is the cause."""


def report_first(message: str, file: Path | None, died_s: float | None = None) -> bool:
    """Return True for the first of all ranks to call it; ``message`` is then in ``file``.

    Args:
        file: of the run, the same for all ranks and not there when they start. Without one, everybody is the first.
        died_s: ``time.time()`` when the rank that ``message`` is about was found dead. Of ranks that died almost at
            once the earliest is the first, whoever calls first.
    """
    if file is None:
        return True
    deaths = file.with_suffix(".deaths")
    try:
        if died_s is not None and not _died_first(died_s, deaths):
            return False
        with file.open("x") as new:  # exactly one of several can create it
            new.write(message + "\n")
    except FileExistsError:
        return False
    except OSError:
        return True  # a full or vanished disk must not silence the only message
    finally:
        if file.exists():
            deaths.unlink(missing_ok=True)
    return True


def _died_first(died_s: float, deaths: Path) -> bool:
    """Write the death down and return whether nobody died before: the launcher kills the others after the first."""
    with deaths.open("a") as log:
        log.write(f"{died_s!r}\n")  # short enough to be written whole
    time.sleep(TOGETHER_S)
    try:
        times = [float(line) for line in deaths.read_text().split()]
    except FileNotFoundError:
        return False  # the first has reported already
    return died_s == min(times)
