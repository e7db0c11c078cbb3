"""A run's side of the process that writes its checkpoints.

Takes a shared buffer; writes checkpoints that are in it, one at a time, and tells what went wrong. If the process is
ended by somebody, the checkpoint it was at and those that follow are written here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from app.checkpoint.atomic_file import Span
from app.checkpoint.writer_process import write_checkpoint
from app.launch.watchdog_process import describe_status

log = logging.getLogger(__name__)

MODULE = "app.checkpoint.writer_process"
GOODBYE_S = 5.0


class CheckpointWriter:
    """The process that writes, which lives until ``close`` or as long as the thread that makes this one.

    Args:
        descriptor: of the buffer that checkpoints are in.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(os.getpid()), str(descriptor)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor,),
            start_new_session=True,  # a signal to the group of the run is for the run
        )

    @property
    def pid(self) -> int | None:
        """Return the process's number; None once it is gone."""
        return self._process.pid if self._process else None

    def write(self, path: Path, spans: Sequence[Span], also: Path | None) -> None:
        """Write parts ``spans`` of the buffer as ``path``, and as ``also`` too; return when they are on the disk.

        Raises:
            OSError: they could not be written; the file before is still there.
        """
        job = {"path": str(path.absolute()), "spans": spans, "also": str(also.absolute()) if also else None}
        answer = self._ask(json.dumps(job)) if self._process else None
        if answer is None:
            write_checkpoint(self._descriptor, job)
        elif "errno" in (reply := json.loads(answer)):
            raise OSError(reply["errno"], reply["reason"])

    def close(self) -> None:
        """Let the process go; nothing may be being written."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:  # stopped, or the disk answers no more
            process.kill()
            process.wait()
        process.stdout.close()

    def _ask(self, job: str) -> bytes | None:
        """Return the answer of the process; None when it is gone, which is told once."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(job.encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if answer.endswith(b"\n"):
            return answer
        code = process.wait()
        self.close()
        reason, _ = describe_status(-code if code < 0 else code << 8)
        log.warning(
            "the process that writes checkpoints %s; the run goes on and writes them itself, this one included", reason
        )
        return None
