"""Ranks that do not load torch: forked, each anew, by one rank server for a whole run of tests.

A rank runs a module as ``python -m`` does, or a function by its name, in an environment of its own, and prints to a
file. It ends as a process of Python does, exit functions and exit code included, and may be killed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.training import run_info
from parallel.comm.launch import STARTED_BY_US, RankServer, environments

LOADED = ("app.training.loop", "app.training.session", "app.training.summary", "parallel.comm.torch_comm")
LOADED += ("torch._dynamo", "matplotlib.figure", "torch.utils.tensorboard")  # by the first trace, and at the end
ROOT = Path(__file__).parents[2]
TASK = "MEGATILE_TEST_TASK"
"""Variable: the file that says what a rank runs."""


def run_ranks(
    world: int,
    target: str,
    arguments: Sequence[Any],
    folder: Path,
    timeout_s: float = 150,
    *,
    by_launcher: bool = False,
) -> tuple[list[int | None], str]:
    """Exit codes of ``target`` with these arguments on ``world`` ranks, and what they printed.

    The first that fails ends the others, as does the end of ``timeout_s``: None is the code of a rank that was ended.

    Args:
        target: ``package.module``, or ``package.module:function``, which may return an exit code.
        folder: of this call alone.
        by_launcher: the ranks are those of ``--ranks``, whose launcher has prepared the data; else of another launcher.
    """
    printed, server = folder / "printed.txt", shared_server()
    for environment in environments(world, folder, server.pid):
        if not by_launcher:
            del environment[STARTED_BY_US]
        server.start(environment | _task(target, arguments, printed))
    deadline_s = time.monotonic() + timeout_s
    while server.are_running and time.monotonic() < deadline_s:
        server.poll()
    codes = [server.codes.get(rank) for rank in server.ranks]
    server.end()
    return codes, printed.read_text() if printed.exists() else ""


def _task(target: str, arguments: Sequence[Any], printed: Path) -> dict[str, str]:
    sys.audit("os.fork")  # by another process, where no audit hook of this one sees it
    task = printed.with_suffix(".pickle")
    task.write_bytes(pickle.dumps((target, list(arguments), os.getcwd(), str(printed))))
    return {TASK: str(task)}


@contextlib.contextmanager
def running(target: str, arguments: Sequence[Any], printed: Path) -> Iterator[psutil.Process]:
    """While this lasts, a process under no launcher runs ``target``; then it is ended if it has not been."""
    server = shared_server()
    server.start({**os.environ, "RANK": "0"} | _task(target, arguments, printed))
    while not server.ranks:
        server.poll()
    try:
        yield psutil.Process(server.ranks[0])
    finally:
        server.end()


@contextlib.contextmanager
def launched_here(folder: Path) -> Iterator[None]:
    """While this lasts, ranks that ``app`` starts of itself are forked by the server of the tests."""

    def begin(server: RankServer, command: Sequence[str], _: Sequence[str]) -> None:
        server.command, server.pid = command, shared_server().pid  # type: ignore[attr-defined]

    def launch(server: RankServer, ranks: int, max_restarts: int = 0, _: object = None) -> int:
        assert max_restarts == 0
        module, *argv = server.command  # type: ignore[attr-defined]
        codes, printed = run_ranks(ranks, module, argv, folder, by_launcher=True)
        print(printed)
        return next((code for code in codes if code), 0)

    shared_server()
    with pytest.MonkeyPatch.context() as patch:
        for name, method in {"__init__": begin, "launch": launch, "__exit__": lambda *_: None}.items():
            patch.setattr(RankServer, name, method)
        yield


@functools.cache
def shared_server() -> RankServer:
    """The server of this process; it ends with the process."""
    with contextlib.chdir(ROOT):  # wherever the first test that asks for it works
        return RankServer(["tests.helpers.forked"], LOADED)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run a module as ``python -m module`` does."""
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> object:
    """Exit code of this rank."""
    target, arguments, folder, printed = pickle.loads(Path(os.environ[TASK]).read_bytes())
    os.chdir(folder)
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115  # for good
    run_info.output_of = lambda *_, **__: None  # versions, each asked of a process of its own
    module, _, name = target.partition(":")
    if not name:
        return run_module(module, arguments)
    code = getattr(importlib.import_module(module), name)(*arguments)
    return code if isinstance(code, int) else bool(code)


if __name__ == "__main__":
    sys.exit(main())
