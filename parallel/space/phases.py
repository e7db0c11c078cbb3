"""Phases of a region, and which maps are stored between them; the others are recomputed from those.

A phase holds the steps that can be computed box by box once all sums before it are known. A map that a later phase
takes is stored, or recomputed there. The output of a block, which the next block adds its own to, is a few cheap
operations away from convolutions' outputs that are stored anyway. A recomputed convolution costs its time: those
that save most bytes for their time are recomputed first, until the rest fits into the memory of the host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
        leaving: names of those that later phases fetch, or that leave the region, and of sums.
        fetched: names of the maps of earlier phases, and of what enters the region, that it takes.
        parts: of ``steps``, in order; empty until boxes are planned.
    """

    global_steps: tuple[Step, ...]
    steps: tuple[Step, ...]
    leaving: frozenset[str]
    fetched: frozenset[str]
    parts: tuple[Part, ...] = ()

    def steps_of(self, part: Part) -> tuple[Step, ...]:
        return self.steps[part.start : part.stop]

    def outputs(self, part: Part) -> list[Step]:
        """Return the steps whose values leave a part."""
        return wanted_from(self.steps, part.stop, self.leaving, part.start)


def wanted_from(steps: Sequence[Step], stop: int, leaving: Collection[str], start: int = 0) -> list[Step]:
    """Return those of ``steps[start:stop]`` whose values are used at ``stop`` or after it."""
    later = {name for step in steps[stop:] for name in step.maps}.union(leaving)
    return [step for step in steps[start:stop] if step.name in later]


def phases_of(steps: Sequence[Step], leaving: Collection[str], recomputed: Collection[str] = ()) -> list[Phase]:
    """Return the phases of a region.

    Args:
        leaving: names that are used after it.
        recomputed: names of maps that are not stored for later phases.
    """
    return _phases(steps, in_phases(steps), leaving, recomputed)


def _phases(
    steps: Sequence[Step],
    base: Sequence[tuple[Sequence[Step], Sequence[Step]]],
    leaving: Collection[str],
    recomputed: Collection[str],
) -> list[Phase]:
    """Return the phases of steps that ``in_phases`` has separated into ``base``."""
    order = {step.name: k for k, step in enumerate(steps)}
    makers = {step.name: step for _, local in base for step in local if not step.sums}
    stored = _crossing(steps, base) - set(recomputed)
    closed: list[tuple[list[Step], set[str]]] = []
    for _, local in base:
        there, fetched = {step.name: step for step in local}, set[str]()
        asked = [name for step in local for name in step.maps]
        while asked:
            name = asked.pop()
            if name in there:
                continue
            if name in stored or name not in makers:
                fetched.add(name)
                continue
            there[name] = makers[name]
            asked += makers[name].maps
        closed.append((sorted(there.values(), key=lambda step: order[step.name]), fetched))
    phases, later = [], set(leaving)
    for (plain, local), (all_steps, fetched) in zip(reversed(base), reversed(closed), strict=True):
        gives = {step.name for step in local if step.sums or step.name in later}
        phases.append(Phase(tuple(plain), tuple(all_steps), frozenset(gives), frozenset(fetched)))
        later |= fetched
    return phases[::-1]


def _crossing(steps: Sequence[Step], base: Sequence[tuple[Sequence[Step], Sequence[Step]]]) -> set[str]:
    """Return names of the maps that a later phase uses than the one that makes them."""
    phase_of = {step.name: k for k, (_, local) in enumerate(base) for step in local}
    maps = {step.name for step in steps if not step.sums and not step.global_op}
    return {name for step in steps for name in step.maps if name in maps and phase_of[name] < phase_of[step.name]}


def peak_stored_bytes(phases: Sequence[Phase], sizes: Mapping[str, int], images: Collection[str]) -> int:
    """Return the bytes of maps between phases, and of their gradients, at the fullest moment, going back."""
    left = [frozenset(step.name for step in phase.steps if step.name in phase.leaving) for phase in phases]
    made = set().union(*left) & set().union(*(phase.fetched for phase in phases))
    gradients: set[str] = set()
    most = 0
    for k in range(len(phases) - 1, -1, -1):
        gradients |= {name for name in phases[k].fetched if name in made and name not in images}
        most = max(most, sum(sizes[name] for name in made) + sum(sizes[name] for name in gradients))
        made -= left[k]
        gradients -= left[k]
    return most


def maps_to_recompute(
    steps: Sequence[Step], leaving: Collection[str], sizes: Mapping[str, int], images: Collection[str], limit: float
) -> frozenset[str]:
    """Return names of the maps to recompute so that the others take no more than ``limit`` bytes, those first that
    cost least for each byte; all that help where even that is too much."""
    base = in_phases(steps)

    def cost_of(chosen: Collection[str]) -> tuple[float, int]:
        phases = _phases(steps, base, leaving, chosen)
        return sum(step.flops for phase in phases for step in phase.steps), peak_stored_bytes(phases, sizes, images)

    chosen: frozenset[str] = frozenset()
    flops, least = cost_of(chosen)
    if least <= limit:
        return chosen
    by_name = {step.name: step for step in steps}
    across = _crossing(steps, base)
    of_px = (by_name[name] for name in across if by_name[name].rules == (SAME, SAME))
    cheap = {step.name for step in of_px if step.flops / max(1, step.value_bytes) <= CHEAP_FLOPS_PER_BYTE}
    chosen, (flops, least) = frozenset(cheap), cost_of(cheap)
    gains = []
    for name in across - cheap if least > limit else ():
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
