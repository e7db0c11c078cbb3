"""One step of a schedule, and the schedule: who computes what in which order.

An action prints as papers draw it and parses back: ``2F0`` is the forward pass of microbatch 0 through stage 2,
``1:2F0`` the same in replica 1, ``0SEND_F3>1`` the sending of stage 0's outputs for microbatch 3 to stage 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum


class Kind(Enum):
    """Kind of an action. The first four are written by schedules; passes add the others."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and of parameters."""
    BACKWARD_INPUT = "I"
    """Gradients of the inputs only; a WEIGHT action of the same microbatch follows (zero bubble)."""
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"
    """The forward pass again, before the backward pass that needs what it saves."""
    SEND_FORWARD = "SEND_F"
    """Send the stage's outputs that stage ``peer`` uses."""
    RECEIVE_FORWARD = "RECV_F"
    """Receive the outputs of stage ``peer`` that this stage uses."""
    SEND_BACKWARD = "SEND_B"
    """Send the gradients of what stage ``peer`` had sent forward."""
    RECEIVE_BACKWARD = "RECV_B"
    """Receive, from stage ``peer``, the gradients of what was sent to it."""
    OFFLOAD = "O"
    """What the forward pass keeps is on the host from here on."""
    PREFETCH = "P"
    """Begin to bring back to the device what the backward pass needs first."""
    REDUCE = "REDUCE"
    """Begin to sum the stage's gradients over all ranks that hold a copy of it; the update waits for the sum."""
    UPDATE = "U"
    """Update the stage's parameters with the gradients of one microbatch, of which the next versions are made."""

    __hash__ = object.__hash__  # members are single: their names need not be hashed, as often as plans look actions up


PASSES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE})
"""Forward and backward passes, and their parts."""

COMPUTE = PASSES | {Kind.UPDATE}
"""Actions that take the rank's time."""

BEGINS_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""Actions that need the gradients of a stage's outputs and give those of its inputs."""

SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

_OTHER_END = {
    Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD,
    Kind.RECEIVE_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD,
    Kind.RECEIVE_BACKWARD: Kind.SEND_BACKWARD,
}

PER_PEER = frozenset(_OTHER_END)
"""Actions that name another stage."""

_TEXT = re.compile(
    r"(?:(?P<replica>\d+):)?(?P<stage>\d+)"
    r"(?P<kind>SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|F|B|I|W|R|O|P|U)(?P<microbatch>\d+)?(?:[<>](?P<peer>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    Attributes:
        microbatch: of the global batch, from 0; None for REDUCE, which concerns the whole step.
        replica: copy of the model within its group of ranks.
        peer: stage at the other end, for sends and receives; it belongs to the same replica.
    """

    kind: Kind
    stage: int
    microbatch: int | None
    replica: int = 0
    peer: int | None = None

    def __post_init__(self) -> None:
        assert (self.microbatch is None) == (self.kind is Kind.REDUCE), self
        assert (self.peer is not None) == (self.kind in PER_PEER), self

    def __str__(self) -> str:
        replica = f"{self.replica}:" if self.replica else ""
        microbatch = "" if self.microbatch is None else self.microbatch
        arrow = ">" if self.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD) else "<"
        peer = "" if self.peer is None else f"{arrow}{self.peer}"
        return f"{replica}{self.stage}{self.kind.value}{microbatch}{peer}"

    @property
    def i(self) -> int:
        """The microbatch of an action that has one: any but REDUCE."""
        assert self.microbatch is not None, self
        return self.microbatch

    @property
    def key(self) -> tuple[int, int | None, int]:
        """(stage, microbatch, replica): equal for all that is done to one microbatch in one stage."""
        return self.stage, self.microbatch, self.replica

    def as_kind(self, kind: Kind, peer: int | None = None) -> Action:
        """The action of another ``kind`` on the same microbatch in the same stage."""
        return Action(kind, self.stage, self.microbatch, self.replica, peer)

    @property
    def other_end(self) -> Action:
        """The receive of a send, the send of a receive."""
        assert self.peer is not None, self
        return Action(_OTHER_END[self.kind], self.peer, self.microbatch, self.replica, self.stage)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as ``text``.

        Raises:
            ValueError: it is none.
        """
        if match := _TEXT.fullmatch(text.strip()):
            kind = Kind(match["kind"])
            replica, stage, microbatch, peer = (
                None if match[name] is None else int(match[name]) for name in ("replica", "stage", "microbatch", "peer")
            )
            if (microbatch is None) == (kind is Kind.REDUCE) and (peer is not None) == (kind in PER_PEER):
                return cls(kind, stage or 0, microbatch, replica or 0, peer)
        raise ValueError(
            f"{text!r} is no action: write stage, kind and microbatch as in 2F0 (F forward, B backward, I and W its "
            "halves, R recompute, O offload, P prefetch, U update), with the replica before a colon as in 1:2F0"
        )


Schedule = dict[int, list[Action]]
"""Rank, or team of several (``mesh``) -> its actions in order. Written compute-only, as ``registry`` has them;
``passes`` adds everything else."""


class Held(IntEnum):
    """Values that a rank holds of one microbatch of a stage for its backward pass."""

    NOTHING = 0
    INPUTS = 1
    """Only the inputs of the stage, which is to be recomputed."""
    ACTIVATIONS = 2


def held(actions: Iterable[Action]) -> Iterator[tuple[Action, Held, Held]]:
    """Yield each pass of a rank with what is held of its microbatch and stage before it and after it."""
    actions = [action for action in actions if action.kind in PASSES]
    recomputed = {action.key for action in actions if action.kind is Kind.RECOMPUTE}
    for action in actions:
        match action.kind:
            case Kind.FORWARD:
                yield action, Held.NOTHING, Held.INPUTS if action.key in recomputed else Held.ACTIVATIONS
            case Kind.RECOMPUTE:
                yield action, Held.INPUTS, Held.ACTIVATIONS
            case Kind.BACKWARD_INPUT:
                yield action, Held.ACTIVATIONS, Held.ACTIVATIONS
            case _:
                yield action, Held.ACTIVATIONS, Held.NOTHING


def versions(actions: Iterable[Action]) -> tuple[dict[tuple[int, int], int], int]:
    """Return (stage, microbatch) -> version of the weights that a rank computes it with, and the most versions held at
    a time.

    A version is the number of updates that made it. It is held while it is the newest, or while a microbatch that went
    forward with it has not updated the weights (weight stashing; Harlap et al., 2018, section 3.3).
    """
    newest: dict[int, int] = {}
    used: dict[tuple[int, int], int] = {}
    flying: dict[tuple[int, int], int] = {}
    most = 1
    for action in actions:
        stage = action.stage
        if action.kind is Kind.FORWARD:
            used[stage, action.i] = flying[stage, action.i] = newest.get(stage, 0)
        elif action.kind is Kind.UPDATE:
            del flying[stage, action.i]
            newest[stage] = newest.get(stage, 0) + 1
            most = max(most, len({newest[stage], *(v for (s, _), v in flying.items() if s == stage)}))
    return used, most
