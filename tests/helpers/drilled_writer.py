"""The process that writes checkpoints, held up in the second one: before its rename, or between that and the flush of
the folder. Where, and what file to touch then, are in the environment.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from app.checkpoint import writer_process as checkpoint_writer_process

HELD_AT = 2
fsync, written = os.fsync, [0]


def held_fsync(descriptor: int) -> None:
    """Of a file: everything is written, nothing renamed. Of a folder: it is renamed."""
    of_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
    written[0] += not of_folder
    if written[0] == HELD_AT and of_folder == (os.environ["HELD_WHERE"] == "renamed"):
        Path(os.environ["HELD_MARKER"]).touch()
        time.sleep(600)
    fsync(descriptor)


if __name__ == "__main__":
    os.fsync = held_fsync
    checkpoint_writer_process.main()
