"""A command of the project in this process, as a test calls it: what it prints, its exit code, and nothing left behind.

A command may change what belongs to its process, which it expects to end: its signals, logs, threads, random numbers
and environment. All of that is put back; how it keeps freed memory cannot be, and is left as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import cv2
import pytest
import torch

import app.training.session  # noqa: F401  # what commands load when they are called is not to be paid for by the first that is
from app.launch.watchdog import STOPPING
from app.training import run_info
from tests.helpers.planned_once import plans_shared

_output_of = run_info.output_of
_SAID: dict[tuple[str, ...], str] = {}


def _output_once(command: list[str]) -> str | None:
    """Return what a program said when it was first asked: each run asks for versions, by processes of their own."""
    said = _SAID.get(tuple(command)) or _output_of(command)
    if said:
        _SAID[tuple(command)] = said
    return said


def call(
    module: str, *arguments: str | Path, env: Mapping[str, str] | None = None, code: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Return what ``python -m module`` with these arguments prints, and its exit code.

    An error that a user would see as a traceback is raised. ``code``: the exit code that it must have.
    """
    words = [str(argument) for argument in arguments]
    main = importlib.import_module(module).main
    out, err = io.StringIO(), io.StringIO()
    with (
        put_back(),
        plans_shared(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("app.launch.place.keep_freed_memory", lambda: True)
        patch.setattr("tyro._unsafe_cache.clear_cache", lambda: None)
        patch.setattr(run_info, "output_of", _output_once)
        if module == "app.train":  # tests/app/pages/test_run_page.py looks at curves and overlays
            patch.setattr("app.pages.run_page.curves", lambda *_: [])
            patch.setattr("app.pages.run_page.overlays", lambda *_: [])
        os.environ.update(env or {})
        try:
            ended = main(words) or 0
        except SystemExit as stop:
            ended = stop.code if isinstance(stop.code, int) else 1
    assert code in (None, ended), f"{module} ended with {ended}:\n{err.getvalue()}{out.getvalue()}"
    return subprocess.CompletedProcess([module, *words], ended, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Put the process back as it was."""
    environment, handlers = dict(os.environ), {number: signal.getsignal(number) for number in STOPPING}
    root = logging.getLogger()
    logs, level = list(root.handlers), root.level
    threads, decoding, random = torch.get_num_threads(), cv2.getNumThreads(), torch.get_rng_state()
    benchmark = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.set_rng_state(random)
        cv2.setNumThreads(decoding)
        torch.set_num_threads(threads)
        root.setLevel(level)
        for handler in [handler for handler in root.handlers if handler not in logs]:
            root.removeHandler(handler)
            handler.close()
        for number, what in handlers.items():
            signal.signal(number, what)
        for name in os.environ.keys() - environment:
            del os.environ[name]
        os.environ.update(environment)
