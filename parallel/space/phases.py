"""Phases of a region, and which maps are stored between them; the others are recomputed from those.

A phase holds the steps that can be computed box by box once all sums before it are known: of a convolution, a batch
norm and a ReLU, the first phase has the convolution and the sums of the norm, the second the normalised map and the
ReLU. A map that a later phase takes is stored, or recomputed there. The output of a block, which the next block adds
its own to, is a few cheap operations away from convolutions' outputs that are stored anyway. A recomputed convolution
costs its time: those that save most bytes for their time are recomputed first, until the rest fits into the memory of
the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from parallel.space.rule import SAME, Step, in_phases

CHEAP_FLOPS_PER_BYTE = 25.0
"""Of maps that are recomputed before any convolution is."""


@dataclass(frozen=True, slots=True)
class Part:
    """Steps at positions ``start`` to ``stop``, not included, computed in boxes of ``box`` px of the tile."""

    start: int
    stop: int
    box: int


@dataclass(frozen=True)
class Phase:
    """Steps that can be computed once all sums before them are known.

    Attributes:
        global_steps: steps without rows, computed once.
        steps: computed box by box, recomputed ones among them.
        live_out: names of those that later phases fetch, or that leave the region, and of sums.
        fetched: names of the maps of earlier phases, and of what enters the region, that it takes.
        parts: of ``steps``, in order; empty until boxes are planned.
    """

    global_steps: tuple[Step, ...]
    steps: tuple[Step, ...]
    live_out: frozenset[str]
    fetched: frozenset[str]
    parts: tuple[Part, ...] = ()

    def steps_of(self, part: Part) -> tuple[Step, ...]:
        return self.steps[part.start : part.stop]

    def live_steps(self, part: Part) -> list[Step]:
        """Return the steps whose values leave a part."""
        return live_steps(self.steps, part.stop, self.live_out, part.start)


def live_steps(steps: Sequence[Step], stop: int, live_out: Collection[str], start: int = 0) -> list[Step]:
    """Return those of ``steps[start:stop]`` whose values are used at ``stop`` or after it."""
    later = {name for step in steps[stop:] for name in step.maps}.union(live_out)
    return [step for step in steps[start:stop] if step.name in later]


def phases_of(steps: Sequence[Step], live_out: Collection[str], recomputed: Collection[str] = ()) -> list[Phase]:
    """Return the phases of a region.

    Args:
        live_out: names that are used after it.
        recomputed: names of maps that are not stored for later phases.
    """
    return _Separated(steps, live_out).phases(recomputed)


class _Closure(NamedTuple):
    """Steps of a phase, with those ``again`` that compute maps of earlier phases anew; ``fetched``: maps it takes."""

    steps: tuple[Step, ...]
    fetched: frozenset[str]
    again: frozenset[str]


class _Separated:
    """Steps that ``in_phases`` has separated; a phase is looked into once for all choices of what is recomputed that do
    not differ in it. ``crossing``: names of the maps that a later phase uses than the one that makes them."""

    def __init__(self, steps: Sequence[Step], live_out: Collection[str]) -> None:
        self._base, self._live_out = in_phases(steps), live_out
        self._order = {step.name: k for k, step in enumerate(steps)}
        self._makers = {step.name: step for _, local in self._base for step in local if not step.sums}
        self.crossing = _crossing(steps, self._base)
        self._known: list[list[_Closure]] = [[] for _ in self._base]

    def phases(self, recomputed: Collection[str]) -> list[Phase]:
        """Return the phases where maps are recomputed that have these names."""
        again, later = self.crossing.intersection(recomputed), set(self._live_out)
        phases = []
        for k, (plain, local) in reversed(list(enumerate(self._base))):
            closure = self._closed(k, again)
            gives = frozenset(step.name for step in local if step.sums or step.name in later)
            phases.append(Phase(tuple(plain), closure.steps, gives, closure.fetched))
            later |= closure.fetched
        return phases[::-1]

    def _closed(self, k: int, again: set[str]) -> _Closure:
        for known in self._known[k]:
            if known.again <= again and known.fetched.isdisjoint(again):
                return known
        own, fetched = {step.name: step for step in self._base[k][1]}, set[str]()
        there = dict(own)
        asked = [name for step in there.values() for name in step.maps]
        while asked:
            name = asked.pop()
            if name in there:
                continue
            if name not in self._makers or (name in self.crossing and name not in again):
                fetched.add(name)
                continue
            there[name] = self._makers[name]
            asked += there[name].maps
        steps = tuple(sorted(there.values(), key=lambda step: self._order[step.name]))
        self._known[k].append(
            closure := _Closure(steps, frozenset(fetched), frozenset(again & (there.keys() - own.keys())))
        )
        return closure


def _crossing(steps: Sequence[Step], base: Sequence[tuple[Sequence[Step], Sequence[Step]]]) -> set[str]:
    """Return names of the maps that a later phase uses than the one that makes them."""
    phase_of = {step.name: k for k, (_, local) in enumerate(base) for step in local}
    maps = {step.name for step in steps if not step.sums and not step.global_op}
    return {name for step in steps for name in step.maps if name in maps and phase_of[name] < phase_of[step.name]}


def peak_map_bytes(
    names: Iterable[str], parts: Sequence[tuple[AbstractSet[str], AbstractSet[str]]], size: Callable[[str], int]
) -> int:
    """Return the peak bytes of some maps and of their gradients in a backward pass. The maps are there when the forward
    pass ends; gradients come as parts go back; both go with the part that made the map.

    Args:
        parts: (names of the maps that it gives, of those that it fetches and that get a gradient) of each, in order.
    """
    left, gradients = set(names), set[str]()
    most = now = sum(map(size, left))
    for given, fetched in reversed(parts):
        now += sum(map(size, (fetched & left) - gradients))
        gradients |= fetched & left
        most = max(most, now)
        now -= sum(map(size, (*(left & given), *(gradients & given))))
        left -= given
        gradients -= given
    return most


def peak_stored_bytes(phases: Sequence[Phase], sizes: Mapping[str, int], images: AbstractSet[str]) -> int:
    """Return the peak bytes of maps between phases, and of their gradients."""
    made = set().union(*(phase.live_out for phase in phases)) & set().union(*(phase.fetched for phase in phases))
    return peak_map_bytes(made, [(phase.live_out, phase.fetched - images) for phase in phases], sizes.__getitem__)


def maps_to_recompute(
    steps: Sequence[Step], live_out: Collection[str], sizes: Mapping[str, int], images: AbstractSet[str], limit: float
) -> frozenset[str]:
    """Return names of the maps to recompute so that the others take no more than ``limit`` bytes, those first that
    cost least for each byte; all that help where even that is too much."""
    separated = _Separated(steps, live_out)

    def cost_of(chosen: Collection[str]) -> tuple[float, int]:
        phases = separated.phases(chosen)
        return sum(step.flops for phase in phases for step in phase.steps), peak_stored_bytes(phases, sizes, images)

    chosen: frozenset[str] = frozenset()
    flops, least = cost_of(chosen)
    if least <= limit:
        return chosen
    by_name = {step.name: step for step in steps}
    crossing = separated.crossing
    of_px = (by_name[name] for name in crossing if by_name[name].rules == (SAME, SAME))
    cheap = {step.name for step in of_px if step.flops / max(1, step.value_bytes) <= CHEAP_FLOPS_PER_BYTE}
    chosen, (flops, least) = frozenset(cheap), cost_of(cheap)
    gains = []
    for name in crossing - cheap if least > limit else ():
        more, stored = cost_of(chosen | {name})
        if stored < least:
            gains.append(((more - flops) / (least - stored), name))
    for _, name in sorted(gains):
        stored = cost_of(chosen | {name})[1]
        if stored < least:
            chosen, least = chosen | {name}, stored
        if least <= limit:
            break
    return chosen
