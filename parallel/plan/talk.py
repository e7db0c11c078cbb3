"""What a layer of a divided model exchanges within its team, on paper: pieces of maps, sums, and copies for both.

Made by ``part_graph`` for the largest member and one tile; ``side_by_side`` gives it seconds. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Halo:
    """A piece of a map on its way, for one tile.

    Attributes:
        bytes: that the member which fetches most is sent; ``all_bytes``: all members together.
        messages: that the member is sent.
        back: gradients return.
        behind: the member computes its own part of what needs it while it travels.
    """

    bytes: int
    all_bytes: int
    messages: int
    back: bool
    behind: bool = False


@dataclass(frozen=True)
class Sum:
    """A sum over the members of a team.

    Attributes:
        bytes: that each member gives.
        gathered: members learn what each has given.
    """

    bytes: int
    gathered: bool = False


@dataclass(frozen=True)
class Talk:
    """What a layer exchanges within a team, for one tile.

    Attributes:
        forward_sums, backward_sums: over the members.
        forward_copied, backward_copied: bytes that are read or written to put boxes together and to take them apart.
    """

    halos: tuple[Halo, ...] = ()
    forward_sums: tuple[Sum, ...] = ()
    backward_sums: tuple[Sum, ...] = ()
    forward_copied: int = 0
    backward_copied: int = 0

    @property
    def silent(self) -> bool:
        """Nothing is exchanged or copied."""
        return self == SILENT


SILENT = Talk()
