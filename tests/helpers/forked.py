"""Ranks that need not load torch: processes forked, each anew, from one that has loaded it; one such server per run.

A rank runs a module as ``python -m`` does, or a function by its name, in an environment of its own, and prints to a
file. It ends as a process of Python does, exit functions and exit code included, and may be killed. What starts it is
not what starts a user's ranks: that is tested where processes are started one by one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import runpy
import secrets
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from parallel.comm import torch_launch
from parallel.comm.torch_rendezvous import KEY, PRIVATE_STORE, loopback_variables

LOADED = ("app.training.loop", "app.training.session", "app.training.summary", "parallel.comm.torch_comm")
LOADED += ("torch._dynamo", "torch.distributed.fsdp")  # by the first trace and step, in a second or two of every rank
POLL_S = 0.02


def run_ranks(
    world: int, target: str, arguments: Sequence[Any], folder: Path, timeout_s: float = 150
) -> tuple[list[int | None], str]:
    """Exit codes of ``target`` with these arguments on ``world`` ranks, and what they printed.

    The first that fails ends the others, as does the end of ``timeout_s``: None is the code of a rank that was ended.

    Args:
        target: ``package.module``, or ``package.module:function``, which may return an exit code.
        folder: of this call alone.
    """
    printed = folder / "printed.txt"
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), **loopback_variables()}
    common |= {PRIVATE_STORE: str(folder / "store"), KEY: secrets.token_hex()}
    ranks = []
    for rank in range(world):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(_server().Process(target=_run, args=(target, list(arguments), environment, str(printed))))
    for process in ranks:
        process.start()
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and any(process.exitcode is None for process in ranks):
        if any(process.exitcode for process in ranks):
            break
        time.sleep(POLL_S)
    codes = [process.exitcode for process in ranks]
    _end(ranks)
    return codes, printed.read_text() if printed.exists() else ""


@contextlib.contextmanager
def launched_here(folder: Path) -> Iterator[None]:
    """While this lasts, ranks that ``app`` starts of itself are forked."""

    def launch_ranks(ranks: int, command: Sequence[str], max_restarts: int = 0, ranks_after: object = None) -> int:
        _, minus_m, module, *argv = command
        assert (minus_m, max_restarts) == ("-m", 0)
        codes, printed = run_ranks(ranks, module, argv, folder)
        print(printed)
        return next((code for code in codes if code), 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_launch, "launch_ranks", launch_ranks)
        yield


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    return context


def _end(ranks: Sequence[ForkServerProcess]) -> None:
    for end in (ForkServerProcess.terminate, ForkServerProcess.kill):
        for process in ranks:
            if process.is_alive():
                end(process)
        for process in ranks:
            process.join(10)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """What ``python -m module`` does."""
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run(target: str, arguments: list[Any], environment: Mapping[str, str], printed: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # what was loaded before is looked through at no collection
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115  # for good
    module, _, name = target.partition(":")
    code: object = 1
    try:
        code = getattr(importlib.import_module(module), name)(*arguments) if name else run_module(module, arguments)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()  # multiprocessing ends its processes without
    sys.exit(code if isinstance(code, int) else bool(code))
