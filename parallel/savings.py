"""Which ways of needing less memory a search may take, and in which order it tries them.

Takes a ``Candidate``; gives it again with its optimizer state shared, parts of it computed again, or what it keeps
moved to the host. Each costs time. No torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from parallel.candidate import Candidate

RECOMPUTE = ("none", "stage", "block")


@dataclass(frozen=True)
class Savings:
    """What is open to a search.

    Attributes:
        recompute: of ``Candidate``, the values it may have; "none" where nothing has to be computed again.
        offload: likewise.
    """

    recompute: tuple[str, ...] = RECOMPUTE
    offload: tuple[bool, ...] = (False, True)

    def tiers(self, candidate: Candidate) -> Iterator[list[Candidate]]:
        """``candidate`` first, where nothing else is asked for; then variants of it that need less memory and more
        time. Which of a tier is the fastest depends on the machine; those of a later tier need less memory."""
        again = [how for how in self.recompute if how != "none" and _can_recompute(candidate, how)]
        moves = candidate.name != "fsdp"
        recomputed = [dataclasses.replace(candidate, recompute=how) for how in again]
        moved = [dataclasses.replace(variant, offload=True) for variant in (candidate, *recomputed) if moves]
        for tier in ([candidate], [*recomputed, *moved[:1]], moved[1:]):
            variants = [variant for variant in tier if self._allow(variant)]
            if variants:
                yield variants
            if variants and candidate.paired:
                yield [dataclasses.replace(variant, shard_optimizer=True) for variant in variants]

    def refusal(self, candidate: Candidate) -> str:
        """Why ``tiers`` gives nothing."""
        asked = f"recompute {' or '.join(self.recompute)}" * ("none" not in self.recompute)
        asked = " and ".join(word for word in (asked, "offload" * (False not in self.offload)) if word)
        reason = "cannot split the model's backward pass then"
        if candidate.name == "fsdp":
            reason = "gathers parameters as it goes along, and keeps all activations on the device"
        elif candidate.name != "zero-bubble":
            reason = "has no stage that could be computed again later"
        return f"{asked} is asked for, and {candidate.name} {reason}"

    def _allow(self, variant: Candidate) -> bool:
        return variant.recompute in self.recompute and variant.offload in self.offload


ANY = Savings()
PLAIN = Savings(("none",), (False,))
ON_DEVICE = Savings(offload=(False,))
"""Computing again, but moving nothing."""


def _can_recompute(candidate: Candidate, how: str) -> bool:
    if how == "stage":
        return candidate.splits and candidate.m > 1
    return candidate.name not in ("fsdp", "zero-bubble")
