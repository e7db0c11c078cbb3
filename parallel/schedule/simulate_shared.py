"""A step on paper where several ranks share a device: cores with fewer than one for each rank, or one GPU.

As ``simulate``, but ranks that compute at the same time on the same device each get an equal part of it (processor
sharing, Kleinrock, Queueing Systems II, 1976). What waits for a message takes no part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.schedule.action import COMPUTE, Action, Schedule
from parallel.schedule.placement import Placement
from parallel.schedule.simulate import Run
from parallel.schedule.step_cost import LinkCost, StageCost
from parallel.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Device:
    """What ranks share.

    Attributes:
        lanes: ranks that can compute at once without slowing each other: cores / threads of a rank; 1 of a GPU.
    """

    ranks: tuple[int, ...]
    lanes: float


def simulate_shared(
    schedule: Schedule,
    placement: Placement,
    costs: Sequence[StageCost],
    links: Mapping[tuple[int, int], LinkCost],
    devices: Sequence[Device],
    reduce_s: Mapping[int, float] | None = None,
    overhead_s: float = 0.0,
    weights: Sequence[float] | None = None,
) -> Timeline:
    """The step, from 0 on.

    Args:
        devices: every rank is on one of them.

    Raises:
        ValueError: the schedule cannot finish.
    """
    numbers = {
        action.microbatch for actions in schedule.values() for action in actions if action.microbatch is not None
    }
    weight = {i: 1.0 if weights is None else weights[i] for i in numbers}
    run = _SharedRun(schedule, placement, costs, links, reduce_s or {}, overhead_s, weight)
    run.devices = devices
    run.finish()
    return run.timeline(schedule)


@dataclass(slots=True)
class _Computing:
    """An action under way.

    Attributes:
        left_s: that it would still take on a device of its own.
    """

    action: Action
    start_s: float
    left_s: float


class _SharedRun(Run):
    """Ranks at one of their actions each; time goes from one start or end of a compute action to the next."""

    devices: Sequence[Device]

    def finish(self) -> None:
        now, computing = 0.0, dict[int, _Computing]()
        while True:
            self._go_on(computing)
            if not computing:
                break
            working = {rank for rank, work in computing.items() if work.start_s <= now}
            if not working:
                now = min(work.start_s for work in computing.values())
                continue
            rates = self._rates(working)
            step = min(computing[rank].left_s / rates[rank] for rank in working)
            later = [work.start_s - now for rank, work in computing.items() if rank not in working]
            step = min([step, *later])
            now += step
            for rank in working:
                computing[rank].left_s -= step * rates[rank]
            for rank in [rank for rank in working if computing[rank].left_s <= 1e-12]:
                work = computing.pop(rank)
                self.computed(rank, work.action, work.start_s, now)
                self.at[rank] += 1
        self.raise_if_stuck()

    def compute(self, rank: int, action: Action) -> bool:
        """Not here: ``finish`` lets time pass over what ranks compute."""
        return False

    def _go_on(self, computing: dict[int, _Computing]) -> None:
        """Take every rank to its next compute action, and begin those whose needs are known."""
        moved = True
        while moved:
            moved = False
            for rank, actions in self.actions.items():
                if rank in computing:
                    continue
                while self.at[rank] < len(actions) and self.do(rank, actions[self.at[rank]]):
                    self.at[rank] += 1
                    moved = True
                if self.at[rank] == len(actions) or actions[self.at[rank]].kind not in COMPUTE:
                    continue
                action = actions[self.at[rank]]
                start = self.ready_s(rank, action)
                if start is not None:
                    computing[rank] = _Computing(action, start, self.compute_s(action))
                    moved = True

    def _rates(self, working: set[int]) -> dict[int, float]:
        """The part of a device of its own that each rank gets."""
        rates: dict[int, float] = defaultdict(lambda: 1.0)
        for device in self.devices:
            sharing = [rank for rank in device.ranks if rank in working]
            for rank in sharing:
                rates[rank] = min(1.0, device.lanes / len(sharing))
        return rates
