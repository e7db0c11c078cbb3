"""Which ways of needing less memory a search may take, and in which order it tries them.

Takes a strategy; gives it again with its optimizer state shared, parts of it computed again, or what it keeps
moved to the host. Each costs time. No torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from parallel.strategy import Strategy

RECOMPUTE = ("none", "stage", "block", "optimal")


@dataclass(frozen=True)
class Savings:
    """What is open to a search.

    Attributes:
        recompute: of ``ActivationPolicy``, the values it may have; "none" where nothing has to be computed again.
        offload: whether what is kept may be moved to the host.
        stream: tiles may be computed box by box.
        beyond: known not to fit: of what it allows, nothing is tried.
    """

    recompute: tuple[str, ...] = RECOMPUTE
    offload: tuple[bool, ...] = (False, True)
    stream: bool = True
    beyond: Savings | None = field(default=None, repr=False, compare=False)

    @property
    def boxes(self) -> bool:
        """Tiles may be computed box by box, which goes with nothing else."""
        return self.stream and "none" in self.recompute and False in self.offload

    def tiers(self, candidate: Strategy) -> Iterator[list[Strategy]]:
        """``candidate`` first, where nothing else is asked for; then variants of it that need less memory and more
        time. Which of a tier is the fastest depends on the machine; those of a later tier need less memory."""
        again = [how for how in self.recompute if how != "none" and _can_recompute(candidate, how)]
        if self.recompute != ("optimal",):
            again = [how for how in again if how != "optimal"]  # takes long to find: for what is chosen in the end
        moves = candidate.name != "fsdp"
        recomputed = [candidate.under(recompute=how) for how in again]
        moving = [each for each in (candidate, *recomputed) if moves and each.policy.recompute != "optimal"]
        moved = [variant.under(offload="overlap") for variant in moving]
        chosen = [candidate.under(recompute="optimal", offload="overlap")] if moves else []
        chosen = chosen if _can_recompute(candidate, "optimal") else []
        for tier in ([candidate], [*recomputed, *moved[:1]], moved[1:], chosen):
            variants = [variant for variant in tier if self._allow(variant)]
            if variants:
                yield variants
            if variants and candidate.paired:
                yield [dataclasses.replace(variant, shard_optimizer=True) for variant in variants]

    def refined(self, candidate: Strategy) -> Strategy | None:
        """``candidate`` with the best choice of what is computed again in place of blocks or stages; None where it does
        not compute again, or that is not open."""
        chosen = candidate.under(recompute="optimal")
        rough = candidate.policy.recompute in ("stage", "block") and not candidate.policy.moves
        return chosen if rough and self._allow(chosen) and _can_recompute(candidate, "optimal") else None

    def refusal(self, candidate: Strategy) -> str:
        """Why nothing that ``tiers`` gives can run."""
        if any(self.tiers(candidate)):
            return "no choice of what is computed again was found that fits the memory"
        asked = f"recompute {' or '.join(self.recompute)}" * ("none" not in self.recompute)
        asked = " and ".join(word for word in (asked, "offload" * (False not in self.offload)) if word)
        reason = "cannot split the model's backward pass then"
        if candidate.name == "fsdp":
            reason = "gathers parameters as it goes along, and keeps all activations on the device"
        elif candidate.name != "zero-bubble":
            reason = "has no stage that could be computed again later"
        return f"{asked} is asked for, and {candidate.name} {reason}"

    def _allow(self, variant: Strategy) -> bool:
        return self._include(variant) and not (self.beyond and self.beyond._include(variant))

    def _include(self, variant: Strategy) -> bool:
        return variant.policy.recompute in self.recompute and variant.policy.moves in self.offload


ANY = Savings()
PLAIN = Savings(("none",), (False,), stream=False)
ON_DEVICE = Savings(offload=(False,), stream=False)
"""Computing again, but moving nothing."""
BOXES = Savings(("none",), (False,))
"""Tiles computed box by box, where they do not fit as they are."""


def _can_recompute(candidate: Strategy, how: str) -> bool:
    if how == "stage":
        return candidate.splits and candidate.m > 1
    return candidate.name not in ("fsdp", "zero-bubble")
