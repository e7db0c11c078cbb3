"""The part of a rank in the end of its run: signals that ask it to stop, and which rank prints why a run failed.

Takes this rank's placement, settings and run folder; gives the watchdog that the engine and the loop report to, and for
every exception whether this rank is the one to print it.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import traceback
from pathlib import Path
from types import FrameType

from app.launch.place import RankPlace
from app.launch.watchdog import Watchdog
from app.settings.cli import RunError
from parallel.comm.communicator import CommunicationError
from parallel.comm.torch_comm import is_lost_peer
from parallel.engine.step import EngineFault
from parallel.profile.gpu import lacks_memory
from parallel.schedule.text import describe_fault
from pipelines.slides.slide import SlideError

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Interrupt:
    """The request to stop a run, remembered.

    A second Ctrl-C ends the process at once, as a user who presses it twice expects.
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
    """The watchdog of this rank, started, and what the rank says when it fails. A run on one rank has a watchdog that
    watches nobody.

    Args:
        timeout_s: how long an action, or waiting for the other ranks, may take.
        fault_file: the same for all ranks of this attempt, and not there yet.
        interrupt: told when the launcher asks this process to end.
    """

    def __init__(self, placement: RankPlace, timeout_s: float, fault_file: Path, interrupt: Interrupt) -> None:
        self._communicator = placement.communicator
        self._several = self._communicator.world > 1
        self._file = fault_file
        self._interrupt = interrupt
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
