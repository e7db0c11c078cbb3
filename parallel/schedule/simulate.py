"""A step on paper: how long it takes, how long ranks idle, and how many bytes of activations they keep at most.

Takes a schedule, compute-only or lowered, and what its stages and the links between them cost; gives a timeline. A rank
does its actions in order, each as soon as what it needs is there. Sends never block. The link from one rank to another
carries one message at a time, in the order of the sends and not before its receive is announced; gradients are summed
beside compute, one stage after the other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from parallel.schedule.action import PER_PEER, SENDS, Action, Kind, Schedule
from parallel.schedule.dependencies import Dependencies
from parallel.schedule.passes import peer_rank
from parallel.schedule.placement import Placement
from parallel.schedule.step_cost import LinkCost, StageCost, peak_bytes, seconds_by_kind
from parallel.schedule.timeline import Span, Timeline


def simulate(
    schedule: Schedule,
    placement: Placement,
    costs: Sequence[StageCost],
    links: Mapping[tuple[int, int], LinkCost] | None = None,
    reduce_s: Mapping[int, float] | None = None,
    overhead_s: float = 0.0,
    weights: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> Timeline:
    """The step, from 0 on.

    Args:
        costs: by stage. Recomputing costs ``forward_s``; its activations count from then on, not from the forward pass.
        links: (source stage, target stage) -> cost; with none, a chain of stages that costs nothing.
        reduce_s: stage -> time to sum its gradients once the last rank that holds it has come to its REDUCE; 0 for
            stages not named. A schedule without REDUCE sums nothing.
        overhead_s: that every compute action takes besides its cost.
        weights: of the microbatches by number, 1 each by default; times and bytes are multiplied by them.
        speeds: of the ranks, 1 each by default; their computing is so much faster than ``costs`` say.

    Raises:
        ValueError: the schedule cannot finish. Says where each rank stands and what it waits for.
    """
    assert len(costs) == placement.stages, (len(costs), placement)
    if not links:
        links = {(stage, stage + 1): LinkCost(0.0, 0.0) for stage in range(placement.stages - 1)}
    numbers = {
        action.microbatch for actions in schedule.values() for action in actions if action.microbatch is not None
    }
    weight = {i: 1.0 if weights is None else weights[i] for i in numbers}
    run = Run(schedule, placement, costs, links, reduce_s or {}, overhead_s, weight)
    run.speeds = speeds or run.speeds
    run.finish()
    return run.timeline(schedule)


class Run:
    """Ranks at one of their actions each, messages and sums under way.

    The order of a rank's actions, of a channel's messages and of a rank's sums is given. So every time follows from
    earlier ones by taking the largest, and ranks can be carried on in any order: no queue of events is needed.
    """

    def __init__(
        self,
        schedule: Schedule,
        placement: Placement,
        costs: Sequence[StageCost],
        links: Mapping[tuple[int, int], LinkCost],
        reduce_s: Mapping[int, float],
        overhead_s: float,
        weight: Mapping[int, float],
    ) -> None:
        self.placement, self.costs, self.links = placement, costs, links
        self.reduce_s, self.overhead_s, self.weight = reduce_s, overhead_s, weight
        self.seconds = [seconds_by_kind(cost) for cost in costs]
        self.speeds: Sequence[float] = [1.0] * placement.world
        back = {pair: cost.backward_s is not None for pair, cost in links.items()}
        between = Dependencies(placement, back)
        self.actions = between.with_messages(schedule)
        self.needs = between.all_before(self.actions)
        self.at = dict.fromkeys(schedule, 0)  # rank -> position of its next action
        self.clock = dict.fromkeys(schedule, 0.0)
        self.spans: dict[int, list[Span]] = {rank: [] for rank in schedule}
        self.done: dict[Action, float] = {}  # end of a compute action; arrival at a receive
        self.announced: dict[Action, float] = {}
        self.under_way: dict[tuple[int, int], deque[tuple[float, Action]]] = defaultdict(deque)
        self.channel_free: dict[tuple[int, int], float] = defaultdict(float)
        self.to_sum: dict[int, deque[tuple[float, Action]]] = {rank: deque() for rank in schedule}
        self.sums_done = dict.fromkeys(schedule, 0.0)
        self.copied = {(rank, kind): 0.0 for rank in schedule for kind in (Kind.OFFLOAD, Kind.PREFETCH)}
        self.begun: dict[Action, float] = {}  # start of a computation; end of a way back

    def finish(self) -> None:
        """Carry every rank on to its end."""
        moved = True
        while moved:
            moved = False
            for rank, actions in self.actions.items():
                while self.at[rank] < len(actions) and self.do(rank, actions[self.at[rank]]):
                    self.at[rank] += 1
                    moved = True
        self.raise_if_stuck()

    def timeline(self, schedule: Schedule) -> Timeline:
        """The step that was run; ``schedule`` as it was given, for its bytes."""
        spans = {rank: tuple(sorted(own, key=lambda s: (s.start_s, s.end_s))) for rank, own in self.spans.items()}
        peaks = {rank: peak_bytes(actions, self.costs, self.weight) for rank, actions in schedule.items()}
        return Timeline(spans, peaks)

    def do(self, rank: int, action: Action) -> bool:
        """Whether ``rank`` gets past ``action``."""
        now = self.clock[rank]
        if action.kind in SENDS:
            channel = (rank, peer_rank(action, self.placement, rank))
            self.under_way[channel].append((now, action))
            self._carry(channel)
        elif action.kind in PER_PEER:
            self.announced[action] = now
            self._carry((peer_rank(action, self.placement, rank), rank))
        elif action.kind is Kind.OFFLOAD:
            self._offload(rank, action)
        elif action.kind is Kind.PREFETCH:
            start = max(now, self.copied[rank, action.kind])
            end = start + self.costs[action.stage].back_s * self.weight[action.i]
            self.copied[rank, action.kind] = self.begun[action] = end
            self.spans[rank].append(Span(action, start, end))
        elif action.kind is Kind.REDUCE:
            self.to_sum[rank].append((now, action))
            self._sum(action.stage)
        else:
            return self.compute(rank, action)
        return True

    def compute(self, rank: int, action: Action) -> bool:
        """Do ``action`` if what it needs is known."""
        start = self.ready_s(rank, action)
        if start is None:
            return False
        end = start + self.compute_s(action) / self.speeds[rank]
        if action.kind in (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT):
            end = max(
                end, self.begun.get(action.as_kind(Kind.PREFETCH), 0.0)
            )  # the last of it may come while the first is used
        self.computed(rank, action, start, end)
        return True

    def _offload(self, rank: int, action: Action) -> None:
        """Wait until what was kept is on the host; copies begin with the forward pass."""
        forward = action.as_kind(Kind.FORWARD)
        start = max(self.begun[forward], self.copied[rank, action.kind])
        end = max(start + self.costs[action.stage].out_s * self.weight[action.i], self.done[forward])
        self.copied[rank, action.kind] = end
        self.clock[rank] = max(self.clock[rank], end)
        self.spans[rank].append(Span(action, start, end))

    def ready_s(self, rank: int, action: Action) -> float | None:
        """When ``action`` can start; None as long as that is not known."""
        ready = self.clock[rank]
        for need in self.needs[action]:
            end = self.done.get(need)
            if end is None:
                return None
            ready = max(ready, end)
        return ready

    def computed(self, rank: int, action: Action, start: float, end: float) -> None:
        """Note that ``rank`` did ``action``."""
        self.clock[rank] = self.done[action] = end
        self.begun.setdefault(action, start)
        if action.kind is Kind.BACKWARD_INPUT:  # as good as B for the stages that need its gradients
            self.done[action.as_kind(Kind.BACKWARD)] = end
        self.spans[rank].append(Span(action, start, end))

    def compute_s(self, action: Action) -> float:
        """What ``action`` takes on a device of its own."""
        return self.overhead_s + self.seconds[action.stage][action.kind] * self.weight[action.i]

    def _carry(self, channel: tuple[int, int]) -> None:
        """Let the messages of a channel arrive, as far as their receives are announced."""
        queue = self.under_way[channel]
        while queue and (receive := queue[0][1].other_end) in self.announced:
            sent, send = queue.popleft()
            start = max(sent, self.announced[receive], self.channel_free[channel])
            end = start + self._travel_s(send)
            self.channel_free[channel] = self.done[receive] = end
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
        holders = self.placement.holders(stage)
        fronts = [self.to_sum[rank][0] for rank in holders if self.to_sum[rank]]
        if len(fronts) < len(holders) or any(action.stage != stage for _, action in fronts):
            return
        start = max(*(now for now, _ in fronts), *(self.sums_done[rank] for rank in holders))
        end = start + self.reduce_s.get(stage, 0.0)
        for rank in holders:
            self.spans[rank].append(Span(self.to_sum[rank].popleft()[1], start, end))
            self.sums_done[rank] = end
        for rank in holders:
            if self.to_sum[rank]:
                self._sum(self.to_sum[rank][0][1].stage)

    def raise_if_stuck(self) -> None:
        faults = []
        for rank, actions in self.actions.items():
            if self.at[rank] < len(actions):
                action = actions[self.at[rank]]
                missing = ", ".join(str(need) for need in self.needs[action] if need not in self.done)
                faults.append(f"rank {rank} stands at {action}, which waits for {missing}")
        for (source, target), messages in self.under_way.items():
            faults += [f"rank {source} has sent {send}, which rank {target} does not await" for _, send in messages]
        for rank, sums in self.to_sum.items():
            faults += [
                f"rank {rank} has begun {action}, which not every rank that holds the stage does" for _, action in sums
            ]
        if faults:
            rule = "put every action behind those it waits for, sends and REDUCEs in one order at all their ends"
            raise ValueError("\n  ".join([f"the schedule cannot finish: {rule}", *faults]))
