"""A stage of a model as a module: maps the values the stage receives to those it sends, whole or segment by segment.

Made by ``cut_stage``. It runs the user's modules themselves, at their paths in the whole model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parallel.space.team import Box
from parallel.trace.images import Boxes, whole

Run = Callable[..., tuple[Any, ...]]
"""(stage module, values) -> values."""


@dataclass(frozen=True, eq=False)
class SegmentRun:
    """Consecutive layers of a stage that are run, and computed again, together.

    Attributes:
        run: (stage module, values named in ``inputs``) -> values named in ``outputs``.
        finished: names of the values that no later segment uses.
        uses_rng: its layers may draw random numbers.
        modules: that it calls, with those inside them.
    """

    run: Run
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    finished: tuple[str, ...]
    recompute: bool
    uses_rng: bool
    modules: frozenset[nn.Module]


RunSegment = Callable[[SegmentRun, Run, tuple[Any, ...]], tuple[Any, ...]]
"""(segment, its computation, values that enter it) -> values it gives."""


NO_CONTEXT = contextlib.nullcontext()


class StageModule(nn.Module):
    """The layers of one stage. ``named_parameters()`` and ``state_dict()`` have the names of the whole model.

    Attributes:
        inputs: names of the values ``forward`` takes, in order.
        outputs: names of the values it gives, in order. Those that only training makes are None in evaluation.
        segments: of the stage in training; none where it is run as one.
        run_segment: what segments are run by in training.
        gives_sums: ``sums`` computes sums of the output without holding it whole.
    """

    gives_sums = False

    def __init__(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self._run_training: Run
        self._run_evaluation: Run
        self._modes: list[tuple[nn.Module, bool, bool]] = []
        self.segments: tuple[SegmentRun, ...] = ()
        self.run_segment: RunSegment | None = None

    def forward(self, *values: Any) -> Any:
        """Return the values named in ``outputs``, from those named in ``inputs``."""
        if not self.training:
            return self._run_evaluation(self, *values)
        if self.run_segment is None or not self.segments:
            return self._run_training(self, *values)
        known = dict(zip(self.inputs, values, strict=True))
        for segment in self.segments:
            entering = tuple(known[name] for name in segment.inputs)
            for name in segment.finished:
                del known[name]
            made = self.run_segment(segment, functools.partial(segment.run, self), entering)
            known.update(zip(segment.outputs, made, strict=True))
            del entering, made
        return tuple(known[name] for name in self.outputs)

    @property
    def root(self) -> nn.Module:
        """Return the module whose call computes the stage, and which holds its parameters by their names."""
        return self

    @property
    def counts(self) -> bool:
        """Return whether this rank's loss, tiles and statistics count: those of one member of a team do."""
        return True

    def tiles(self, images: Tensor | Boxes, shape: tuple[int, ...]) -> Any:
        """Return what the first stage takes of tiles of ``shape`` (n, 3, h, w)."""
        return images if isinstance(images, Tensor) else whole(images)

    def part_of_tiles(self, shape: tuple[int, ...]) -> Box | None:
        """Return the rows and columns that this rank computes of tiles of ``shape``; None: it may want all."""
        return None

    def part_of_masks(self, shape: tuple[int, ...]) -> Box | None:
        """Return the rows and columns whose targets this rank holds against the output; None: it may want all."""
        return None

    def context(
        self, shape: tuple[int, ...], random: int | Tensor = 0, log: Any = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass on tiles of ``shape``, which gives what draws the random numbers in
        place of the stage, or None.

        Args:
            random: seed, or state, that the stage draws from.
            log: of messages, where the pass will be computed a second time, or is.
        """
        return NO_CONTEXT

    def replay_log(self) -> Any:
        """Return an empty log of the messages of a forward pass; None where it receives none."""
        return None

    def loss(self, run: Run, loss: Callable[[Any, Any], Tensor], values: Iterable[Any], targets: Any) -> Tensor:
        """Return the ``loss`` of the output that ``run`` gives for ``values``, and ``targets``."""
        (output,) = run(*values)
        return loss(output, whole(targets))

    def sums(self, values: Sequence[Any], asked: Any) -> Tensor | None:
        """Return the sums that are asked of the output; None on ranks that do not have it."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> StageModule:
        """Switch modes as the whole model's ``train()``, which may keep some modules in a mode of their own."""
        super().train(mode)
        for module, training, evaluation in self._modes:
            module.training = training if mode else evaluation
        return self
