"""Bytes that a box takes on the device while its backward pass runs, which is its fullest moment.

Takes the steps of a part, from the last to the first, and the share of each map that the box computes; gives the most
that lives at a time. A box holds what it fetched, what autograd keeps of each step up to the one that goes back, the
gradients that wait, and the work space of that one. A part that begins earlier only adds to it, so that all parts that
end at one step are known from one walk towards the start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from parallel.space.step import Step


class BoxBytes:
    """Of a part that ends at some step and grows towards the start.

    Args:
        sizes: bytes of every map on this box, whole rims included.
        given: bytes of what the box gives of each map that leaves the part; their gradients are as large.
        without: names of maps that have no gradient: images.
    """

    def __init__(self, sizes: Mapping[str, float], given: Mapping[str, float], without: Collection[str] = ()) -> None:
        self._sizes, self._given, self._without = sizes, given, without
        self._pulled = sum(given.values())
        self._fetched: dict[str, float] = {}
        self._waiting: dict[str, float] = {}
        self._saved: set[str] = set()
        self._resident = 0.0
        self._peak = 0.0
        self._params = 0.0

    def begin_with(self, step: Step, share: float, padded: bool) -> None:
        """Let the part begin with ``step``, before all that it has.

        Args:
            share: of the step's whole map, or of what it sums, that the box computes.
            padded: on one side alone.
        """
        name, sizes = step.name, self._sizes
        copies = padded and step.copies_pads
        size = 0.0 if step.sums else sizes[name]
        kept = step.kept_bytes * share + (sum(sizes[source] for source in step.maps) if copies else 0.0)
        saves = [saved for saved in step.saves if saved == name or not copies]
        self._saved.update(saves)
        held = 0.0
        self._fetched.pop(name, None)
        if name in self._saved and step.lies_in:
            self._saved.add(step.lies_in)
        elif name in self._saved:
            held = size
        elif name in self._given:
            self._resident += size
        arrives = self._waiting.pop(name, 0.0)
        if name in self._given and not step.sums and self._given[name] < size:
            arrives = max(arrives, size)  # the rest of its gradient is zeros
        crossing = sum(self._waiting.values())
        makes = 0.0
        sources = [source for source in step.maps if source not in self._without]
        for k, source in enumerate(sources):
            new = sizes[source] if not step.hands_on else (arrives or size if k == 0 else 0.0)
            makes += 0.0 if step.hands_on else new
            # Where gradients add up, the sum is as large as each.
            self._waiting[source] = max(new, self._waiting.get(source, 0.0))
        for source in step.maps:
            self._fetched[source] = sizes[source]
        self._params += step.param_bytes
        at_work = arrives + crossing + makes + step.work_bytes * share + self._params
        own = held if name in step.saves else 0.0
        self._peak = kept + max(self._peak + held, at_work + own)

    @property
    def bytes(self) -> float:
        """The most that lives at a time, gradients of the part's own parameters included."""
        return self._peak + self._pulled + self._resident + sum(self._fetched.values())

    @property
    def fetched(self) -> Mapping[str, float]:
        """Bytes of the maps that the part fetches."""
        return self._fetched
