"""The process that puts checkpoints on the disk while the run goes on training.

Takes the number of its parent and the descriptor of a shared buffer on its command line; then, on standard input, one
job a line: where to, and which parts of the buffer. Answers each with one line: how long it took, or why it failed.
Ends with its input, or with its parent, however that ends: no run that follows finds it writing. Imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from app.checkpoint.atomic_file import link_file, write_spans
from app.launch.priority import let_other_sessions_first

PR_SET_PDEATHSIG = 1


def write_checkpoint(descriptor: int, job: dict[str, Any]) -> None:
    """Write the file of ``job``, and give it its second name if it has one.

    Args:
        descriptor: of the buffer.
        job: ``path``; ``spans`` of the buffer; ``also``, a second name, or None.

    Raises:
        OSError: it could not be written; the file before it is still there.
    """
    path = Path(job["path"])
    write_spans(path, descriptor, [(offset, length) for offset, length in job["spans"]])
    if job["also"] is not None:
        link_file(path, Path(job["also"]))


def die_with(parent: int) -> None:
    """Be killed when ``parent``, the process that started this one, is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was quicker
        sys.exit(0)


def serve(descriptor: int) -> None:
    """Do the jobs of standard input until it ends."""
    for line in sys.stdin:
        begun = time.monotonic()
        try:
            write_checkpoint(descriptor, json.loads(line))
            answer: dict[str, Any] = {"seconds": time.monotonic() - begun}
        except OSError as fault:
            answer = {"errno": fault.errno, "reason": fault.strerror or str(fault)}
        print(json.dumps(answer), flush=True)


def main() -> None:
    """Serve the parent and the buffer that the command line names."""
    die_with(int(sys.argv[1]))
    # What asks the run to stop is for the run, which waits for the checkpoint under way.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    let_other_sessions_first()
    serve(int(sys.argv[2]))


if __name__ == "__main__":
    main()
