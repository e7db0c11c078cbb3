"""Phases of a region, and which maps are stored between them: the others are made again from those that are.

A phase is what can be computed box by box once all sums before it are known. What a later phase takes of an earlier one
is stored, or made again in the later one, where all sums it asks for are known by then: the output of a block, which
the next block adds its own to, is a few cheap operations away from convolutions' outputs that are stored anyway. A
convolution made again costs its time; which ones save most bytes for it is for the memory of the host to say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from parallel.space.rule import SAME, Step, in_phases

CHEAP_FLOPS_PER_BYTE = 25.0
"""Of what is made again before any convolution is."""


@dataclass(frozen=True)
class Phase:
    """What can be computed once all sums before it are known.

    Attributes:
        plain: steps without rows, computed once.
        steps: computed box by box, those that are made again among them.
        leaving: names of those that later phases fetch, or that leave the region, and of sums.
        fetched: names of the maps of earlier phases, and of what enters the region, that it takes.
    """

    plain: tuple[Step, ...]
    steps: tuple[Step, ...]
    leaving: frozenset[str]
    fetched: frozenset[str]


def phases_of(steps: Sequence[Step], leaving: Collection[str], again: Collection[str] = ()) -> list[Phase]:
    """Return the phases of a region.

    Args:
        leaving: names that are used after it.
        again: names of maps that are not stored for later phases.
    """
    return _phases(steps, in_phases(steps), leaving, again)


def _phases(
    steps: Sequence[Step],
    base: Sequence[tuple[Sequence[Step], Sequence[Step]]],
    leaving: Collection[str],
    again: Collection[str],
) -> list[Phase]:
    """Return the same, of steps that ``in_phases`` has told apart."""
    order = {step.name: k for k, step in enumerate(steps)}
    makers = {step.name: step for _, local in base for step in local if not step.sums}
    stored = _crossing(steps, base) - set(again)
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
    steps: Sequence[Step],
    leaving: Collection[str],
    sizes: Mapping[str, int],
    images: Collection[str],
    limit: float,
) -> frozenset[str]:
    """Return names of the maps to make again so that the others take no more than ``limit`` bytes, those first that
    cost least for each byte; as many as help where even that is too much."""

    base = in_phases(steps)

    def cost_of(again: Collection[str]) -> tuple[float, int]:
        phases = _phases(steps, base, leaving, again)
        return sum(step.flops for phase in phases for step in phase.steps), peak_stored_bytes(phases, sizes, images)

    again: frozenset[str] = frozenset()
    flops, least = cost_of(again)
    if least <= limit:
        return again
    by_name = {step.name: step for step in steps}
    across = _crossing(steps, base)
    cheap = {
        name for name in across if by_name[name].rules == (SAME, SAME) and _each(by_name[name]) <= CHEAP_FLOPS_PER_BYTE
    }
    again, (flops, least) = frozenset(cheap), cost_of(cheap)
    gains = []
    for name in across - cheap if least > limit else ():
        more, stored = cost_of(again | {name})
        if stored < least:
            gains.append(((more - flops) / (least - stored), name))
    for _, name in sorted(gains):
        stored = cost_of(again | {name})[1]
        if stored < least:
            again, least = again | {name}, stored
        if least <= limit:
            break
    return again


def _each(step: Step) -> float:
    """Flops for each byte of the value."""
    return step.flops / max(1, step.value_bytes)
