"""Start the ranks of a run on this machine, as processes of torch's elastic launcher.

Takes a command; every rank runs it with RANK, WORLD_SIZE, LOCAL_RANK as under ``torchrun``, and the file they meet in
in its environment. Signals are handed to the ranks rather than ending them, so that they finish their step and save.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from parallel.comm.torch_rendezvous import KEY, PRIVATE_STORE, loopback_variables

POLL_S = 0.1
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

log = logging.getLogger(__name__)


def launch_ranks(
    ranks: int, command: Sequence[str], max_restarts: int = 0, ranks_after: Callable[[int], int] | None = None
) -> int:
    """Run ``command`` in ``ranks`` processes and wait for them; the first failing rank ends all others.

    Args:
        max_restarts: how often all ranks are started again after one has failed. Not once a signal has come: who asked
            the run to stop is not to see it start.
        ranks_after: ranks of an attempt that failed -> those of the next; None: the same number.

    Returns:
        0 when every rank ended well, the exit code of the first rank that failed otherwise (128 + n after signal n); of
        the last attempt.
    """
    # A rank that fails says why itself; the launcher's log would bury it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    codes: list[int] = []
    asked_to_stop = threading.Event()

    def launch() -> None:
        here = ranks
        for restart in range(max_restarts + 1):
            codes.append(_launch_once(here, command))
            if not codes[-1] or restart == max_restarts or asked_to_stop.is_set():
                return
            before, here = here, ranks_after(here) if ranks_after else here
            on = "" if here == before else f", on {here} ranks in place of {before}"
            log.warning("a rank ended with exit code %d: restart %d of %d%s", codes[-1], restart + 1, max_restarts, on)

    others = set(psutil.Process().children())

    def hand_on(number: int, frame: FrameType | None) -> None:
        asked_to_stop.set()
        for rank in set(psutil.Process().children()) - others:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)

    # The launcher takes over the signals of the thread it runs in only if that is the main thread.
    thread = threading.Thread(target=launch, name="launcher")
    before = {number: signal.signal(number, hand_on) for number in HANDED_ON}
    try:
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return codes[-1] if codes else 1


def _launch_once(ranks: int, command: Sequence[str]) -> int:
    # Torch's rendezvous, its agent's own store, listens on every address and unpickles what it is handed. A file in a
    # folder that is this user's alone has no port.
    with tempfile.TemporaryDirectory(prefix="megatile-ranks-") as name:
        folder = Path(name)
        logs = folder / "logs"
        logs.mkdir()
        key = secrets.token_hex()
        context = start_processes(
            "rank",
            command[0],
            dict.fromkeys(range(ranks), tuple(command[1:])),
            {rank: _environment(rank, ranks, folder / "store", key) for rank in range(ranks)},
            DefaultLogsSpecs(str(logs)),
        )
        try:
            result = context.wait(period=POLL_S)
        finally:
            context.close()
    assert result is not None
    if not result.failures:
        return 0
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode


def _environment(rank: int, ranks: int, store: Path, key: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        PRIVATE_STORE: str(store),
        KEY: key,
        **loopback_variables(),
    }
