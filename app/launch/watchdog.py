"""A rank's side of its guardian, the process that tells what became of the rank when the rank cannot.

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
import time
from collections.abc import Callable
from pathlib import Path

from app.launch.progress_record import AT_REST, CLOSED, LOST, SPOKEN, ProgressRecord
from app.launch.rank_fault import say_first
from parallel.schedule.action import Schedule

STOPPED_S = 20.0
ENDED_BY_OTHERS_S = 35.0
"""How long a rank that lost another waits to be ended: longer than a guardian takes to name a rank that is stuck."""
AFTER_MESSAGE_S = 3.0
"""The launcher should see the rank that failed before those that merely lost it."""
ASKED_S = 2.0
"""A rank asked to end still waits this long for the message: the launcher may have been quicker than who says it."""
GOODBYE_S = 5.0


class Watchdog:
    """Watches over this process, which is ``rank``.

    Args:
        rank: its number in the run.
        stuck_s: how long one action may take before the rank is given up; 30 s more where it waits for others, and
            outside of actions until ``rest``.
        stopped_s: how long the rank may be stopped by a signal; ``stuck_s`` if that is less.
        fault_file: not there yet, the same for all ranks of the run: the first to fail writes the message there, the
            others keep silent and end within 20 s. Without it every rank speaks for itself.
    """

    def __init__(
        self,
        rank: int,
        *,
        stuck_s: float,
        stopped_s: float = STOPPED_S,
        fault_file: Path | None = None,
    ) -> None:
        self._where = ProgressRecord()
        self._process: subprocess.Popen[bytes] | None = None
        self._fault_file = fault_file
        self._settings = {
            "pid": os.getpid(),
            "rank": rank,
            "descriptor": self._where.descriptor,
            "stuck_s": stuck_s,
            "stopped_s": min(stopped_s, stuck_s),
            "fault_file": str(fault_file) if fault_file else None,
        }
        self.at = self._where.at
        """``at(position, waiting=False, shapes="")`` before every action; position in this rank's list."""
        self.step = self._where.step
        """``step(number)`` at the beginning of every step, from 0, before its data are waited for."""

    def start(self) -> None:
        """Begin to watch. Returns at once; what happens before the guardian is up is told all the same."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "app.launch.watchdog_process", json.dumps(self._settings)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(self._where.descriptor,),
            start_new_session=True,  # launchers end ranks by their process group
        )
        # Python ends in order: whatever made it end has been said.
        atexit.register(self.close)

    def follow(self, schedule: Schedule) -> None:
        """From now on the positions given to ``at`` are those in ``schedule``, all ranks' actions of a step."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        texts = {rank: [str(action) for action in actions] for rank, actions in schedule.items()}
        with contextlib.suppress(BrokenPipeError):  # somebody ended it; that is no reason to end the run
            self._process.stdin.write(json.dumps(texts).encode() + b"\n")
            self._process.stdin.flush()

    def rest(self) -> None:
        """The step is over. Until the next begins, the rank may take as long as it likes."""
        self._where.at(AT_REST)

    @property
    def steps(self) -> int:
        """Number of the step last begun, from 0; -1 before the first."""
        return self._where.read().step

    def speak(self, message: str | None) -> bool:
        """This rank fails: the guardian only sees to it that the process ends.

        Args:
            message: why; None when that is said elsewhere.

        Returns:
            False when another rank has spoken before: keep silent.
        """
        self._where.turn(SPOKEN)
        atexit.unregister(self.close)  # it stays until the process is gone, however long that takes
        return message is not None and say_first(message, self._fault_file)

    def await_end(self, asked: Callable[[], bool]) -> bool:
        """This rank has lost another, which is named elsewhere: wait to be ended.

        Args:
            asked: True once the launcher has asked this process to end.

        Returns:
            True when the message has been said elsewhere: end in silence. False when nobody seems to know.
        """
        self._where.turn(LOST)
        deadline_s, said, ending = time.monotonic() + ENDED_BY_OTHERS_S, False, False
        while time.monotonic() < deadline_s and not (said and ending):
            if not said and self._fault_file and self._fault_file.exists():
                deadline_s, said = time.monotonic() + AFTER_MESSAGE_S, True
            if not ending and asked():
                deadline_s, ending = min(deadline_s, time.monotonic() + ASKED_S), True
            time.sleep(0.05)
        return said or ending

    def close(self) -> None:
        """The rank ends in order; the guardian goes. Does nothing after ``speak`` or when called again."""
        if self._process is None or self._where.read().phase == SPOKEN:
            return
        atexit.unregister(self.close)
        self._where.turn(CLOSED)
        process, self._process = self._process, None
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:  # stopped, or the machine is out of memory
            process.kill()
            process.wait()
