"""Program that loads modules once and forks ranks, which share its memory and start without loading them again.

``launch.RankServer`` starts it and sends one environment for each rank. It answers with the process number, and with
the exit code when the rank ends. A rank runs its command as ``python -m`` does, in a session of its own. The modules
may start no Python thread and open no GPU: a forked process has neither.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that the launcher sends on to the ranks; a batch system may send them to every process of a job."""
MESSAGE_BYTES = 1 << 20
POLL_S = 0.05


def serve(connection: socket.socket) -> dict[str, str] | None:
    """Fork a rank for each environment that arrives; return the environment in the rank, None once the launcher has
    gone. Until then those that have ended stay in the process table, where their watchdogs read how they ended."""
    running: set[int] = set()
    with contextlib.suppress(BrokenPipeError), warnings.catch_warnings():
        # Python 3.12 warns of threads of libraries. OpenBLAS ends its own for a fork, and those of jemalloc may stay.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        while True:
            if select.select([connection], [], [], POLL_S if running else None)[0]:
                message = connection.recv(MESSAGE_BYTES)
                if not message:
                    break
                child = os.fork()
                if not child:
                    environment: dict[str, str] = json.loads(message)
                    return environment
                running.add(child)
                connection.send(json.dumps([child]).encode())
            for child in sorted(running):
                if ended := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    running.remove(child)
                    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    connection.send(json.dumps([child, code]).encode())
    with contextlib.suppress(ChildProcessError):  # not every container has an init that would do it
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return None


def become_rank(environment: dict[str, str]) -> None:
    """Give this process what a new one has: a session, an environment, signals, and random numbers of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    with contextlib.suppress(OSError):  # the name that `top` shows
        Path("/proc/self/comm").write_text(f"rank {environment['RANK']}")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)


def run(connection: socket.socket, module: str, arguments: Sequence[str]) -> None:
    """Fork ranks until the launcher has ended; in each run ``module`` as ``python -m`` does."""
    connection.send(json.dumps([]).encode())
    environment = serve(connection)
    if environment is None:
        os._exit(0)
    connection.close()
    become_rank(environment)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Arguments: descriptor of the socket, modules to load, module that the ranks run, its arguments."""
    descriptor, loads, module, *arguments = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    gc.disable()
    for name in loads.split(","):
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # a collection writes to all that it looks at, which would end the sharing
    run(connection, module, arguments)


if __name__ == "__main__":
    main()
