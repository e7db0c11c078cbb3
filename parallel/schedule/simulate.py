"""A simulated step: how long it takes, how long ranks idle, and how many bytes of activations they keep at most.

A rank does its actions in order, each as soon as what it needs is there. Sends never block. The link from one rank to
another carries one message at a time, in the order of the sends and not before its receive is posted; gradients are
summed during compute, one stage after the other. Ranks that compute at the same time on one device each get an equal
part of it (processor sharing, Kleinrock, Queueing Systems II, 1976); a rank that waits for a message takes no part.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.schedule.action import COMPUTE, PER_PEER, SENDS, Action, Kind, Schedule
from parallel.schedule.dependencies import Dependencies, peer_rank
from parallel.schedule.mesh import Mesh
from parallel.schedule.timeline import LinkCost, Span, StageCost, Timeline, peak_bytes, seconds_by_kind


@dataclass(frozen=True, slots=True)
class Device:
    """Device that several ranks share: cores with fewer than one for each rank, or one GPU.

    Attributes:
        lanes: ranks that can compute together without slowing each other: cores / threads of a rank; 1 of a GPU.
    """

    ranks: tuple[int, ...]
    lanes: float


def simulate(
    schedule: Schedule,
    mesh: Mesh,
    costs: Sequence[StageCost],
    links: Mapping[tuple[int, int], LinkCost] | None = None,
    reduce_s: Mapping[int, float] | None = None,
    weights: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
    devices: Sequence[Device] = (),
) -> Timeline:
    """Return the timeline of the step, from 0 on.

    Args:
        costs: by stage. Recomputing costs ``forward_s``; its activations count from then on, not from the forward pass.
        links: (source stage, target stage) -> cost; with none, a chain of stages that costs nothing, and the
            messages of ``schedule``.
        reduce_s: stage -> time to sum its gradients once the last rank that holds it has come to its REDUCE; 0 for
            stages not named. A schedule without REDUCE sums nothing.
        weights: of the microbatches by number, 1 each by default; times and bytes are multiplied by them.
        speeds: of the ranks, 1 each by default; their computing is so much faster than ``costs`` say.
        devices: that ranks share; each rank is on one of them, or there are none and no rank slows another.

    Raises:
        ValueError: the schedule cannot finish.
    """
    assert len(costs) == mesh.stages, (len(costs), mesh)
    if not links:
        links = {(stage, stage + 1): LinkCost(0.0, 0.0) for stage in range(mesh.stages - 1)}
    numbers = {
        action.microbatch for actions in schedule.values() for action in actions if action.microbatch is not None
    }
    weight = {i: 1.0 if weights is None else weights[i] for i in numbers}
    speeds = [1.0] * mesh.teams if speeds is None else speeds
    run = _Run(schedule, mesh, costs, links, reduce_s or {}, weight, speeds, devices)
    run.finish()
    spans = {rank: tuple(sorted(row, key=lambda s: (s.start_s, s.end_s))) for rank, row in run.spans.items()}
    return Timeline(spans, {rank: peak_bytes(actions, costs, weight) for rank, actions in schedule.items()})


@dataclass(slots=True)
class _Computing:
    """An action under way on a shared device; ``left_s`` is what it would still take on one of its own."""

    action: Action
    start_s: float
    left_s: float


@dataclass(eq=False)
class _Run:
    """Ranks at one of their actions each, messages and sums under way.

    The order of a rank's actions, of a channel's messages and of a rank's sums is given. So without shared devices
    every time follows from earlier ones by taking the largest, and no queue of events is needed.
    """

    schedule: Schedule
    mesh: Mesh
    costs: Sequence[StageCost]
    links: Mapping[tuple[int, int], LinkCost]
    reduce_s: Mapping[int, float]
    weight: Mapping[int, float]
    speeds: Sequence[float]
    devices: Sequence[Device]

    def __post_init__(self) -> None:
        schedule = self.schedule
        self._seconds = [seconds_by_kind(cost) for cost in self.costs]
        back = {pair: cost.backward_s is not None for pair, cost in self.links.items()}
        between = Dependencies(self.mesh, back)
        self._actions = between.with_messages(schedule)
        self._needs = between.all_before(self._actions)
        self._at = dict.fromkeys(schedule, 0)  # rank -> position of its next action
        self._clock = dict.fromkeys(schedule, 0.0)
        self.spans: dict[int, list[Span]] = {rank: [] for rank in schedule}
        self._done: dict[Action, float] = {}  # end of a compute action; arrival at a receive
        self._moving = deque(schedule)
        """Ranks that may be able to go on."""
        self._waiting: dict[Action, list[int]] = {}  # ranks that need an action that is not done
        self._computing: dict[int, _Computing] = {}  # on shared devices
        self._announced: dict[Action, float] = {}
        self._under_way: dict[tuple[int, int], deque[tuple[float, Action]]] = defaultdict(deque)
        self._channel_free: dict[tuple[int, int], float] = defaultdict(float)
        self._to_sum: dict[int, deque[tuple[float, Action]]] = {rank: deque() for rank in schedule}
        self._sums_done = dict.fromkeys(schedule, 0.0)
        self._copied = {(rank, kind): 0.0 for rank in schedule for kind in (Kind.OFFLOAD, Kind.PREFETCH)}
        self._begun: dict[Action, float] = {}  # start of a computation; end of a way back

    def finish(self) -> None:
        """Carry every rank on to its end."""
        now = 0.0
        self._go_on()
        while self._computing:
            working = {rank for rank, work in self._computing.items() if work.start_s <= now}
            if not working:
                now = min(work.start_s for work in self._computing.values())
                continue
            rates = self._rates(working)
            ends = [self._computing[rank].left_s / rates[rank] for rank in working]
            step = min([*ends, *(work.start_s - now for work in self._computing.values() if work.start_s > now)])
            now += step
            for rank in working:
                work = self._computing[rank]
                work.left_s -= step * rates[rank]
                if work.left_s <= 1e-12:
                    del self._computing[rank]
                    self._computed(rank, work.action, work.start_s, now)
                    self._moving.append(rank)
            self._go_on()
        self._raise_if_stuck()

    def _rates(self, working: set[int]) -> dict[int, float]:
        """Part of a device of its own that each rank gets."""
        rates = dict.fromkeys(working, 1.0)
        for device in self.devices:
            sharing = [rank for rank in device.ranks if rank in working]
            rates |= dict.fromkeys(sharing, min(1.0, device.lanes / max(1, len(sharing))))
        return rates

    def _go_on(self) -> None:
        """Take ranks as far as what they need is known, and on shared devices to their next compute action."""
        while self._moving:
            rank = self._moving.popleft()
            actions = self._actions[rank]
            while self._at[rank] < len(actions) and self._do(rank, actions[self._at[rank]]):
                pass

    def _do(self, rank: int, action: Action) -> bool:
        """Do ``action`` and return whether ``rank`` gets past it now."""
        now = self._clock[rank]
        if action.kind in COMPUTE:
            return self._compute(rank, action)
        if action.kind in SENDS:
            channel = (rank, peer_rank(action, self.mesh, rank))
            self._under_way[channel].append((now, action))
            self._carry(channel)
        elif action.kind in PER_PEER:
            self._announced[action] = now
            self._carry((peer_rank(action, self.mesh, rank), rank))
        elif action.kind is Kind.OFFLOAD:
            self._offload(rank, action)
        elif action.kind is Kind.PREFETCH:
            start = max(now, self._copied[rank, action.kind])
            end = start + self.costs[action.stage].back_s * self.weight[action.i]
            self._copied[rank, action.kind] = self._begun[action] = end
            self.spans[rank].append(Span(action, start, end))
        else:
            self._to_sum[rank].append((now, action))
            self._sum(action.stage)
        self._at[rank] += 1
        return True

    def _compute(self, rank: int, action: Action) -> bool:
        start = self._clock[rank]
        for need in self._needs[action]:
            end = self._done.get(need)
            if end is None:
                self._waiting.setdefault(need, []).append(rank)
                return False
            start = max(start, end)
        weight = 1.0 if action.kind is Kind.UPDATE else self.weight[action.i]
        seconds = self._seconds[action.stage][action.kind] * weight
        if self.devices:
            self._computing[rank] = _Computing(action, start, seconds)
            return False
        end = start + seconds / self.speeds[rank]
        if action.kind in (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT):
            # The last of what was moved to the host may come while the first is used.
            end = max(end, self._begun.get(action.as_kind(Kind.PREFETCH), 0.0))
        self._computed(rank, action, start, end)
        return True

    def _computed(self, rank: int, action: Action, start: float, end: float) -> None:
        self._at[rank] += 1
        self._clock[rank] = end
        self._begun.setdefault(action, start)
        self.spans[rank].append(Span(action, start, end))
        self._is_done(action, end)
        if action.kind is Kind.BACKWARD_INPUT:  # as good as B for the stages that need its gradients
            self._is_done(action.as_kind(Kind.BACKWARD), end)

    def _is_done(self, action: Action, end: float) -> None:
        self._done[action] = end
        self._moving += self._waiting.pop(action, ())

    def _offload(self, rank: int, action: Action) -> None:
        forward = action.as_kind(Kind.FORWARD)
        start = max(self._begun[forward], self._copied[rank, action.kind])
        end = max(start + self.costs[action.stage].out_s * self.weight[action.i], self._done[forward])
        self._copied[rank, action.kind] = end
        self._clock[rank] = max(self._clock[rank], end)
        self.spans[rank].append(Span(action, start, end))

    def _carry(self, channel: tuple[int, int]) -> None:
        queue = self._under_way[channel]
        while queue and (receive := queue[0][1].other_end) in self._announced:
            sent, send = queue.popleft()
            start = max(sent, self._announced[receive], self._channel_free[channel])
            end = start + self._travel_s(send)
            self._channel_free[channel] = end
            self._is_done(receive, end)
            self.spans[channel[0]].append(Span(send, start, end))

    def _travel_s(self, send: Action) -> float:
        assert send.peer is not None
        pair = (send.stage, send.peer)
        if send.kind is Kind.SEND_FORWARD:
            seconds: float | None = self.links[pair].forward_s if pair in self.links else 0.0
        else:
            seconds = self.links[pair[::-1]].backward_s if pair[::-1] in self.links else 0.0
        return (seconds or 0.0) * self.weight[send.i]

    def _sum(self, stage: int) -> None:
        """Sum the gradients of ``stage``, and of what waits behind it, once it is the next sum of all its holders."""
        holders = self.mesh.teams_with(stage)
        fronts = [self._to_sum[rank][0] for rank in holders if self._to_sum[rank]]
        if len(fronts) < len(holders) or any(action.stage != stage for _, action in fronts):
            return
        start = max(*(now for now, _ in fronts), *(self._sums_done[rank] for rank in holders))
        end = start + self.reduce_s.get(stage, 0.0)
        for rank in holders:
            self.spans[rank].append(Span(self._to_sum[rank].popleft()[1], start, end))
            self._sums_done[rank] = end
        for rank in holders:
            if self._to_sum[rank]:
                self._sum(self._to_sum[rank][0][1].stage)

    def _raise_if_stuck(self) -> None:
        rows = self._actions.items()
        stuck = [f"rank {rank} at {actions[self._at[rank]]}" for rank, actions in rows if self._at[rank] < len(actions)]
        queues = [*self._under_way.values(), *self._to_sum.values()]
        stuck += [f"{action}, which another rank does not wait for" for queue in queues for _, action in queue]
        if stuck:
            raise ValueError(f"the schedule cannot finish, as `check` says of it: {', '.join(stuck)}")
