"""A communicator whose calls are reported before they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel.comm.communicator import Communicator


class WatchedCommunicator:
    """``inner``, of whose calls ``tell`` is given the name and the arguments; messages of an exchange one by one."""

    exchange = Communicator.exchange

    def __init__(self, inner: Communicator, tell: Callable[..., object]) -> None:
        self.rank, self.world, self._inner, self._tell = inner.rank, inner.world, inner, tell

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self._tell(name, *arguments, *named.values())
            return value(*arguments, **named)

        return call if callable(value) else value
