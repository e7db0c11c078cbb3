"""Start the ranks of a run on this machine through torch's elastic launcher.

Takes a command; every rank runs it with RANK, WORLD_SIZE, LOCAL_RANK and the rendezvous address in its environment, as
under ``torchrun``. Signals are handed to the ranks rather than ending them, so that they finish their step and save.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import uuid
from collections.abc import Sequence
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


log = logging.getLogger(__name__)


def launch_ranks(ranks: int, command: Sequence[str], max_restarts: int = 0) -> int:
    """Run ``command`` in ``ranks`` processes and wait for them; the first failing rank ends all others.

    Args:
        max_restarts: how often all ranks are started again after one has failed. Not once a signal has come: who asked
            the run to stop is not to see it start.

    Returns:
        0 when every rank ended well, the exit code of the first rank that failed otherwise (128 + n after signal n); of
        the last attempt.
    """
    # A rank that fails says why itself; the launcher's log would bury it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    codes: list[int] = []
    asked_to_stop = threading.Event()

    def launch() -> None:
        for restart in range(max_restarts + 1):
            codes.append(_launch_once(ranks, command))
            if not codes[-1] or restart == max_restarts or asked_to_stop.is_set():
                return
            log.warning("a rank ended with exit code %d: restart %d of %d", codes[-1], restart + 1, max_restarts)

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
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        # Its own restarts would go on after a signal that came while no rank was there to take it.
        max_restarts=0,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as failed:
        _, failure = failed.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0
