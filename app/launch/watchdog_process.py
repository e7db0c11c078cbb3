"""The process beside a rank that reports for it when it cannot: killed, crashed, stopped, or stuck.

Takes settings as JSON on its command line, and the schedule on standard input, which stays open as long as the rank
lives. Gives nothing while all is well and one message on standard error otherwise. A rank that is stopped or stuck is
killed, upon which what launched the run ends the others. Imports no torch: it is up in a twentieth of a second and
takes 15 MB.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

import psutil

from app.launch.progress_record import AT_REST, NO_ACTION, REPORTED, WATCHED, ProgressRecord, RankProgress, report_first
from parallel.schedule.action import Action, Schedule
from parallel.schedule.text import describe_fault

POLL_S = 0.25
PIPE_BYTES = 1 << 16
WAITING_LONGER_S = 30.0
"""A rank that waits for others is given this much more than the one it waits for, which is the one to name."""
ENDS_WITHIN_S = 20.0
"""Time for a rank to end once any rank of the run has said why the run failed."""
STATUS_S = 2.0
"""How long the exit status of a dead rank is looked for; whoever launched it may have taken it."""

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class WatchdogProcess:
    """The watch over one rank until it ends.

    Args:
        pid: of the rank.
        rank: its number.
        descriptor: of its ``ProgressRecord``.
        stuck_s: how long one action, or a step without actions, may take.
        stopped_s: how long the rank may be stopped while what launched it is not.
        fault_file: says that the run has failed; None when there is none to share.
    """

    def __init__(
        self, pid: int, rank: int, descriptor: int, stuck_s: float, stopped_s: float, fault_file: str | None
    ) -> None:
        self._pid = pid
        self._rank = rank
        self._record = ProgressRecord(descriptor)
        self._received = b""
        self._schedule: Schedule | None = None
        self._stuck_s = stuck_s
        self._stopped_s = stopped_s
        self._fault_file = Path(fault_file) if fault_file else None

    def run(self) -> None:
        """Watch; return when there is nothing left to watch."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while it was looked at
            if not self._watch(psutil.Process(self._pid)):
                return
        died_s, progress = time.time(), self._record.read()
        if progress.phase == WATCHED:
            self._tell_death(progress, died_s)

    def _watch(self, rank: psutil.Process) -> bool:
        """Return True once ``rank`` has ended, False once it was killed from here."""
        stopped_s = idle_s = failed_s = 0.0
        since_s, before_s = -1.0, time.monotonic()
        while self._is_connected() and rank.status() != psutil.STATUS_ZOMBIE:
            progress, now_s = self._record.read(of_device=True), time.monotonic()
            # Time in which this process was itself held, with the whole job, is nobody's fault.
            passed_s, before_s = min(now_s - before_s, 2 * POLL_S), now_s
            stopped = _is_stopped(rank)
            stopped_s = stopped_s + passed_s if stopped and not _is_paused(rank) else 0.0
            idle_s = idle_s + passed_s * (not stopped) if progress.since_s == since_s else 0.0
            since_s = progress.since_s
            if progress.phase == REPORTED or (self._fault_file and self._fault_file.exists()):
                failed_s += passed_s
            if failed_s >= ENDS_WITHIN_S:
                rank.kill()
                return False
            if progress.phase == WATCHED and stopped_s >= self._stopped_s:
                self._tell_stop(progress, stopped_s)
                rank.kill()
                return False
            if progress.phase == WATCHED and progress.position != AT_REST and idle_s >= self._limit_s(progress):
                self._tell_stuck(progress, idle_s)
                rank.kill()
                return False
        return True

    def _is_connected(self) -> bool:
        """Wait a while for the rank to say something; return False when it cannot any more."""
        if not select.select([sys.stdin], [], [], POLL_S)[0]:
            return True
        data = os.read(sys.stdin.fileno(), PIPE_BYTES)
        self._received += data
        if data.endswith(b"\n"):
            texts: dict[str, list[str]] = json.loads(self._received)
            self._schedule = {int(rank): [Action.parse(text) for text in texts[rank]] for rank in texts}
        return bool(data)

    def _limit_s(self, progress: RankProgress) -> float:
        # Where a step is at no action, it may be waiting for the sums over all ranks.
        return self._stuck_s + WAITING_LONGER_S * (progress.waiting or progress.position == NO_ACTION)

    def _tell_death(self, progress: RankProgress, died_s: float) -> None:
        reason, advice = describe_status(_exit_status(self._pid))
        self._say(progress, reason, advice, died_s)

    def _tell_stop(self, progress: RankProgress, stopped_s: float) -> None:
        self._say(
            progress,
            f"was stopped (SIGSTOP) for {stopped_s:.0f} s and is killed",
            "Others wait for a stopped rank without end. To pause a run, stop what launched it as well: then it may "
            "rest as long as it likes.",
        )

    def _tell_stuck(self, progress: RankProgress, idle_s: float) -> None:
        doing = "waited for another rank" if progress.waiting else "made no progress"
        self._say(
            progress,
            f"{doing}{' on its GPU' * progress.of_device} for {idle_s:.0f} s and is killed",
            "If a step may really take that long, raise --timeout-s; otherwise see what this rank does "
            "there with `py-spy dump` before the time is up.",
        )

    def _say(self, progress: RankProgress, reason: str, advice: str, died_s: float | None = None) -> None:
        message = describe_fault(
            self._schedule, self._rank, progress.position, progress.step, progress.shapes, reason, advice
        )
        if report_first(message, self._fault_file, died_s):
            with contextlib.suppress(OSError):  # nobody may be left to read it; the file has it
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
    """Return the status of a process that is ending, as waitpid would give it; None when its parent was quicker to take
    it."""
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


def _is_paused(process: psutil.Process) -> bool:
    """Return whether its parent is stopped too: the user paused the run."""
    parent = process.parent()
    return parent is not None and _is_stopped(parent)


def main() -> None:
    """Watch the rank that the command line names."""
    # What asks the rank to stop is for the rank; this process follows it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    WatchdogProcess(**json.loads(sys.argv[1])).run()


if __name__ == "__main__":
    main()
