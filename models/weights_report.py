"""What of a file of weights came into a model: counted for each block, and told as a table.

Takes the blocks of the tensors that were loaded and that were not; gives lines for a user and plain values for a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("loaded", "fresh", "other shape", "unused")
"""Loaded; left as drawn, as the file has none; left as drawn, of other classes; in the file alone."""


@dataclass(frozen=True)
class LoadedWeights:
    """What of a file is in a model.

    Attributes:
        prefix: stood before the names in the file that were taken, with a dot behind it.
        part: of the model that they are in, likewise.
        tensors: of the model.
        blocks: name -> how many tensors of each of ``KINDS``; those of the model first, in its order.
        left: a line for each tensor that was not loaded.
    """

    source: str
    prefix: str
    part: str
    tensors: int
    blocks: Mapping[str, Mapping[str, int]]
    left: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """Return what a user reads: how much of the model was loaded, then a table of blocks."""
        loaded = sum(counts["loaded"] for counts in self.blocks.values())
        where = f", named {self.prefix}* in the file" if self.prefix else ""
        where += f", into {self.part.removesuffix('.')}" if self.part else ""
        rows = [["block", *KINDS]]
        rows += [[name, *(str(counts[kind] or "-") for kind in KINDS)] for name, counts in self.blocks.items()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        cells = (
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            for row in rows
        )
        table = (f"  {'  '.join(row)}" for row in cells)
        return f"--weights {self.source}: {loaded} of {self.tensors} tensors loaded{where}", *table

    @property
    def summary(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return {
            "file": self.source,
            "prefix": self.prefix,
            "part": self.part,
            "tensors": self.tensors,
            "blocks": {name: dict(counts) for name, counts in self.blocks.items()},
            "left": list(self.left),
        }


def report(
    source: str, prefix: str, part: str, own: Sequence[str], kinds: Mapping[str, Sequence[str]], left: Sequence[str]
) -> LoadedWeights:
    """Return the report of a file.

    Args:
        own: the block of each tensor of the model.
        kinds: of ``KINDS``, the block of each tensor that it is so for.
    """
    counts = {kind: Counter(kinds[kind]) for kind in KINDS}
    names = dict.fromkeys((*own, *(name for kind in KINDS for name in kinds[kind])))
    blocks = {name: {kind: counts[kind][name] for kind in KINDS} for name in names}
    return LoadedWeights(source, prefix, part, len(own), blocks, tuple(left))
