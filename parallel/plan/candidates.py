"""Strategies that a planner chooses from, and the ways of needing less memory that it may take.

Takes the number of ranks and the global batch; gives every schedule on every mesh with every number of microbatches.
``MemoryOptions`` gives a strategy again with its optimizer state shared, parts of it recomputed, or what it keeps moved
to the host. What they cost and whether they fit is for others to say. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from parallel.schedule.registry import PIPEDREAM, kind_of
from parallel.space.team import TeamGrid
from parallel.strategy import WHOLE, Strategy

MAX_TEAM = 8
"""Members of a team at most in a search; of more, each has little to compute between two exchanges."""
MAX_DEPTH = 32
"""Ranks that a model is spread over at most in a search; deeper pipelines have stages of a layer or two."""


def candidates(
    ranks: int, batch: int, *, names: Sequence[str], most_stages: int, depth: int | None = None, m: int | None = None
) -> Iterator[Strategy]:
    """Yield all without recomputation and without divided state, which are for those that do not fit.

    Microbatches are of 1, 2, 4, ... tiles, up to a group's share of the batch.

    Args:
        names: strategies to choose from.
        most_stages: that the model can be cut into.
        depth, m: given by the user; None leaves them free.
    """
    for name in names:
        if name in ("spatial", "subgraph"):  # of teams alone
            continue
        if name in WHOLE:
            if depth is None and (ranks == 1) == (name == "single"):
                yield from (Strategy(name, ranks, 1, n) for n in _microbatches(name, ranks, batch, m))
            continue
        kind = kind_of(name)
        chunks = 2 if kind.chunks else 1
        for ranks_of_group in range(2, min(ranks, MAX_DEPTH) + 1):
            if ranks % ranks_of_group or depth not in (None, ranks_of_group):
                continue
            if ranks_of_group * chunks > most_stages or (kind is PIPEDREAM and ranks_of_group < ranks):
                continue
            for n in _microbatches(name, ranks // ranks_of_group, batch, m):
                least = ranks_of_group if chunks > 1 else kind.replicas
                if n // (ranks // ranks_of_group) < least:
                    continue  # too few for all chunks or replicas to be at work: slower than without them
                yield Strategy(name, ranks, ranks_of_group, n, chunks)


def in_teams(
    ranks: int,
    batch: int,
    *,
    names: Sequence[str],
    most_stages: int,
    most_members: int,
    depth: int | None = None,
    m: int | None = None,
) -> Iterator[Strategy]:
    """Yield those of ``candidates`` with teams in place of ranks, which divide each tile among them.

    Args:
        most_members: of a team: the ranks of a node, as a team stays on one node.
    """
    for members in range(2, min(most_members, MAX_TEAM) + 1):
        if ranks % members or most_members % members:
            continue
        teams = ranks // members
        for grid in grids_of(members):
            if "spatial" in names and depth in (None, 1):
                for n in _microbatches("spatial", teams, batch, m):
                    yield Strategy("spatial", ranks, 1, n, grid=grid)
            split = [n for n in names if n not in (*WHOLE, "spatial", "subgraph", "zero-bubble", PIPEDREAM.name)]
            for each in candidates(teams, batch, names=split, most_stages=most_stages, depth=depth, m=m):
                yield dataclasses.replace(each, ranks=ranks, grid=grid)


def in_branches(
    ranks: int, batch: int, *, most_members: int, depth: int | None = None, m: int | None = None
) -> Iterator[Strategy]:
    """Yield the candidates of subgraph.

    Args:
        most_members: as for ``in_teams``.
        depth: members, given by the user.
    """
    for members in range(2, min(most_members, MAX_TEAM) + 1):
        if ranks % members == 0 and most_members % members == 0 and depth in (None, members):
            for n in _microbatches("subgraph", ranks // members, batch, m):
                yield Strategy("subgraph", ranks, 1, n, ways=members)


def grids_of(members: int) -> list[TeamGrid]:
    """Return the grids worth trying: rows alone, whose pieces lie in memory as they are sent, and nearly square
    grids, which have the shortest borders."""
    columns = max(c for c in range(1, math.isqrt(members) + 1) if members % c == 0)
    return [TeamGrid(members, 1)] + [TeamGrid(members // columns, columns)] * (columns > 1)


def fewest_bytes(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Return, of candidates of one name, those with the smallest and the largest microbatches for each number of
    stages; others take bytes between theirs. The smallest microbatches first, and of these the most stages."""
    by_depth: dict[int, list[Strategy]] = {}
    for strategy in sorted(strategies, key=lambda candidate: -candidate.m):
        by_depth.setdefault(strategy.depth, []).append(strategy)
    ends = [end for own in by_depth.values() for end in {own[0]: None, own[-1]: None}]
    return sorted(ends, key=lambda candidate: (-candidate.m, -candidate.depth))


def _microbatches(name: str, groups: int, batch: int, asked: int | None) -> list[int]:
    """Return the numbers of microbatches of which every group has one, and every one a tile."""
    if name == "mast":
        return [2 * groups] if 2 * groups <= batch and asked in (None, 2 * groups) else []
    if asked is not None:
        return [asked] if groups <= asked <= batch else []
    if groups > batch:
        return []
    sizes = [2**k for k in range(batch.bit_length())]
    return sorted({groups, *(n for tiles in sizes if (n := -(-batch // tiles)) >= groups)})


RECOMPUTE = ("none", "stage", "block", "optimal")


@dataclass(frozen=True)
class MemoryOptions:
    """Ways of needing less memory that a search may take.

    Attributes:
        recompute: of ``ActivationPolicy``, the values it may have; "none" where nothing has to be recomputed.
        offload: whether what is kept may be moved to the host.
        zero: of ``Strategy``, the values it may have; fsdp goes without.
        stream: tiles may be computed box by box.
        beyond: known not to fit: of what it allows, nothing is tried.
    """

    recompute: tuple[str, ...] = RECOMPUTE
    offload: tuple[bool, ...] = (False, True)
    stream: bool = True
    zero: tuple[int, ...] = (0, 1, 2)
    beyond: MemoryOptions | None = field(default=None, repr=False, compare=False)

    @property
    def boxes(self) -> bool:
        """Tiles may be computed box by box, which goes with nothing else."""
        return self.stream and "none" in self.recompute and False in self.offload and 0 in self.zero

    def escalation(self, candidate: Strategy) -> Iterator[list[Strategy]]:
        """Yield lists of variants of ``candidate``, each of which needs less memory and more time than the one before:
        as it is; recomputed or offloaded; both. Which variant of a list is fastest depends on the machine."""
        again = [how for how in self.recompute if how != "none" and _can_recompute(candidate, how)]
        if self.recompute != ("optimal",):
            again = [how for how in again if how != "optimal"]  # takes long to find: for what is chosen in the end
        moves = candidate.name not in ("fsdp", PIPEDREAM.name)
        recomputed = [candidate.under(recompute=how) for how in again]
        moving = [each for each in (candidate, *recomputed) if moves and each.policy.recompute != "optimal"]
        moved = [variant.under(offload="overlap") for variant in moving]
        for tier in ([candidate], [*recomputed, *moved[:1]], moved[1:]):
            variants = [variant for variant in tier if self._allow(variant)]
            if variants:
                yield variants
            divided = [
                dataclasses.replace(variant, zero=zero) for variant in tier for zero in self._divisions(candidate)
            ]
            if variants := [variant for variant in divided if self._allow(variant)]:
                yield variants

    def with_optimal(self, candidate: Strategy) -> Strategy | None:
        """Return ``candidate`` with the best choice of what is recomputed; None where it recomputes nothing, or that is
        not allowed."""
        chosen = candidate.under(recompute="optimal")
        rough = candidate.policy.recompute in ("stage", "block") and not candidate.policy.moves
        return chosen if rough and self._allow(chosen) and _can_recompute(candidate, "optimal") else None

    def refusal(self, candidate: Strategy) -> str:
        """Return why nothing that ``escalation`` yields can run."""
        if any(self.escalation(candidate)):
            return "no choice of what is recomputed was found that fits the memory"
        asked = f"recompute {' or '.join(self.recompute)}" * ("none" not in self.recompute)
        divided = f"zero {' or '.join(map(str, self.zero))}" * (0 not in self.zero)
        asked = " and ".join(word for word in (asked, "offload" * (False not in self.offload), divided) if word)
        reason = "cannot split the model's backward pass then"
        if divided and candidate.holders == 1:
            reason = "has each stage on one rank alone"
        elif candidate.name == "fsdp":
            reason = "gathers parameters as it goes along: it recomputes by blocks alone, and moves no activations"
        elif candidate.stashes:
            reason = "keeps all activations on the device"
        elif candidate.ways > 1:
            reason = "keeps each branch on one rank already, and recomputes by blocks alone"
        elif candidate.name != "zero-bubble":
            reason = "has no stage that could be recomputed later"
        return f"{asked} is asked for, and {candidate.name} {reason}"

    def _divisions(self, candidate: Strategy) -> list[int]:
        """Return the stages of ZeRO to try: of two that take the same bytes, the one that sends less."""
        if candidate.holders == 1 or candidate.name == "fsdp" or candidate.ways > 1:
            return []
        allowed = [zero for zero in self.zero if zero]
        return allowed[:1] if candidate.paired or candidate.m == candidate.groups else allowed

    def _allow(self, variant: Strategy) -> bool:
        return self._include(variant) and not (self.beyond and self.beyond._include(variant))

    def _include(self, variant: Strategy) -> bool:
        allowed = variant.policy.recompute in self.recompute and variant.policy.moves in self.offload
        return allowed and (variant.zero in self.zero or variant.name == "fsdp")


ANY = MemoryOptions()
PLAIN = MemoryOptions(("none",), (False,), stream=False)
ON_DEVICE = MemoryOptions(offload=(False,), stream=False)
"""Recomputation without offload."""
BOXES = MemoryOptions(("none",), (False,))
"""Tiles computed box by box, if they do not fit as they are."""


def _can_recompute(candidate: Strategy, how: str) -> bool:
    if candidate.ways > 1:  # regions with branches are in blocks
        return how == "block"
    if how == "stage":
        return candidate.splits and candidate.m > 1
    return how == "block" if candidate.name == "fsdp" else candidate.name != "zero-bubble"
