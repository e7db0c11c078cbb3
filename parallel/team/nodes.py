"""Runs nodes of a traced model on one member of a team: its part of what has rows, and on member 0 what follows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx, nn

from parallel.streaming.box_sums import BoxSums
from parallel.team.convolution import DIMS
from parallel.team.member import Member
from parallel.team.passing import Pass
from parallel.team.team_plan import TeamPlan


class NodeRun:
    """Runs consecutive nodes; a ``Run`` but for the pass, which says what of them has rows.

    Args:
        inputs, outputs: names of the values it takes and gives.
        random: names of nodes that may draw.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        random: Collection[str],
    ) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._nodes = [node for node in nodes if node.op not in ("placeholder", "get_attr")]
        self._random = frozenset(random)
        last = {argument.name: node.name for node in self._nodes for argument in node.all_input_nodes}
        self._finished: dict[str, list[str]] = {}
        for name, user in last.items():
            if name not in self._outputs:
                self._finished.setdefault(user, []).append(name)
        self._entering = frozenset(self._inputs)

    def run(
        self, stage: nn.Module, passing: Pass, values: Sequence[Any], asked: BoxSums | None = None
    ) -> tuple[Any, ...]:
        """Return the values named in ``outputs``; of what lies in parts, this member's.

        Args:
            asked: sums that the model's output is wanted as, a map that lies in parts (``gives_parts``).
        """
        return self._rest(stage, passing, values, {}, asked)

    def _rest(
        self, stage: nn.Module, passing: Pass, values: Sequence[Any], made: Mapping[str, Any], asked: BoxSums | None
    ) -> tuple[Any, ...]:
        """Run the nodes; where there is what they ``made`` in boxes, those that follow."""
        known = {**dict(zip(self._inputs, values, strict=True)), **made}
        done = passing.plan.steps if made else frozenset()
        member = Member(stage, passing, known, self._random, self._entering)
        for node in self._nodes:
            if node.name in done:
                continue
            known[node.name] = member.value(node) if asked is None or node.op != "output" else member.sums(node, asked)
            for name in self._finished.get(node.name, ()):
                known.pop(name, None)
                member.gathered.pop(name, None)
        return tuple(known.get(name) for name in self._outputs)

    def gives_parts(self, plan: TeamPlan, targets: Sequence[int]) -> bool:
        """Return whether the model's output is a map (n, c, h, w) in parts, with the rows of ``targets`` (n, h, w)."""
        for node in self._nodes:
            if node.op == "output" and isinstance(source := node.args[0], fx.Node) and plan.region is not None:
                if plan.lies(source.name) != "parts" or plan.dims(source.name) != DIMS:
                    return False
                shape = plan.region.forms[source.name][0]
                return len(shape) == 4 and (shape[0], *shape[2:]) == tuple(targets)
        return False
