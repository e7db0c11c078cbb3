"""A rank's side of its watchdog, the process that tells what became of the rank when the rank cannot.

Takes the rank's number and how long an action may take, the schedule once it is known; the engine tells it every
action, the loop every step. A rank that is killed, crashes, is stopped or stuck is named once, with action, stage,
shapes and the grid of actions; whatever launched the run then ends the others. A rank that ends in order is let go in
silence.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from app.launch.progress_record import AT_REST, CLOSED, LOST, NO_ACTION, REPORTED, ProgressRecord, report_first
from parallel.schedule.action import Schedule

if TYPE_CHECKING:
    import torch


POLL_S = 0.25

Place = tuple[int, bool, str]
"""Position, waiting and shapes, as ``ProgressRecord.at`` takes them."""


class DeviceProgress:
    """Records the progress of ``device`` beside that of the host.

    Args:
        device: a GPU.
    """

    def __init__(self, record: ProgressRecord, device: torch.device) -> None:
        self._record, self._device = record, device
        self._queued: deque[tuple[Any, Place]] = deque()
        self._reached: Place = (NO_ACTION, False, "")
        self._written: Place | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device progress", daemon=True)

    def at(self, position: int, waiting: bool = False, shapes: str = "") -> None:
        """Record that the host turns to the action at ``position``, and later that the GPU does."""
        self._record.at(position, waiting, shapes)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._queued.append((event, (position, waiting, shapes)))

    def look(self) -> None:
        """Record the last entry that the GPU has come to, if the host is ahead of it."""
        while self._queued and self._queued[0][0].query():
            self._reached = self._queued.popleft()[1]
        place = self._reached if self._queued else None
        if place != self._written:
            self._record.at_device(place)
            self._written = place

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, which may not have been started."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while not self._ended.wait(POLL_S):
            try:
                self.look()
            except RuntimeError:
                return  # the GPU has failed: the rank meets the same error, and the last place stays recorded


STOPPED_S = 20.0
ENDED_BY_OTHERS_S = 35.0
"""How long a rank that lost another waits to be ended: longer than a watchdog takes to name a rank that is stuck."""
AFTER_MESSAGE_S = 3.0
"""The launcher should see the rank that failed before those that merely lost it."""
ASKED_S = 2.0
"""A rank asked to end still waits this long for the message: the launcher may have been quicker than who says it."""
GOODBYE_S = 5.0


class Watchdog:
    """The watch over this process, which is ``rank``.

    Args:
        rank: its number in the run.
        stuck_s: how long one action may take before the rank is given up; 30 s more where it waits for others, and
            outside of actions until ``rest``.
        stopped_s: how long the rank may be stopped by a signal; ``stuck_s`` if that is less.
        fault_file: not there yet, the same for all ranks of the run: the first to fail writes the message there, the
            others keep silent and end within 20 s. Without it every rank reports for itself.
        device: that the rank computes on; a GPU's own progress is recorded, too.

    Attributes:
        at: ``at(position, waiting=False, shapes="")`` before every action; position in this rank's list.
        step: ``step(number)`` at the beginning of every step, from 0, before its data are waited for.
    """

    def __init__(
        self,
        rank: int,
        *,
        stuck_s: float,
        stopped_s: float = STOPPED_S,
        fault_file: Path | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._progress = ProgressRecord()
        self._device: DeviceProgress | None = None
        if device and device.type == "cuda":
            self._device = DeviceProgress(self._progress, device)
        self._process: subprocess.Popen[bytes] | None = None
        self._fault_file = fault_file
        self._settings = {
            "pid": os.getpid(),
            "rank": rank,
            "descriptor": self._progress.descriptor,
            "stuck_s": stuck_s,
            "stopped_s": min(stopped_s, stuck_s),
            "fault_file": str(fault_file) if fault_file else None,
        }
        self.at = self._device.at if self._device else self._progress.at
        self.step = self._progress.step

    def start(self) -> None:
        """Begin to watch. Returns at once; what happens before the process is up is told all the same."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "app.launch.watchdog_process", json.dumps(self._settings)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(self._progress.descriptor,),
            start_new_session=True,  # launchers end ranks by their process group
        )
        if self._device:
            self._device.start()
        # Python ends in order: whatever made it end has been said.
        atexit.register(self.close)

    def follow(self, schedule: Schedule) -> None:
        """Take the positions given to ``at`` from now on as those in ``schedule``, all ranks' actions of a step."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        texts = {rank: [str(action) for action in actions] for rank, actions in schedule.items()}
        with contextlib.suppress(BrokenPipeError):  # somebody ended it; that is no reason to end the run
            self._process.stdin.write(json.dumps(texts).encode() + b"\n")
            self._process.stdin.flush()

    def rest(self) -> None:
        """Record that the step is over. Until the next begins, the rank may take as long as it likes."""
        self._progress.at(AT_REST)

    @property
    def steps(self) -> int:
        """Return the number of the step last begun, from 0; -1 before the first."""
        return self._progress.read().step

    def report(self, message: str | None) -> bool:
        """Report that this rank fails; from now on the watchdog only sees to it that the process ends.

        Args:
            message: why; None when that is said elsewhere.

        Returns:
            False when another rank has reported before: keep silent.
        """
        self._progress.enter(REPORTED)
        atexit.unregister(self.close)  # it stays until the process is gone, however long that takes
        return message is not None and report_first(message, self._fault_file)

    def wait_for_abort(self, asked: Callable[[], bool]) -> bool:
        """Wait to be ended: this rank has lost another, which is named elsewhere.

        Args:
            asked: True once the launcher has asked this process to end.

        Returns:
            True when the message has been said elsewhere: end in silence. False when nobody seems to know.
        """
        self._progress.enter(LOST)
        deadline_s, reported, ending = time.monotonic() + ENDED_BY_OTHERS_S, False, False
        while time.monotonic() < deadline_s and not (reported and ending):
            if not reported and self._fault_file and self._fault_file.exists():
                deadline_s, reported = time.monotonic() + AFTER_MESSAGE_S, True
            if not ending and asked():
                deadline_s, ending = min(deadline_s, time.monotonic() + ASKED_S), True
            time.sleep(0.05)
        return reported or ending

    def close(self) -> None:
        """End the watch: the rank ends in order. Does nothing after ``report`` or when called again."""
        if self._process is None or self._progress.read().phase == REPORTED:
            return
        atexit.unregister(self.close)
        if self._device:
            self._device.close()
        self._progress.enter(CLOSED)
        process, self._process = self._process, None
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:  # stopped, or the machine is out of memory
            process.kill()
            process.wait()
