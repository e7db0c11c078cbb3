"""Norms with whose moments rows travel that a window behind them needs of others.

Between the norm and the window lie only operations that work on each px alone, and nobody else uses what they give: so
a member can compute them of rows of others as well as of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from parallel.space.rule import SAME
from parallel.space.team import Exchange
from parallel.streaming.operation import DIMS, Operation
from parallel.team.team_plan import TeamPlan


@dataclass(frozen=True)
class Hoisted:
    """What needs not be fetched.

    Attributes:
        exchanges: by name of a norm, that of the window behind it.
        between: names of the operations between the two.
    """

    exchanges: Mapping[str, Exchange] = field(default_factory=dict)
    between: frozenset[str] = frozenset()


NOTHING = Hoisted()


def hoisted(nodes: Sequence[fx.Node], outputs: Collection[str], plan: TeamPlan) -> Hoisted:
    """Return what of ``nodes``, which are run one after the other, needs not be fetched.

    Args:
        outputs: names of values that are used after them.
    """
    if plan.region is None:
        return NOTHING
    here = {node.name for node in nodes} - plan.region.constants.keys()
    exchanges: dict[str, Exchange] = {}
    between: set[str] = set()
    for norm in nodes:
        operation = plan.region.operations.get(norm.name)
        if operation is None or operation.norm is None:
            continue
        node = norm
        passed: list[str] = []
        while node.name not in outputs and len(node.users) == 1:
            (user,) = node.users
            operation = plan.region.operations.get(user.name)
            if user.name not in here or operation is None or not _of_one_map(user, operation, plan):
                break
            exchange = plan.exchange(user.name, operation, node.name)
            if not exchange.quiet:
                exchanges[norm.name] = exchange
                between.update(passed)
                break
            if operation.rules != (SAME, SAME):
                break
            node = user
            passed.append(user.name)
    return Hoisted(exchanges, frozenset(between))


def _of_one_map(node: fx.Node, operation: Operation, plan: TeamPlan) -> bool:
    """Its value is a map made of one map and nothing that is summed or drawn before."""
    if operation.sums or operation.of_sums or operation.first or operation.drawn is not None:
        return False
    return operation.dims == DIMS and sum(plan.lies(source.name) == "parts" for source in node.all_input_nodes) == 1
