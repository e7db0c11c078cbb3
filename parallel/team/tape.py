"""What a pass was told by the other members of its team, and drew: a second pass finds it here, and asks nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Tape:
    """What a pass was told by others, and drew, in order."""

    def __init__(self) -> None:
        self.words: list[Any] = []
        self._next: int | None = None

    def word(self, find: Callable[[], Any]) -> Any:
        """Return the next word: what ``find`` gives, or what it gave when the tape was recorded."""
        if self._next is None:
            self.words.append(find())
            return self.words[-1]
        word, self.words[self._next] = self.words[self._next], None
        self._next += 1
        return word

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Within the block words come from the tape."""
        self._next = 0
        yield
        assert self._next == len(self.words), f"{self._next} of {len(self.words)} words were asked for again"
        self.words, self._next = [], None
