"""A stage of a model computed by a team, side by side: the module that each member holds, with all of its parameters.

Takes and gives, of values that lie in parts, this member's box. Every member comes to the same exchanges and sums in
both passes; what follows the region that has rows is computed by member 0, and stood in for on the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.space.team import Box
from parallel.streaming.box_sums import BoxSums, SummedLoss
from parallel.team.program import NodeRun
from parallel.team.team_comm import ForwardContext, ReplayLog, TeamComm
from parallel.team.team_plan import Plans
from parallel.trace.stage_module import Boxes, Run, SegmentRun, StageModule, as_tensor


class TeamStage(StageModule):
    """One member's part of a stage.

    Attributes:
        link: to the other members.
        plans: for tiles of any shape.
    """

    link: TeamComm
    plans: Plans
    device: torch.device
    gives_sums = True
    _context: ForwardContext
    _asked: BoxSums | None = None

    @contextlib.contextmanager
    def context(
        self, shape: tuple[int, ...], random: int | Tensor = 0, log: ReplayLog | None = None
    ) -> Iterator[ForwardContext]:
        self._context = self._begin_pass(shape, random)
        with contextlib.nullcontext() if log is None else self.link.on(log):
            yield self._context

    def _begin_pass(self, shape: tuple[int, ...], random: int | Tensor) -> ForwardContext:
        return ForwardContext(self.plans(shape, self.training), self.link, self.device, random)

    @property
    def counts(self) -> bool:
        return self.link.member == 0

    def replay_log(self) -> ReplayLog:
        return ReplayLog()

    def loss(self, run: Any, loss: Any, values: Iterable[Any], targets: Any) -> Tensor:
        """Return the ``loss``; of members that do not count, what takes part in the backward pass in its place."""
        values = tuple(values)
        if isinstance(loss, SummedLoss):
            asked = BoxSums(loss.sums, targets)
            if (sums := self.sums_in_parts(values, asked)) is not None:
                return loss.value(sums, asked.pixels)
        (output,) = run(*values)
        result: Tensor = loss(output, as_tensor(targets)) if self.counts else output.sum()
        return result

    def sums_in_parts(self, values: Sequence[Any], asked: BoxSums) -> Tensor | None:
        """Return the sums that are asked of the model's output, over all members' parts of it; None where the output is
        with member 0 alone."""
        run = self._run_training if self.training else self._run_evaluation
        assert isinstance(run, NodeRun)
        if self.link.members > 1 and not run.gives_parts(self._context.plan, asked.targets.shape):
            return None
        self._asked = asked
        try:
            (sums,) = self(*values)
        finally:
            self._asked = None
        assert isinstance(sums, Tensor)
        return sums

    def sums(self, values: Sequence[Any], asked: BoxSums) -> Tensor | None:
        found = self.sums_in_parts(values, asked)
        if found is None:
            (output,) = self(*values)
            found = asked.of_whole(output) if self.counts else None
        return found if self.counts else None

    def part_of_tiles(self, shape: tuple[int, ...]) -> Box | None:
        plans = [self.plans(shape, training) for training in (True, False)]
        if any(plan.region is None for plan in plans):
            return None
        return plans[0].tile_boxes[self.link.member]

    def part_of_masks(self, shape: tuple[int, ...]) -> Box | None:
        for run, training in ((self._run_training, True), (self._run_evaluation, False)):
            assert isinstance(run, NodeRun)
            if not run.gives_parts(self.plans(shape, training), (shape[0], *shape[2:])):
                return None
        return self.part_of_tiles(shape)

    def tiles(self, images: Tensor | Boxes, shape: tuple[int, ...]) -> Tensor | Boxes:
        """Return this member's part of tiles of ``shape``, which come whole or box by box."""
        if self.link.members == 1:
            return images
        plan = self.plans(shape, self.training)
        if plan.region is None:
            return as_tensor(images)
        box = plan.tile_boxes[self.link.member]
        if not isinstance(images, Tensor):
            return images.box(*box)
        assert tuple(images.shape[-2:]) == plan.mesh.side, (tuple(images.shape), plan.mesh.side)
        part = images[..., slice(*box[0]), slice(*box[1])]
        layout = torch.channels_last if images.dim() == 4 and images.stride(1) == 1 else torch.contiguous_format
        return part.contiguous(memory_format=layout)

    def segment_pass(self, segment: SegmentRun) -> Run:
        """Return the segment's pass; its recomputation replays the messages that the first one received."""
        if not segment.recompute:
            return super().segment_pass(segment)
        run, context, asked, log = segment.run, self._context, self._asked, ReplayLog()
        assert isinstance(run, NodeRun)
        passes = iter((False, True))

        def compute(*values: Any) -> tuple[Any, ...]:
            again = next(passes)
            with self.link.on(log):
                own = dataclasses.replace(context, random=0) if again else context
                return run.run(self, own, values, asked)

        return compute
