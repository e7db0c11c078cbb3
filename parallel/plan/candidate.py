"""The ways to train that a planner chooses from: strategy, mesh, microbatches, and what is kept for backward passes.

Takes the number of ranks and the global batch; gives ``Candidate``, all those that a schedule allows. What they cost
and whether they fit is for others to say. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from parallel.memory.policy import ActivationPolicy
from parallel.schedule.registry import SCHEDULES

WHOLE = ("single", "ddp", "fsdp")
"""Strategies in which each rank computes the whole model."""

MAX_DEPTH = 32
"""Ranks that a model is spread over at most in a search; deeper pipelines have stages of a layer or two."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to train.

    Attributes:
        name: of the strategy.
        ranks: all of them; d groups of ``depth``.
        depth: ranks that a copy of the model is spread over; 1 where each rank computes all of it.
        m: microbatches of the global batch, over all groups.
        chunks: stages a rank holds of each replica.
        recompute: "none"; "stage": keep only what enters a stage; "block": only what enters a block of the model;
            "optimal": compute again what costs least time for the memory it saves.
        offload: what is kept is moved to the host.
        shard_optimizer: ranks of a pair of inverted replicas keep half of their optimizer state each.
    """

    name: str
    ranks: int
    depth: int
    m: int
    chunks: int = 1
    recompute: str = "none"
    offload: bool = False
    shard_optimizer: bool = False

    @property
    def groups(self) -> int:
        """Data-parallel groups, d."""
        return self.ranks // self.depth

    @property
    def splits(self) -> bool:
        """The model is cut into stages."""
        return self.name not in WHOLE

    @property
    def paired(self) -> bool:
        """A rank holds two stages, one of each of two inverted replicas."""
        return self.splits and SCHEDULES[self.name].replicas == 2

    @property
    def copies(self) -> int:
        """Of each stage, in all groups."""
        return self.groups * (1 + self.paired)

    @property
    def stages(self) -> int:
        return self.depth * self.chunks

    @property
    def stagewise(self) -> bool:
        """Stages are computed again as a whole, which their schedule shows."""
        return self.recompute == "stage"

    @property
    def saves(self) -> bool:
        """Takes time to need less memory for what is kept."""
        return self.recompute != "none" or self.offload

    def keeping(self, chosen: tuple[tuple[str, str], ...] = (), ahead: int = 0) -> ActivationPolicy:
        """The rule for what is kept.

        Args:
            chosen: runs of layers that are computed again, where that is "optimal".
            ahead: bytes that offloading leaves on the device or brings back ahead.
        """
        optimal = self.recompute == "optimal"
        return ActivationPolicy(
            "chosen" if optimal else self.recompute,
            chosen if optimal else (),
            "overlap" if self.offload else "none",
            ahead if self.offload else 0,
        )

    @property
    def savings(self) -> str:
        """What it does to need less memory, for people: "+recompute block +offload"; empty where it does nothing."""
        again = {"none": "", "stage": "+recompute"}.get(self.recompute, f"+recompute {self.recompute}")
        words = (again, "+offload" * self.offload, "+shard-optimizer" * self.shard_optimizer)
        return " ".join(word for word in words if word)

    def __str__(self) -> str:
        mesh = f" {self.groups} x {self.depth}" if self.splits else f" {self.ranks}" if self.ranks > 1 else ""
        return f"{self.name}{mesh}, m={self.m} {self.savings}".rstrip()


def candidates(
    ranks: int,
    batch: int,
    *,
    names: Sequence[str],
    most_stages: int,
    depth: int | None = None,
    m: int | None = None,
) -> Iterator[Candidate]:
    """All without recomputation and without a sharded optimizer, which are for those that do not fit.

    Microbatches are of 1, 2, 4, ... tiles, up to a group's share of the batch.

    Args:
        names: strategies to choose from.
        most_stages: that the model can be cut into.
        depth, m: given by the user; None leaves them free.
    """
    for name in names:
        if name in WHOLE:
            if depth is None and (ranks == 1) == (name == "single"):
                yield from (Candidate(name, ranks, 1, n) for n in _microbatches(name, ranks, batch, m))
            continue
        chunks = 2 if SCHEDULES[name].chunks else 1
        for ranks_of_group in _depths(ranks, depth):
            if ranks_of_group * chunks > most_stages:
                continue
            for n in _microbatches(name, ranks // ranks_of_group, batch, m):
                least = ranks_of_group if chunks > 1 else SCHEDULES[name].replicas
                if n // (ranks // ranks_of_group) < least:
                    continue  # too few for all chunks or replicas to be at work: slower than without them
                yield Candidate(name, ranks, ranks_of_group, n, chunks)


def leanest(found: Iterable[Candidate]) -> list[Candidate]:
    """Of candidates of one strategy those with the smallest and the largest microbatches for each number of stages;
    others take bytes between theirs. The smallest microbatches first, and of these the most stages."""
    ends: dict[int, list[Candidate]] = {}
    for candidate in sorted(found, key=lambda one: -one.m):
        ends.setdefault(candidate.depth, []).append(candidate)
    chosen = [one for group in ends.values() for one in {group[0]: None, group[-1]: None}]
    return sorted(chosen, key=lambda one: (-one.m, -one.depth))


def _depths(ranks: int, asked: int | None) -> list[int]:
    return [d for d in range(2, min(ranks, MAX_DEPTH) + 1) if ranks % d == 0 and asked in (None, d)]


def _microbatches(name: str, groups: int, batch: int, asked: int | None) -> list[int]:
    """Numbers of microbatches: every group has one, every one has a tile."""
    if name == "mast":
        return [2 * groups] if 2 * groups <= batch and asked in (None, 2 * groups) else []
    if asked is not None:
        return [asked] if groups <= asked <= batch else []
    if groups > batch:
        return []
    sizes = [2**k for k in range(batch.bit_length())]
    return sorted({groups, *(n for tiles in sizes if (n := -(-batch // tiles)) >= groups)})
