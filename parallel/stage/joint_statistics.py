"""Running statistics of layers that different groups of ranks hold: shared layers, and branches of one member alone."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

from torch import nn

from parallel.comm.communicator import Communicator
from parallel.stage.batchnorm import RunningStatistics, running_statistics
from parallel.trace.stage_module import StageModule
from parallel.trace.updated_search import tracking_layers


class JointStatistics(RunningStatistics):
    """Running statistics of several parts of a module, each updated by the ranks that hold it."""

    def __init__(self, parts: Sequence[RunningStatistics]) -> None:
        self._parts = parts

    def begin_step(self, m: int) -> None:
        for part in self._parts:
            part.begin_step(m)

    @contextmanager
    def frozen(self, within: Container[nn.Module] | None = None) -> Iterator[None]:
        with ExitStack() as scopes:
            for part in self._parts:
                scopes.enter_context(part.frozen(within))
            yield

    @contextmanager
    def microbatch(self, i: int) -> Iterator[None]:
        with ExitStack() as scopes:
            for part in self._parts:
                scopes.enter_context(part.microbatch(i))
            yield

    def rollback(self) -> None:
        for part in self._parts:
            part.rollback()

    def end_step(self) -> None:
        for part in self._parts:
            part.end_step()


def statistics_of_stage(
    stage: StageModule, ranks: Communicator, peers: Communicator, mode: Literal["per-microbatch", "deferred"]
) -> RunningStatistics:
    """Return the running statistics of a stage.

    Args:
        ranks: that hold a copy of what is not this member's own.
        peers: that hold a copy of what is, ``StageModule.of_one_member``.

    Raises:
        ValueError: as of ``running_statistics``.
    """
    if not stage.of_one_member:
        return running_statistics(stage, ranks, mode, stage.counts)
    buffers = {id(buffer) for name, buffer in stage.named_buffers() if name in stage.of_one_member}
    own, shared = nn.ModuleList(), nn.ModuleList()
    for layer in tracking_layers(stage):
        (own if id(layer.running_mean) in buffers else shared).append(layer)
    return JointStatistics(
        [running_statistics(shared, ranks, mode, stage.counts), running_statistics(own, peers, mode)]
    )
