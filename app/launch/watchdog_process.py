"""The process next to a rank that reports for it when it cannot: killed, crashed, stopped, or stuck.

Takes settings as JSON on its command line, and the schedule on standard input, which stays open until the rank ends.
The rank records step, action and shapes before every action, in under two microseconds, in memory that outlives
it. The first rank that fails writes the run's fault file; later ones print nothing. A rank that is stopped or stuck is
killed, upon which the launcher ends the others. Imports no torch: it starts in 0.05 s and takes 15 MB.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from parallel.schedule.action import Action, Schedule
from parallel.schedule.text import describe_fault

NO_ACTION = -1
"""Position of a rank that is in a step and at none of its actions."""
AT_REST = -2
"""Position of a rank between two steps, where it may take as long as it likes."""
_WITH_HOST = -3
"""Position of a device that is not behind the host, or that is not recorded."""

WATCHED, LOST, REPORTED, CLOSED = range(4)
"""A rank at work; one that lost another and waits to be ended; one that has said why it ends; one that ended well."""

SHAPES_BYTES = 256
_ACTION = struct.Struct(f"=qd?{SHAPES_BYTES}s")
_STEP = struct.Struct("=q")
_PHASE = struct.Struct("=b")
_STEP_AT = _ACTION.size
_PHASE_AT = _STEP_AT + _STEP.size
_DEVICE_AT = _PHASE_AT + _PHASE.size
_SIZE = _DEVICE_AT + _ACTION.size
TOGETHER_S = 0.4
"""MPICH kills all ranks within milliseconds of the first death; of deaths so close the earliest is the cause."""
POLL_S = 0.25
PIPE_BYTES = 1 << 16
WAITING_LONGER_S = 30.0
"""A rank that waits for others is given this much more than the one it waits for, which is the one to name."""
ENDS_WITHIN_S = 20.0
"""Time for a rank to end once any rank of the run has said why the run failed."""
STATUS_S = 2.0
"""How long the exit status of a dead rank is looked for; its launcher may have taken it."""
STOPPED_ADVICE = (
    "Others wait for a stopped rank without end. To pause a run, stop what launched it as well: then it may rest as "
    "long as it likes."
)
STUCK_ADVICE = (
    "If a step may really take that long, raise --timeout-s; otherwise see what this rank does there with `py-spy "
    "dump` before the time is up."
)
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class RankProgress(NamedTuple):
    """The last entry of a rank: what it is doing.

    Attributes:
        position: in the rank's list of actions, or NO_ACTION or AT_REST.
        since_s: ``time.monotonic()`` when it began, the same clock in all processes of a machine.
        waiting: it needs other ranks to go on.
        shapes: of the tensors at hand, cut after SHAPES_BYTES bytes.
        step: from 0; -1 before the first.
        phase: WATCHED, LOST, REPORTED or CLOSED.
        of_device: the first four are of its GPU, which is behind the host.
    """

    position: int
    since_s: float
    waiting: bool
    shapes: str
    step: int
    phase: int
    of_device: bool = False


class ProgressRecord:
    """The record of one rank, shared by two processes.

    Args:
        descriptor: of the record made by another process; None makes a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        is_new = descriptor is None
        if descriptor is None:
            # Of no disk: there, the kernel writing the page back could hold up the rank that changes it. And of no
            # folder: /dev/shm may be small, full or read-only.
            descriptor = os.memfd_create("progress_record")
            os.ftruncate(descriptor, _SIZE)
        self.descriptor, self._memory = descriptor, mmap.mmap(descriptor, _SIZE)
        if is_new:
            self.at(AT_REST)
            self.at_device(None)
            _STEP.pack_into(self._memory, _STEP_AT, -1)

    def at(self, position: int, waiting: bool = False, shapes: str = "") -> None:
        """Record that the rank turns to the action at ``position``."""
        _ACTION.pack_into(self._memory, 0, position, time.monotonic(), waiting, shapes.encode())

    def at_device(self, place: tuple[int, bool, str] | None) -> None:
        """Record the position, waiting and shapes that the device has come to; None: it is not behind the host."""
        position, waiting, shapes = place or (_WITH_HOST, False, "")
        _ACTION.pack_into(self._memory, _DEVICE_AT, position, time.monotonic(), waiting, shapes.encode())

    def step(self, number: int) -> None:
        """Record that the rank begins step ``number``, from 0."""
        _STEP.pack_into(self._memory, _STEP_AT, number)
        self.at(NO_ACTION)

    def set_phase(self, phase: int) -> None:
        """Record the rank's ``phase``: what there is still to watch for."""
        _PHASE.pack_into(self._memory, _PHASE_AT, phase)

    def read(self, of_device: bool = False) -> RankProgress:
        """Return what was recorded last, of the host or, where it is behind, ``of_device``."""
        position, since_s, waiting, shapes = _ACTION.unpack_from(self._memory, _DEVICE_AT if of_device else 0)
        if position == _WITH_HOST:
            return self.read()
        (step,), (phase,) = _STEP.unpack_from(self._memory, _STEP_AT), _PHASE.unpack_from(self._memory, _PHASE_AT)
        text = shapes.rstrip(b"\0").decode(errors="ignore")
        return RankProgress(position, since_s, waiting, text, step, phase, of_device)


def report_first(message: str, file: Path | None, died_s: float | None = None) -> bool:
    """Return True for the first of all ranks to call it; ``message`` is then in ``file``.

    Args:
        file: of the run, the same for all ranks and not there when they start. Without one, everybody is the first.
        died_s: ``time.time()`` when the rank that ``message`` is about was found dead. Of ranks that died almost at
            once the earliest is the first, in whatever order they call.
    """
    if file is None:
        return True
    deaths = file.with_suffix(".deaths")
    try:
        if died_s is not None and not _died_first(died_s, deaths):
            return False
        with file.open("x", errors="backslashreplace") as new:  # exactly one of several can create it
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
    """Record the death and return whether it is the first: the launcher kills the others after that."""
    with deaths.open("a") as log:
        log.write(f"{died_s!r}\n")  # short enough to be written whole
    time.sleep(TOGETHER_S)
    try:
        times = [float(line) for line in deaths.read_text().split()]
    except FileNotFoundError:
        return False  # the first has reported already
    return died_s == min(times)


class WatchdogProcess:
    """The watch over one rank until it ends.

    Args:
        stuck_s: how long one action, or a step without actions, may take.
        stopped_s: how long the rank may be stopped while what launched it is not.
        fault_file: says that the run has failed; None when there is none to share.
    """

    def __init__(
        self, pid: int, rank: int, descriptor: int, stuck_s: float, stopped_s: float, fault_file: str | None
    ) -> None:
        self._pid, self._rank, self._stuck_s, self._stopped_s = pid, rank, stuck_s, stopped_s
        self._record = ProgressRecord(descriptor)
        self._received = b""
        self._schedule: Schedule | None = None
        self._fault_file = Path(fault_file) if fault_file else None

    def run(self) -> None:
        """Watch; return when there is nothing left to watch."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while it was looked at
            if not self._watch(psutil.Process(self._pid)):
                return
        died_s, progress = time.time(), self._record.read()
        if progress.phase == WATCHED:
            self._say(progress, *describe_status(_exit_status(self._pid)), died_s)

    def _watch(self, rank: psutil.Process) -> bool:
        """Return True once ``rank`` has ended, False once it was killed from here."""
        stopped_s = idle_s = failed_s = 0.0
        since_s, before_s = -1.0, time.monotonic()
        while self._is_connected() and rank.status() != psutil.STATUS_ZOMBIE:
            progress, now_s = self._record.read(of_device=True), time.monotonic()
            # Time in which this process was itself held, with the whole job, does not count.
            passed_s, before_s = min(now_s - before_s, 2 * POLL_S), now_s
            stopped = _is_stopped(rank)
            launcher = rank.parent() if stopped else None
            is_paused = launcher is not None and _is_stopped(launcher)  # the user stopped the run
            stopped_s = stopped_s + passed_s if stopped and not is_paused else 0.0
            idle_s = idle_s + passed_s * (not stopped) if progress.since_s == since_s else 0.0
            since_s = progress.since_s
            if progress.phase == REPORTED or (self._fault_file and self._fault_file.exists()):
                failed_s += passed_s
            if failed_s >= ENDS_WITHIN_S:
                break
            if progress.phase != WATCHED:
                continue
            if stopped_s >= self._stopped_s:
                self._say(progress, f"was stopped (SIGSTOP) for {stopped_s:.0f} s and is killed", STOPPED_ADVICE)
                break
            if progress.position != AT_REST and idle_s >= self._limit_s(progress):
                doing = "waited for another rank" if progress.waiting else "made no progress"
                where = " on its GPU" * progress.of_device
                self._say(progress, f"{doing}{where} for {idle_s:.0f} s and is killed", STUCK_ADVICE)
                break
        else:
            return True
        rank.kill()
        return False

    def _is_connected(self) -> bool:
        """Wait a while for the rank to say something; return False when it cannot any more."""
        if not select.select([sys.stdin], [], [], POLL_S)[0]:
            return True
        data = os.read(sys.stdin.fileno(), PIPE_BYTES)
        self._received += data
        if data.endswith(b"\n"):
            texts: dict[str, list[str]] = json.loads(self._received.splitlines()[-1])  # of new shares the newest
            self._received = b""
            self._schedule = {int(rank): [Action.parse(text) for text in texts[rank]] for rank in texts}
        return bool(data)

    def _limit_s(self, progress: RankProgress) -> float:
        # Where a step is at no action, it may be waiting for the sums over all ranks.
        return self._stuck_s + WAITING_LONGER_S * (progress.waiting or progress.position == NO_ACTION)

    def _say(self, progress: RankProgress, reason: str, advice: str, died_s: float | None = None) -> None:
        message = describe_fault(
            self._schedule, self._rank, progress.position, progress.step, progress.shapes, reason, advice
        )
        if report_first(message, self._fault_file, died_s):
            with contextlib.suppress(OSError):  # the reader may be gone; the file has it
                os.write(sys.stderr.fileno(), f"error: {message}\n".encode())


def describe_status(status: int | None) -> tuple[str, str]:
    """Return why a process ended, from what waitpid would give, and what to do about it."""
    if status is None:
        return "died", "It was killed or it crashed; its exit code was taken by what launched it, which may name it."
    if not os.WIFSIGNALED(status):
        code = os.waitstatus_to_exitcode(status)
        return f"ended with exit code {code} and said nothing", "Something in it called os._exit()."
    number = signal.Signals(os.WTERMSIG(status))
    if number == signal.SIGKILL:
        return "was killed (signal 9)", (
            "Unless you did, the system did, most often for lack of memory: see `dmesg` or the job's memory limit."
        )
    if number in CRASHES:
        advice = "A compiled library failed; PYTHONFAULTHANDLER=1 in the environment shows where it was called."
        if number in (signal.SIGSEGV, signal.SIGABRT):
            advice += " On CPUs it may be a convolution: try --no-channels-last."
        return f"crashed (signal {number.value}, {number.name})", advice
    return f"was ended by {number.name} (signal {number.value})", ""


def _exit_status(pid: int) -> int | None:
    """Return the status of a process that is ending, as of waitpid; None when its parent has taken it."""
    deadline_s = time.monotonic() + STATUS_S
    while time.monotonic() < deadline_s:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        if fields[0] in "ZX":
            return int(fields[-1])
        time.sleep(0.001)
    return None


def _is_stopped(process: psutil.Process) -> bool:
    """Return whether a signal has stopped it; one that a debugger holds is being looked at."""
    return bool(process.status() == psutil.STATUS_STOPPED)


def main() -> None:
    # What asks the rank to stop is for the rank; this process follows it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    WatchdogProcess(**json.loads(sys.argv[1])).run()


if __name__ == "__main__":
    main()
