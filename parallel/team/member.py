"""What one member of a team makes of a node of the model: its part of what has rows, and on member 0 what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from parallel.space.span import Span
from parallel.streaming.box_sums import BoxSums
from parallel.streaming.operation import Arguments, Compute, Operation, attribute
from parallel.streaming.patch import Patch
from parallel.streaming.read_dropout import MASK
from parallel.streaming.read_norm import MOMENTS
from parallel.team.convolution import convolve_side_by_side
from parallel.team.fetched import all_of_own, fetched, patch_of
from parallel.team.link import cut
from parallel.team.norm import merged_moments, normalised_side_by_side
from parallel.team.passing import Pass
from parallel.team.sums import echoed, silent, summed


class Member:
    """Runs one node after the other, in one pass of one microbatch.

    Args:
        known: values by name; what runs the nodes adds theirs.
        random: names of nodes that may draw.
        entering: names of what came from before.

    Attributes:
        gathered: maps that member 0 has put together, by name.
    """

    def __init__(
        self,
        stage: nn.Module,
        passing: Pass,
        known: dict[str, Any],
        random: frozenset[str],
        entering: frozenset[str],
    ) -> None:
        self._stage, self._pass, self._known, self._random, self._entering = stage, passing, known, random, entering
        self._plan, self._link = passing.plan, passing.link
        self.gathered: dict[str, Tensor] = {}

    def sums(self, node: fx.Node, asked: BoxSums) -> Tensor:
        """What all members' parts of the output add up to."""
        (source,) = node.all_input_nodes
        box = self._plan.owned(source.name, self._link.member)
        return summed(self._link, asked.of_part(self._known[source.name], box))

    def value(self, node: fx.Node) -> Any:
        region = self._plan.region
        if region is not None and node.name in region.constants:
            return region.constants[node.name]
        if node.name in self._plan.steps and node.op != "output":
            return self._side_by_side(node)
        value = self._by_member_0(node)
        if node.name in self._random and self._others_draw_later(node):
            self._pass.hear_of_member_0()
        return value

    def _others_draw_later(self, node: fx.Node) -> bool:
        region = self._plan.region
        if region is None or not self._stage.training:
            return False
        return any(node < region.nodes[name] for name in self._plan.steps & self._random)

    def _by_member_0(self, node: fx.Node) -> Any:
        if self._link.member:
            tensors = [
                leaf
                for source in node.all_input_nodes
                for leaf in tree_leaves(self._alone(source))
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            return silent(tensors, self._pass.device)
        return self._follows(node)

    def _follows(self, node: fx.Node) -> Any:
        """What member 0 computes alone."""
        if node.op == "output":
            return fx.map_arg(node.args[0], self._alone)
        given = Arguments(self._stage, node, {}, self._alone)
        return self._pass.drawn(given.run) if node.name in self._random else given.run()

    def _alone(self, node: fx.Node) -> Any:
        """A value as member 0 takes it: maps whole."""
        if node.op == "get_attr":
            return attribute(self._stage, node)
        region = self._plan.region
        if region is not None and node.name in region.constants:
            return region.constants[node.name]
        value = self._known[node.name]
        if self._plan.lies(node.name) != "parts":
            return value
        if node.name not in self.gathered:
            exchange = self._plan.gathered(node.name)
            self.gathered[node.name] = fetched(self._link, exchange, value, self._plan.dims(node.name))
        return self.gathered[node.name]

    def _side_by_side(self, node: fx.Node) -> Any:
        region = self._plan.region
        assert region is not None
        operation = region.operations.get(node.name)
        if operation is None:  # of sums and parameters alone
            given = self._arguments(node, {}, {}, False)
            return self._pass.drawn(given.run) if node.name in self._random else given.run()
        known: dict[str, Any] = {}
        for prior in operation.first:
            name = node.name + prior.suffix
            if prior.once:
                known[name] = self._once(node, prior.operation, known)
            else:
                known[name] = self._summed(node, name, prior.operation, known, operation)
        if operation.of_sums:
            return operation.compute(self._arguments(node, {}, known, False))
        if operation.sums:
            return self._summed(node, node.name, operation, known, operation)
        return self._map(node, operation, known)

    def _once(self, node: fx.Node, operation: Operation, known: Mapping[str, Any]) -> Any:
        given = self._arguments(node, {}, known, False)
        if node.name in self._random:
            return self._pass.drawn(lambda: operation.compute(given))
        return operation.compute(given)

    def _summed(self, node: fx.Node, name: str, operation: Operation, known: Mapping[str, Any], of: Operation) -> Any:
        """A sum over the parts of all members."""
        given = self._arguments(node, self._patches(node, operation), known, False)
        if operation.merge is None:
            return summed(self._link, operation.compute(given))
        with torch.no_grad():
            of_all = merged_moments(self._link, operation.compute(given))
        if self._as_norm(of, given):
            return of_all
        assert operation.again is not None
        again = self._arguments(node, given.patches, {**known, name: of_all}, False)
        return echoed(self._link, operation.again(again))

    def _as_norm(self, operation: Operation, given: Arguments) -> bool:
        return operation.norm is not None and given.patch.tensor.dtype in (torch.float32, torch.float64)

    def _map(self, node: fx.Node, operation: Operation, known: Mapping[str, Any]) -> Any:
        sources = self._sources(node)
        if operation.convolution is not None:
            (source,) = sources
            exchange, own = self._plan.exchange(node.name, operation, source.name), self._known[source.name]
            patch = self._patch(node, operation, source, own)
            if not exchange.quiet:
                operands = operation.convolution(self._arguments(node, {source.name: patch}, known, False))
                return convolve_side_by_side(self._link, exchange, own, patch, operation.rules, operands)
            if (whole := all_of_own(exchange, self._link.member, patch, own)) is not None:
                return operation.compute(self._arguments(node, {source.name: whole}, known, False))
        patches = self._patches(node, operation)
        if operation.drawn is not None:
            known = {node.name + MASK: self._own_draw(node, operation.drawn, patches)}
        given = self._arguments(node, patches, known, self._may_change(node, sources, operation))
        if operation.norm is not None and self._as_norm(operation, given):
            of_all = known[node.name + MOMENTS]
            return normalised_side_by_side(self._link, given.patch.tensor, of_all, operation.norm, given)
        return operation.compute(given)

    def _own_draw(self, node: fx.Node, draw: Compute, patches: Mapping[str, Patch]) -> Tensor:
        """This member's box of numbers that each member draws for the whole map."""
        given, plan = self._arguments(node, patches, {}, False), self._plan
        drawn = self._pass.drawn(lambda: draw(given))
        rows, columns = plan.sides(node.name)
        box = plan.owned(node.name, self._link.member)
        return cut(drawn, plan.dims(node.name), box, (Span(0, rows), Span(0, columns))).clone()

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [source for source in node.all_input_nodes if self._plan.lies(source.name) == "parts"]

    def _patches(self, node: fx.Node, operation: Operation) -> dict[str, Patch]:
        found = {}
        for source in self._sources(node):
            exchange = self._plan.exchange(node.name, operation, source.name)
            value = self._known[source.name]
            if isinstance(value, Tensor):
                value = fetched(self._link, exchange, value, self._plan.dims(source.name))
            elif not exchange.quiet:
                raise ValueError(f"{node.name} needs what others have of several maps at once: take them apart before")
            found[source.name] = self._patch(node, operation, source, value)
        return found

    def _patch(self, node: fx.Node, operation: Operation, source: fx.Node, value: Any) -> Patch:
        plan, member = self._plan, self._link.member
        sides, exchange = plan.sides(source.name), plan.exchange(node.name, operation, source.name)
        made = plan.owned(source.name if operation.sums or operation.of_sums else node.name, member)
        return patch_of(exchange, member, value, made, sides, plan.dims(source.name))

    def _may_change(self, node: fx.Node, sources: Sequence[fx.Node], operation: Operation) -> bool:
        """Nobody else uses the memory of the only map that it takes."""
        region = self._plan.region
        assert region is not None
        if len(sources) != 1 or sources[0].name in self._entering or sources[0].name not in region.operations:
            return False
        return len(sources[0].users) == 1 and not region.operations[sources[0].name].shares

    def _arguments(
        self, node: fx.Node, patches: Mapping[str, Patch], known: Mapping[str, Any], may_change: bool
    ) -> Arguments:
        region = self._plan.region
        assert region is not None
        template = None
        if node.name in region.forms:
            template = torch.empty(0, dtype=region.forms[node.name][1], device=self._pass.device)
        return Arguments(self._stage, node, patches, self._without_rows, may_change, known, template)

    def _without_rows(self, node: fx.Node) -> Any:
        region = self._plan.region
        assert region is not None
        if node.op == "get_attr":
            return attribute(self._stage, node)
        if node.name in region.constants:
            return region.constants[node.name]
        if self._plan.lies(node.name) == "parts":  # its type and device alone
            return torch.empty(0, dtype=region.forms[node.name][1], device=self._pass.device)
        return self._known[node.name]
