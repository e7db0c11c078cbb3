"""A rank's side of its watchdog, signals that ask it to stop, and which rank prints why a run failed.

Takes the rank's placement and settings, and the schedule once it is known; the engine reports every action, the loop
every step. A rank that is killed, crashes, is stopped or stuck is named once, with action, stage, shapes and the grid
of actions; the launcher then ends the others.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from app.launch.place import RankPlacement
from app.launch.watchdog_process import AT_REST, CLOSED, LOST, NO_ACTION, REPORTED, ProgressRecord, report_first
from app.settings.cli import RunError
from parallel.comm.communicator import CommunicationError
from parallel.comm.torch_comm import is_lost_peer
from parallel.engine.step import EngineFault
from parallel.profile.gpu import lacks_memory
from parallel.schedule.action import Schedule
from parallel.schedule.text import describe_fault
from pipelines.slides.slide import SlideError

POLL_S = 0.25

Place = tuple[int, bool, str]
"""Position, waiting and shapes, as ``ProgressRecord.at`` takes them."""
STOPPED_S = 20.0
ENDED_BY_OTHERS_S = 35.0
"""How long a rank that lost another waits to be ended: longer than a watchdog takes to name a rank that is stuck."""
AFTER_MESSAGE_S = 3.0
"""The launcher should see the rank that failed before those that merely lost it."""
ASKED_S = 2.0
"""A rank asked to end still waits this long for the message: the launcher may have been quicker than who says it."""
GOODBYE_S = 5.0
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class DeviceProgress:
    """Records the progress of ``device`` and of the host."""

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


class Watchdog:
    """The watch over this process, which is ``rank``.

    Args:
        stuck_s: how long one action may take before the rank is given up; 30 s more where it waits for others, and
            outside of actions until ``rest``.
        fault_file: not there yet, the same for all ranks of the run: the first to fail writes the message there, the
            others keep silent and end within 20 s. Without it every rank reports for itself.
        device: that the rank computes on; a GPU's own progress is recorded, too.

    Attributes:
        at: ``at(position, waiting=False, shapes="")`` before every action; position in this rank's list.
        step: ``step(number)`` at the beginning of every step, from 0, before its data are waited for.
    """

    def __init__(
        self, rank: int, *, stuck_s: float, fault_file: Path | None = None, device: torch.device | None = None
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
            "stopped_s": min(STOPPED_S, stuck_s),
            # The watchdog runs in another folder, in which a relative path is another file.
            "fault_file": str(fault_file.absolute()) if fault_file else None,
        }
        self.at = self._device.at if self._device else self._progress.at
        self.step = self._progress.step

    def start(self) -> None:
        """Begin to watch, in another process; what happens before it is up is reported, too."""
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
        self._progress.set_phase(REPORTED)
        atexit.unregister(self.close)  # it stays until the process is gone, however long that takes
        return message is not None and report_first(message, self._fault_file)

    def wait_for_abort(self, asked: Callable[[], bool]) -> bool:
        """Wait to be ended: this rank has lost another, which is named elsewhere.

        Args:
            asked: True once the launcher has asked this process to end.

        Returns:
            True when another rank has reported why: end in silence. False when none has.
        """
        self._progress.set_phase(LOST)
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
        self._progress.set_phase(CLOSED)
        process, self._process = self._process, None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # with what ``follow`` could not write
            process.stdin.close()
        try:
            process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:  # stopped, or the machine is out of memory
            process.kill()
            process.wait()


class Interrupt:
    """The request to stop a run, remembered.

    A second Ctrl-C ends the process immediately, as a user who presses it twice expects.
    """

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Take over the signals of ``STOPPING``; from the main thread only."""
        for number in STOPPING:
            signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


class RankGuard:
    """The watchdog of this rank, started, and the error that the rank reports. On one rank the watchdog does not start.

    Args:
        timeout_s: how long an action, or waiting for the other ranks, may take.
        fault_file: the same for all ranks of this attempt, and not there yet.
        interrupt: records that the launcher asks this process to end.
    """

    def __init__(self, placement: RankPlacement, timeout_s: float, fault_file: Path, interrupt: Interrupt) -> None:
        self._communicator, self._file, self._interrupt = placement.communicator, fault_file, interrupt
        self._several = self._communicator.world > 1
        self._told_elsewhere = False
        self.watchdog = Watchdog(
            self._communicator.rank,
            stuck_s=timeout_s,
            fault_file=self._file if self._several else None,
            device=placement.device if self._several else None,
        )
        if self._several:
            self.watchdog.start()

    def explain(self, fault: Exception) -> str:
        """Return why the run fails: ``fault``, or what is behind it when this rank merely lost another. Then wait to be
        ended by the launcher, for half a minute at most."""
        if self._lost_another(fault):
            self._told_elsewhere = self.watchdog.wait_for_abort(lambda: self._interrupt.requested)
            with contextlib.suppress(OSError):
                return self._file.read_text().rstrip()
        if self.is_expected(fault) or not self._several:
            return str(fault)
        reason = f"failed ({type(fault).__name__}: {fault})"
        advice = "".join(traceback.format_exception(fault)).rstrip()
        return describe_fault(None, self._communicator.rank, None, self.watchdog.steps, "", reason, advice)

    def is_expected(self, fault: Exception) -> bool:
        """Return whether the text of ``fault`` says all there is to say; otherwise its traceback is needed."""
        return (
            isinstance(fault, (RunError, SlideError, EngineFault)) or lacks_memory(fault) or self._lost_another(fault)
        )

    def should_print(self, fault: Exception) -> bool:
        """Return whether this rank is to print ``fault``; False when it ends in silence, as another rank has said why.
        Either way this process now has to end."""
        if not self._several:
            return True
        usage = isinstance(fault, (ValueError, OSError, MemoryError))  # what the command line tells without a traceback
        message = str(fault) if usage else self.explain(fault)
        first = self.watchdog.report(None if self._told_elsewhere else message)
        # After the message is out: ranks that wait in the communicator's own farewell would wait for each other.
        atexit.register(self._communicator.abort)
        return first

    def _lost_another(self, fault: Exception) -> bool:
        return self._several and (isinstance(fault, CommunicationError) or is_lost_peer(fault))
