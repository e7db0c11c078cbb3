"""The microbatches of one step as the engine asks for them: drawn in order, held until they are used."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from parallel.engine.step import Microbatch
from parallel.streaming.images import Boxes


class StepBatches:
    """Hands out the parts of the microbatches ``share``, each once, in any order.

    Args:
        microbatches: drawn as far as is needed, no further.
    """

    def __init__(self, microbatches: Iterable[Microbatch], share: Iterable[int]) -> None:
        self._source = iter(microbatches)
        self._numbers = iter(share)
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._images: dict[int, Tensor | Boxes | None] = {}
        self._targets: dict[int, Tensor | Boxes | None] = {}

    def shape(self, i: int) -> tuple[int, ...]:
        """(n, 3, h, w) of microbatch ``i``."""
        while i not in self._shapes:
            number, microbatch = next(self._numbers), next(self._source)
            self._shapes[number] = microbatch.shape
            self._images[number], self._targets[number] = microbatch.images, microbatch.targets
        return self._shapes[i]

    def images(self, i: int) -> Tensor | Boxes:
        """Return the images of microbatch ``i``.

        Raises:
            ValueError: they have another shape than was announced to the other ranks.
        """
        shape = self.shape(i)
        images = self._images.pop(i)
        assert images is not None, "this rank wants the images"
        if tuple(images.shape) != shape:
            raise ValueError(f"microbatch {i} was announced as {shape} and holds images {tuple(images.shape)}")
        return images

    def targets(self, i: int) -> Tensor | Boxes:
        """Return the targets of microbatch ``i``."""
        self.shape(i)
        targets = self._targets.pop(i)
        assert targets is not None, "this rank wants the targets"
        return targets
