"""Start the ranks of a run on this machine, each forked from one process that has loaded what all of them need.

``RankServer`` is that process, seen from the launcher; ``rank_server`` is its program. Ranks have RANK, WORLD_SIZE,
LOCAL_RANK in their environment as under ``torchrun``, and the file they meet in.
Signals are handed to the ranks rather than ending them, so that they finish their step and save. No torch is loaded
here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from parallel.comm.rank_server import HANDED_ON, MESSAGE_BYTES

PRIVATE_STORE = "MEGATILE_STORE"
"""Variable: a file in a folder that only this user can enter, the store of ranks that a ``RankServer`` has forked."""
KEY = "MEGATILE_KEY"
"""Variable: the key of a run, one for each attempt; it lies in no file."""
STARTED_BY_US = "MEGATILE_RANK"
"""Variable: process number of the rank server, for the ranks that it forked; the launcher has prepared their data."""

POLL_S = 0.1
END_S = 30.0
"""Time for ranks to end once another has failed; then they are killed."""

log = logging.getLogger(__name__)


class RankServer:
    """A process that loads modules once and forks ranks; it ends with this object, or with the launcher.

    Args:
        command: module that each rank runs as ``python -m`` does, and the arguments of it.
        loads: modules that the ranks import.

    Attributes:
        pid: its process number.
        is_loaded: it has loaded everything.
        ranks: process numbers of the ranks, in the order of ``start``; none while it loads.
        codes: process number of a rank that has ended -> exit code, negative after a signal; in the order of ending.
    """

    def __init__(self, command: Sequence[str], loads: Sequence[str]) -> None:
        # A message is one packet: neither side reads half of one.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = [sys.executable, "-m", "parallel.comm.rank_server", str(theirs.fileno()), ",".join(loads)]
            self._process = subprocess.Popen([*program, *command], pass_fds=[theirs.fileno()], start_new_session=True)
        self.pid = self._process.pid
        self.is_loaded = False
        self.ranks: list[int] = []
        self.codes: dict[int, int] = {}
        self._asked = 0
        self._requests: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        if not self.is_loaded:
            self._process.kill()
        self._process.wait()

    def launch(self, ranks: int, max_restarts: int = 0, ranks_after: Callable[[int], int] | None = None) -> int:
        """Run the command on ``ranks`` ranks and wait for them; the first failing rank ends all others.

        Args:
            max_restarts: how often all ranks are started again after one has failed. Not once a signal has come: who
                asked the run to stop is not to see it start.
            ranks_after: ranks of an attempt that failed -> those of the next; None: the same number.

        Returns:
            0 when every rank ended well, the exit code of the first rank that failed otherwise (128 + n after signal
            n); of the last attempt.
        """
        signals: list[int] = []
        before = {number: signal.signal(number, lambda number, _: signals.append(number)) for number in HANDED_ON}
        try:
            for restart in range(max_restarts + 1):
                code = self._launch_once(ranks, signals)
                if not code or restart == max_restarts or signals:
                    break
                previous, ranks = ranks, ranks_after(ranks) if ranks_after else ranks
                on = "" if ranks == previous else f", on {ranks} ranks in place of {previous}"
                log.warning("a rank ended with exit code %d: restart %d of %d%s", code, restart + 1, max_restarts, on)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return code

    def _launch_once(self, ranks: int, signals: Sequence[int]) -> int:
        # Torch's rendezvous, its agent's own store, listens on every address and unpickles what it is handed. A file
        # in a folder that is this user's alone has no port.
        with tempfile.TemporaryDirectory(prefix="megatile-ranks-") as folder:
            for environment in environments(ranks, Path(folder), self.pid):
                self.start(environment)
            handed = 0
            try:
                while self.are_running:
                    self.poll()
                    if signals and not self.is_loaded:
                        return 128 + signals[0]
                    if len(self.ranks) == ranks:
                        for number in signals[handed:]:
                            self.signal(number)
                            handed += 1
                code = next(filter(None, self.codes.values()), 0)
            finally:
                self.end()
            return code if code >= 0 else 128 - code

    @property
    def are_running(self) -> bool:
        """Return whether the ranks start or run; False once one has failed or all have ended."""
        if len(self.ranks) < self._asked:
            return True
        return len(self.codes) < self._asked and not any(self.codes.values())

    def start(self, environment: Mapping[str, str]) -> None:
        """Ask for a rank with this environment; ``poll`` starts it once everything is loaded."""
        self._requests.append(json.dumps(dict(environment)).encode())
        self._asked += 1

    def poll(self) -> None:
        """Wait for news of the ranks, ``POLL_S`` at most."""
        with contextlib.suppress(ConnectionError):  # the server has ended; what it said before comes below
            while self.is_loaded and self._requests:
                self._socket.send(self._requests.pop(0))
        if not select.select([self._socket], [], [], POLL_S)[0]:
            return
        try:
            message = self._socket.recv(MESSAGE_BYTES)
        except ConnectionError:  # said once, before the messages that are still there
            return
        match json.loads(message or "null"):
            case [rank, code]:
                self.codes[rank] = code
            case [rank]:
                self.ranks.append(rank)
            case []:
                self.is_loaded = True
            case None:  # the server has ended: ask the ranks to end, and take it for the rank that failed
                self.signal(signal.SIGTERM)
                self.ranks, self.codes, self._asked = [self.pid], {self.pid: self._process.wait() or 1}, 1

    def signal(self, number: int) -> None:
        """Send a signal to the ranks that have not ended."""
        for rank in self.ranks:
            if rank not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, number)

    def end(self) -> None:
        """End the ranks, by SIGTERM and after ``END_S`` by SIGKILL, and forget them."""
        self._asked -= len(self._requests)
        self._requests.clear()
        for number in (signal.SIGTERM, signal.SIGKILL):
            end_s = time.monotonic() + END_S
            self.signal(number)
            while len(self.codes) < self._asked and time.monotonic() < end_s:
                self.poll()
        self.ranks, self.codes, self._asked = [], {}, 0


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill ``process``, if it still runs, and all that it started: ranks have sessions of their own."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for each in (*root.children(recursive=True), root):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def environments(ranks: int, folder: Path, server: int) -> Iterator[dict[str, str]]:
    """Yield the environment of each rank.

    Args:
        folder: of this attempt alone.
        server: process number of the rank server.
    """
    common = {**os.environ, **loopback_variables(), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common |= {PRIVATE_STORE: str(folder / "store"), KEY: secrets.token_hex(), STARTED_BY_US: str(server)}
    for rank in range(ranks):
        yield common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def loopback_variables() -> dict[str, str]:
    """Return the variables that keep Gloo and NCCL on the loopback interface; empty on a host without one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == "::1" or each.address.startswith("127.") for each in addresses):
            return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), name)
    return {}
