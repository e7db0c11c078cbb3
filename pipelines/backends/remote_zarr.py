"""A Zarr slide on a server, over HTTP or S3, read through fsspec.

Takes a file with a URL, gives a ``ZarrStore``. Every request has an end: after ``ANSWER_S`` it is made once more, and
then the slide has failed. Over HTTP no more is received than a file of the slide may have, and redirects lead to the
same host only. What is not there (404, or 403, as S3 says where a bucket may not be listed) is told from what could
not be asked: the first may be an empty chunk, the second is an error always. Requests run in Zarr's own event loop,
which a forked process begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.sync import sync
from zarr.storage import FsspecStore

from pipelines.backends.zarr_store import JSON_BYTES, NO_FILE
from pipelines.slides.slide import SlideError, read_url

ANSWER_S = 30.0
"""As long may one answer take, its bytes included."""

TRIES: Final = 2
PAUSE_S: Final = 0.2
"""Between the tries."""

SILENT_S: Final = 60.0
"""As long a slide whose server did not answer is not asked for again: each of its tiles would wait for it."""

AT_ONCE: Final = 16
"""Sizes asked for at the same time."""

ABSENT: Final = (403, 404, 410)
REDIRECTED: Final = (301, 302, 303, 307, 308)
REDIRECTS: Final = 5

_silent_until: dict[str, tuple[float, str]] = {}
"""URL to the time until which it is not asked, and what is said meanwhile."""

T = TypeVar("T")


class _PatientStore(FsspecStore):  # type: ignore[misc]  # Zarr publishes no types
    """The store that Zarr reads from, each request bounded in time and made again once."""

    name = ""
    most_bytes = JSON_BYTES

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        async def ask() -> Any:
            data = await FsspecStore.get(self, key, prototype, byte_range)
            asked = None
            if isinstance(byte_range, RangeByteRequest):
                asked = byte_range.end - byte_range.start
            elif isinstance(byte_range, SuffixByteRequest):
                asked = byte_range.suffix
            if data is not None and asked is not None and len(data) != asked:  # shards: other chunks would be decoded
                raise ValueError(f"asked for {asked} bytes of it, the server sent {len(data)}: it ignores ranges")
            return data

        return await self.patiently(ask, key)

    async def patiently(self, ask: Callable[[], Awaitable[T]], key: str) -> T:
        """Return what ``ask`` does.

        Raises:
            FileNotFoundError: it is not there.
            SlideError: no answer, or none that can be used.
        """
        until, reason = _silent_until.get(self.path, (0.0, ""))
        if time.monotonic() < until:
            raise SlideError(reason)
        fault: Exception | None = None
        for number in range(TRIES):
            if number:
                await asyncio.sleep(PAUSE_S)
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await ask()
            except FileNotFoundError:
                raise
            except Exception as error:  # aiohttp, botocore and the network each have their own
                fault = error
        silent = isinstance(fault, TimeoutError)
        what = f"no answer within {ANSWER_S:g} s" if silent else f"{type(fault).__name__}: {fault}"
        reason = f"{self.name}: {key} cannot be fetched, tried {TRIES} times: {what}; check the URL and the network"
        if silent:
            _silent_until[self.path] = (time.monotonic() + SILENT_S, reason)
        raise SlideError(reason) from fault

    async def sizes(self, keys: Sequence[str]) -> list[int | None]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def size(key: str) -> int | None:
            async with gate:
                return await self.patiently(lambda: self._size(key), key)

        asked = [asyncio.ensure_future(size(key)) for key in keys]
        try:
            return list(await asyncio.gather(*asked))
        finally:
            for request in asked:
                request.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _size(self, key: str) -> int | None:
        url = f"{self.path}/{key}"
        if "http" not in self.fs.protocol:
            try:
                about = await self.fs._info(url)
            except (FileNotFoundError, PermissionError):
                return None
            return int(about["size"]) if about["type"] == "file" else NO_FILE
        session = await self.fs.set_session()  # fsspec's own way takes any fault for a file that is not there
        identity = {"Accept-Encoding": "identity"}  # or the size would be that of the answer, packed, or left out
        async with self._asked(session, "HEAD", url, identity) as answer:
            if answer.status in ABSENT:
                return None
            answer.raise_for_status()
            if "Content-Length" not in answer.headers:
                raise ValueError("the server does not say its size (Content-Length)")
            return int(answer.headers["Content-Length"])

    async def cat_file(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return a file or the part from ``start``, of the last ``-start`` bytes if negative, to ``end``.

        Takes the place of fsspec's, which receives and unpacks whatever is sent.
        """
        headers = {"Accept-Encoding": "identity"}
        if start is not None or end is not None:
            first = start or 0
            headers["Range"] = f"bytes={first}" if first < 0 else f"bytes={first}-{'' if end is None else end - 1}"
        session = await self.fs.set_session()
        async with self._asked(session, "GET", url, headers) as answer:
            if answer.status == HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(url)
            answer.raise_for_status()
            packed = answer.headers.get("Content-Encoding", "identity").lower()
            if packed not in ("identity", ""):
                raise ValueError(f"the server packs it ({packed}) although it was asked not to")
            data = bytearray()
            async for piece in answer.content.iter_any():
                data += piece
                if len(data) > self.most_bytes:
                    raise ValueError(f"the server sends more than the {self.most_bytes} bytes that it may have")
            return bytes(data)

    @contextlib.asynccontextmanager
    async def _asked(self, session: Any, method: str, url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
        """The answer to a request, redirects within the host followed."""
        place = self.fs.encode_url(url)
        for _ in range(REDIRECTS + 1):
            async with session.request(method, place, headers=headers, allow_redirects=False) as answer:
                if answer.status not in REDIRECTED:
                    yield answer
                    return
                place = answer.url.join(type(answer.url)(answer.headers.get("Location", "")))
                if place.host != answer.url.host or place.scheme not in (answer.url.scheme, "https"):
                    raise ValueError(f"the server redirects to another host, {place.host}: put its URL into the file")
                if place.port != answer.url.port and place.scheme == answer.url.scheme:
                    raise ValueError(f"the server redirects to another port, {place.port}: put its URL into the file")
        raise ValueError(f"the server redirects more than {REDIRECTS} times")


class RemoteFolder:
    """The files below a URL.

    Args:
        path: the file that holds the URL.

    Raises:
        SlideError: no usable URL, or a library is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._url = path, read_url(path)
        try:
            self.files = _PatientStore.from_url(self._url, _options(self._url), read_only=True)
        except ImportError as fault:
            raise SlideError(
                f"{path}: slides behind a URL need packages that are not installed ({fault}); install them: "
                'pip install "megatile[remote]"'
            ) from fault
        self.files.name = str(self)
        if "http" in self.files.fs.protocol:
            self.files.fs._cat_file = self.files.cat_file

    @property
    def most_bytes(self) -> int:
        return int(self.files.most_bytes)

    @most_bytes.setter
    def most_bytes(self, value: int) -> None:
        self.files.most_bytes = value

    def __str__(self) -> str:
        return f"{self._path} ({self._url})"

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        sizes: list[int | None] = sync(self.files.sizes(keys))
        return sizes

    def read(self, key: str) -> bytes:
        data: bytes = sync(self.files.patiently(lambda: self.files.fs._cat_file(f"{self.files.path}/{key}"), key))
        return data

    def members(self) -> str:
        return "what a URL does not list"

    def close(self) -> None:
        async def close() -> None:
            await (await self.files.fs.set_session()).close()

        sync(close(), timeout=ANSWER_S)


def _options(url: str) -> dict[str, Any]:
    """What fsspec is told: nothing waits longer than we do, and no connection is shared with a slide that is closed."""
    if not url.startswith("s3:"):
        return {
            "skip_instance_cache": True,
            "client_kwargs": {"trust_env": True, "auto_decompress": False},
        }  # proxies, .netrc
    waits = {"connect_timeout": ANSWER_S, "read_timeout": ANSWER_S, "retries": {"max_attempts": 0}}
    return {"skip_instance_cache": True, "config_kwargs": waits}
