"""Zarr slide on a server, over HTTP or S3, read through fsspec.

Every request has an end: after ``ANSWER_S`` it is made once more, and then the slide has failed. Over HTTP no more is
received than a file of the slide may have, and redirects lead to the same host only. An absent file (404, or 403, as S3
says where a bucket may not be listed) may be an empty chunk; a file that could not be asked for is always an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

from zarr.abc.store import RangeByteRequest
from zarr.core.sync import sync
from zarr.storage import FsspecStore

from pipelines.backends.zarr_store import JSON_BYTES, NO_FILE
from pipelines.slides.slide import SlideError

ANSWER_S, SILENT_S = 30.0, 60.0
"""As long may one answer take, its bytes included; as long a server that gave none is not asked for that slide."""

TRIES, PAUSE_S, AT_ONCE, REDIRECTS = 2, 0.2, 16, 5
"""Of a request; between them; sizes asked for at the same time; redirects followed."""

_silent_until: dict[str, tuple[float, str]] = {}
"""URL to the time until which it is not asked, and the message meanwhile."""


class RemoteFolder(FsspecStore):  # type: ignore[misc]  # Zarr publishes no types
    """The files below a URL, as ``ZarrFolder`` has those of a folder, and the store that Zarr reads from."""

    url = ""
    most_bytes = JSON_BYTES
    absent: set[str]
    """Keys that ``sizes`` found absent the last time; they are not fetched, since the answer may be 403."""

    @property
    def files(self) -> Any:
        return self

    def __str__(self) -> str:
        return self.url

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def size(key: str) -> Any:
            async with gate:
                found = await self._patiently(lambda: self._size(key), key)
            (self.absent.add if found is None else self.absent.discard)(key)
            return found

        async def all_sizes() -> list[Any]:
            return list(await asyncio.gather(*map(size, keys)))

        return list(sync(all_sizes()))

    def read(self, key: str) -> bytes:
        return bytes(sync(self._patiently(lambda: self.fs._cat_file(f"{self.path}/{key}"), key)))

    def members(self) -> str:
        return "what a URL does not list"

    def close(self) -> None:
        async def close() -> None:
            await (await self.fs.set_session()).close()

        sync(close(), timeout=ANSWER_S)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        async def ask() -> Any:
            if key in self.absent or (key.endswith(".zattrs") and await self._size(key) is None):
                return None
            data = await FsspecStore.get(self, key, prototype, byte_range)
            is_range = isinstance(byte_range, RangeByteRequest)
            asked = byte_range.end - byte_range.start if is_range else getattr(byte_range, "suffix", None)
            if data is not None and asked is not None and len(data) != asked:  # shards: other chunks would be decoded
                raise ValueError(f"asked for {asked} bytes of it, the server sent {len(data)}: it ignores ranges")
            return data

        return await self._patiently(ask, key)

    async def _patiently(self, ask: Callable[[], Awaitable[Any]], key: str) -> Any:
        until, reason = _silent_until.get(self.url, (0.0, ""))
        if time.monotonic() < until:
            raise SlideError(reason)
        fault: Exception | None = None
        for number in range(TRIES):
            try:
                await asyncio.sleep(PAUSE_S if number else 0)
                async with asyncio.timeout(ANSWER_S):
                    return await ask()
            except FileNotFoundError:
                raise
            except Exception as error:  # aiohttp, botocore and the network each have their own
                fault = error
        silent = isinstance(fault, TimeoutError)
        what = f"no answer within {ANSWER_S:g} s" if silent else f"{type(fault).__name__}: {fault}"
        reason = f"{self.url}: {key} cannot be fetched, tried {TRIES} times: {what}; check the URL and the network"
        if silent:
            _silent_until[self.url] = (time.monotonic() + SILENT_S, reason)
        raise SlideError(reason) from fault

    async def _size(self, key: str) -> int | None:
        url = f"{self.path}/{key}"
        if "http" not in self.fs.protocol:
            try:
                about = await self.fs._info(url)
            except (FileNotFoundError, PermissionError):
                return None
            return int(about["size"]) if about["type"] == "file" else NO_FILE
        async with self._asked("HEAD", url) as answer:  # fsspec's own way takes any fault for a file that is not there
            if answer.status in (403, 404, 410):
                return None
            answer.raise_for_status()
            return int(answer.headers["Content-Length"])  # a KeyError is a fault of the server

    async def cat_file(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return a file or a part of it; fsspec's own way receives and unpacks whatever is sent."""
        headers = {}
        if start is not None or end is not None:
            first = start or 0
            headers["Range"] = f"bytes={first}" if first < 0 else f"bytes={first}-{'' if end is None else end - 1}"
        async with self._asked("GET", url, headers) as answer:
            if answer.status == HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(url)
            answer.raise_for_status()
            if (packed := answer.headers.get("Content-Encoding", "").lower()) not in ("identity", ""):
                raise ValueError(f"the server packs it ({packed}) although it was asked not to")
            data = bytearray()
            async for piece in answer.content.iter_any():
                data += piece
                if len(data) > self.most_bytes:
                    raise ValueError(f"the server sends more than the {self.most_bytes} bytes that it may have")
            return bytes(data)

    @contextlib.asynccontextmanager
    async def _asked(self, method: str, url: str, headers: dict[str, str] | None = None) -> AsyncIterator[Any]:
        """The answer to a request, redirects within the host followed."""
        place, headers = self.fs.encode_url(url), {"Accept-Encoding": "identity", **(headers or {})}
        session = await self.fs.set_session()
        for _ in range(REDIRECTS + 1):
            async with session.request(method, place, headers=headers, allow_redirects=False) as answer:
                if answer.status not in (301, 302, 303, 307, 308):
                    yield answer
                    return
                place = answer.url.join(type(answer.url)(answer.headers.get("Location", "")))
                same_port = place.port == answer.url.port or place.scheme != answer.url.scheme
                if place.host != answer.url.host or place.scheme not in (answer.url.scheme, "https") or not same_port:
                    raise ValueError(f"the server redirects to another host or port, {place.authority}: give its URL")
        raise ValueError(f"the server redirects more than {REDIRECTS} times")


def open_remote(url: str) -> RemoteFolder:
    """Return the files below ``url``. Raises SlideError where a library is not installed."""
    waits = {"connect_timeout": ANSWER_S, "read_timeout": ANSWER_S, "retries": {"max_attempts": 0}}
    options: dict[str, Any] = {"skip_instance_cache": True, "config_kwargs": waits}
    if not url.startswith("s3:"):  # proxies and .netrc count
        options = {"skip_instance_cache": True, "client_kwargs": {"trust_env": True, "auto_decompress": False}}
    try:
        folder: RemoteFolder = RemoteFolder.from_url(url, options, read_only=True)
    except ImportError as fault:
        raise SlideError(
            f"{url}: slides behind a URL need packages that are not installed ({fault}); install them: "
            'pip install "megatile[remote]"'
        ) from fault
    folder.url, folder.absent = url, set()
    if "http" in folder.fs.protocol:
        folder.fs._cat_file = folder.cat_file
    return folder
