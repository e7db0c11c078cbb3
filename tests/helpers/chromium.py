"""A real browser for tests of pages: Chromium without a window, spoken to over its DevTools pipe.

Nothing but the standard library: messages are JSON, each ended by a zero byte, on two pipes that the browser finds as
file descriptors 3 and 4 (`--remote-debugging-pipe`).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 60.0
"""Longest wait for an answer: a machine that is busy with other tests is slow to start a browser."""

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root may not use
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Path of the browser; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser.

    Attributes:
        told: what pages said on the console, exceptions, and entries of the browser's own log.
        requested: addresses of all requests, other than data that pages themselves hold.
    """

    def __init__(self, program: str, profile: Path) -> None:
        asks, self._out = _pipe()
        self._in, answers = _pipe()
        actions = [(os.POSIX_SPAWN_DUP2, asks, 3), (os.POSIX_SPAWN_DUP2, answers, 4)]
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        with open(os.devnull, "w") as nowhere:
            actions += [(os.POSIX_SPAWN_DUP2, nowhere.fileno(), 1), (os.POSIX_SPAWN_DUP2, nowhere.fileno(), 2)]
            self._pid = os.posix_spawn(program, command, os.environ, file_actions=actions, setpgroup=0)
        os.close(asks)
        os.close(answers)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.told: list[str] = []
        self.requested: list[str] = []
        self._loaded = False
        targets = self.ask("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, page: Path, *, width: int, dark: bool = False, phone: bool = False) -> None:
        """Load a file from disk into a window of ``width`` px, as a reader with that colour scheme sees it."""
        height = 844 if phone else 1000
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", media="screen", features=scheme)
        self._loaded = False
        self.ask("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + ANSWER_S
        while not self._loaded:
            self._take(self._receive(deadline))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, most_px: int = 2000) -> bytes:
        """PNG of the page, to its end or ``most_px`` down: drawing without a GPU takes its time."""
        width, height = (self.run(f"document.documentElement.{side}") for side in ("clientWidth", "scrollHeight"))
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, most_px), "scale": 1}
        shown = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shown["data"])

    def pdf(self) -> bytes:
        """The page as printed on A4."""
        self.ask("Emulation.setEmulatedMedia", media="")
        made = self.ask("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69)
        return base64.b64decode(made["data"])

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; events before it are kept in mind."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])
            self._take(answer)

    def close(self) -> None:
        """End the browser and all its processes."""
        for end in (self._out, self._in):
            os.close(end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {ANSWER_S:g} s"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _take(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith("data:"):
            self.requested.append(params["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.told.append(json.dumps(params))


@contextlib.contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """A browser that ends with the block."""
    started = Browser(program, profile)
    try:
        yield started
    finally:
        started.close()


def _pipe() -> tuple[int, int]:
    """Reading and writing end, both above the numbers that the browser takes them as."""
    found = []
    for end in os.pipe():
        found.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return found[0], found[1]
