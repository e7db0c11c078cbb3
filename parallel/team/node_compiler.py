"""Compile an fx node for one member of a spatial team: a closure with its exchanges, pads and slices bound.

Sharded nodes are computed by every member on its part of each map; the others by member 0, of whole maps, while the
other members only visit the same exchanges.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from parallel.space.cuts import Span
from parallel.space.team import box_px
from parallel.streaming.moments import CHANNELS, HALVES, merged, moments, normalised_part
from parallel.streaming.operation import Arguments, ChannelNorm, Operation, module_of
from parallel.streaming.patch import Patch, cut_of, narrowed
from parallel.streaming.read_node import changes_in_place, takes_type_alone
from parallel.streaming.read_pointwise import MASK
from parallel.team.convolution import HaloConvolution, sharded_convolution
from parallel.team.halo_exchange import BoundExchange, all_of_own, halo_exchange, patch_of, slices
from parallel.team.team_comm import ForwardContext, all_reduce_sum, empty_with_zero_grad, identity_fwd_all_reduce_bwd
from parallel.trace.stage_module import compiled

Values = dict[str, Any]
"""Values of a pass by name; of maps that are sharded, this member's part."""
Compute = Callable[[Values, ForwardContext], Any]
Load = Callable[[Values], Any]
GATHERED = "~gathered"
"""Behind the name of a map that member 0 has put together."""
NO_PRIORS: Values = {}


class NodeCompiler:
    """Compiles nodes for the member and plan of a context."""

    def __init__(
        self, stage: nn.Module, context: ForwardContext, random: frozenset[str], entering: frozenset[str]
    ) -> None:
        self._stage, self._random, self._entering = stage, random, entering
        self._plan, self._comm = context.plan, context.comm
        self._member = context.comm.member
        region = context.plan.region
        self._constants: Mapping[str, Any] = {} if region is None else region.constants

    def compile(self, node: fx.Node) -> Compute:
        if node.name in self._constants:  # type or device of a tensor, which every member has
            (source,), form = node.all_input_nodes, str(node.args[1])
            return lambda known, _: getattr(known[source.name], form)
        if node.name in self._plan.by_name and node.op != "output":
            return self._sharded(node)
        compute = self._on_rank0(node)
        if node.name not in self._random or not self._others_draw_later(node):
            return compute

        def with_rng(known: Values, context: ForwardContext) -> Any:
            value = compute(known, context)
            context.broadcast_rng_from_rank0()
            return value

        return with_rng

    def _others_draw_later(self, node: fx.Node) -> bool:
        region = self._plan.region
        if region is None or not self._stage.training:
            return False
        return any(node < region.nodes[name] for name in self._plan.by_name.keys() & self._random)

    def _on_rank0(self, node: fx.Node) -> Compute:
        """Compile a node that member 0 computes alone, of whole maps; other members visit the same exchanges."""
        parts = self._sources(node)  # of which it needs no more than this member's, for their type
        parts = parts if takes_type_alone(node, parts) else []
        loads = {n.name: operator.itemgetter(n.name) if n in parts else self._whole(n) for n in node.all_input_nodes}
        if self._member:
            flows = changes_in_place(self._stage, node) or node.name not in self._plan.without_gradient
            (source, *others) = node.all_input_nodes or (None,)
            if flows and source is not None and not others and source.op != "get_attr" and self._is_stand_in(source):
                return lambda known, _: known[source.name]

            changed, last = [], node
            while last.name not in self._entering and changes_in_place(self._stage, last):
                last = last.all_input_nodes[0]
                changed.append(last.name + (GATHERED if self._plan.placement(last.name) == "shard" else ""))

            takes = [loads[n.name] for n in node.all_input_nodes if n not in parts]

            def stand_in(known: Values, context: ForwardContext) -> Tensor:
                leaves = tree_leaves([load(known) for load in takes])
                tensors = [leaf for leaf in leaves if flows and isinstance(leaf, Tensor) and leaf.requires_grad]
                value = empty_with_zero_grad(tensors, context.device)
                known.update(dict.fromkeys(changed, value))  # their later users pass gradients to what changed them
                return value

            return stand_in
        sources, random = list(loads.values()), node.name in self._random
        stage, run = self._stage, compiled([node], tuple(loads), (node.name,), {}, node.name)

        def compute(known: Values, context: ForwardContext) -> Any:
            values = []
            for load in sources:
                values.append(load(known))
            return context.run_with_rng(lambda: run(stage, *values)[0]) if random else run(stage, *values)[0]

        return compute

    def _is_stand_in(self, node: fx.Node) -> bool:
        """Return whether this member's value of a node is an empty tensor that this program made."""
        return node.name not in self._entering and self._plan.placement(node.name) == "rank0"

    def _whole(self, node: fx.Node) -> Load:
        """Return what loads a value on member 0: maps whole."""
        name, load = node.name, operator.itemgetter(node.name)
        if node.op == "get_attr" or self._plan.placement(name) != "shard":
            return load
        exchange = BoundExchange(self._plan.gathered(name), self._member, self._plan.dims(name))
        gathered, comm = name + GATHERED, self._comm

        def gather(known: Values) -> Tensor:
            if gathered not in known:
                known[gathered] = halo_exchange(comm, exchange, known[name])
            value: Tensor = known[gathered]
            return value

        return gather

    def _sharded(self, node: fx.Node) -> Compute:
        region, random = self._plan.region, node.name in self._random
        assert region is not None
        operation = region.operations.get(node.name)
        if operation is None:  # of sums and parameters alone
            make, resolver = self._arguments(node), self._without_rows(node)

            def compute(known: Values, context: ForwardContext) -> Any:
                given = make({}, resolver(known))
                return context.run_with_rng(given.run) if random else given.run()

            return compute
        if operation.norm is not None:
            return self._norm(node, operation.norm)
        priors = [self._prior(node, prior) for prior in operation.first]
        own: Callable[..., Any]
        if operation.of_sums:
            own = self._of_sums(node, operation)
        elif operation.sums:
            own = self._summed(node, node.name, operation)
        else:
            own = self._map(node, operation)
        if not priors:
            return own

        def with_priors(known: Values, context: ForwardContext) -> Any:
            before: Values = {}
            for name, prior in priors:
                before[name] = prior(known, context, before)
            return own(known, context, before)

        return with_priors

    def _prior(self, node: fx.Node, prior: Any) -> tuple[str, Any]:
        name = node.name + prior.suffix
        if not prior.once:
            return name, self._summed(node, name, prior.operation)
        compute = self._of_sums(node, prior.operation)
        if node.name not in self._random:
            return name, compute
        return name, lambda known, context, before: context.run_with_rng(lambda: compute(known, context, before))

    def _of_sums(self, node: fx.Node, operation: Operation) -> Any:
        """A value without rows."""
        make, resolver, source = self._arguments(node), self._without_rows(node), self._sources(node)[0].name
        return lambda known, _, before=NO_PRIORS: operation.compute(
            make({}, resolver(known), known=before, template=known[source])
        )

    def _summed(self, node: fx.Node, name: str, operation: Operation) -> Any:
        """A sum over the parts of all members."""
        comm, plain, source = self._comm, operation.plain, self._sources(node)[0].name
        if plain is not None:
            return lambda known, _, before=NO_PRIORS: all_reduce_sum(comm, plain(known[source]))
        make, resolver, load = self._arguments(node), self._without_rows(node), self._patches(node, name)
        if (merge := operation.merge) is None:
            return lambda known, _, before=NO_PRIORS: all_reduce_sum(
                comm, operation.compute(make(load(known), resolver(known), known=before))
            )
        again = operation.again

        def merged_sum(known: Values, _: ForwardContext, before: Values = NO_PRIORS) -> Any:
            patches, resolve = load(known), resolver(known)
            with torch.no_grad():
                own = operation.compute(make(patches, resolve, known=before))
                of_all = merge(comm.all_gather(own))  # in the order of members
            assert again is not None
            given = make(patches, resolve, known={**before, name: of_all})
            return identity_fwd_all_reduce_bwd(comm, again(given))

        return merged_sum

    def _map(self, node: fx.Node, operation: Operation) -> Any:
        resolver, compute = self._without_rows(node), operation.compute
        if operation.convolution is not None and (convolution := self._convolution(node, operation)):
            return convolution
        if (plain := operation.plain) is not None:
            name = self._sources(node)[0].name
            return lambda known, _, before=NO_PRIORS: plain(known[name])
        make, load = self._arguments(node, self._may_change(node)), self._patches(node, node.name)
        if operation.drawn is not None:
            return self._drawn(node, operation, make, load)
        return lambda known, _, before=NO_PRIORS: compute(make(load(known), resolver(known), known=before))

    def _norm(self, node: fx.Node, norm: ChannelNorm) -> Compute:
        """A batch norm by the moments of all members' parts."""
        comm, make, resolver = self._comm, self._arguments(node), self._without_rows(node)
        module: Any = module_of(self._stage, node)
        source = self._sources(node)[0].name

        def normalise(known: Values, _: ForwardContext) -> Tensor:
            own = known[source]
            x = own.float() if own.dtype in HALVES else own
            with torch.no_grad():
                of_all = merged(comm.all_gather(moments(x, CHANNELS)))  # in the order of members
            given = None if module is not None else make({}, resolver(known))
            if norm.update is not None:
                tensors = (module.running_mean, module.running_var) if given is None else norm.running(given)
                norm.update(of_all, *tensors)
            operands = (module.weight, module.bias) if given is None else norm.affine(given)
            y = normalised_part(x, of_all, operands, norm.count, norm.eps, comm.all_reduce_async).to(own.dtype)
            return y if norm.then is None else norm.then(y)

        return normalise

    def _convolution(self, node: fx.Node, operation: Operation) -> Any:
        (source,) = self._sources(node)
        name, comm, compute = source.name, self._comm, operation.compute
        exchange, patch = self._exchange(node.name, source), self._patch(node.name, source)
        make, resolver = self._arguments(node), self._without_rows(node)
        if exchange.exchange.is_local:
            whole = all_of_own(exchange.exchange, self._member, patch)
            if whole is None:
                return None
            frame = _frame(whole)
            return lambda known, _, before=NO_PRIORS: compute(
                make({name: frame(known[name])}, resolver(known), known=before)
            )
        assert operation.convolution is not None
        operands, groups, numbers = operation.convolution
        module: Any = module_of(self._stage, node)
        assert self._plan.region is not None
        own_size = self._plan.region.forms[name][0][1] * box_px(exchange.own)
        work = HaloConvolution(exchange, patch, operation.rules, own_size, numbers)
        if module is not None:
            return lambda known, _, before=NO_PRIORS: sharded_convolution(
                comm, known[name], work, module.weight, module.bias, groups
            )
        return lambda known, _, before=NO_PRIORS: sharded_convolution(
            comm, known[name], work, *operands(make({}, resolver(known), known=before)), groups
        )

    def _drawn(self, node: fx.Node, operation: Operation, make: Any, load: Any) -> Any:
        """A map times numbers that each member draws for the whole map, of which it takes its own box."""
        plan, draw, resolver = self._plan, operation.drawn, self._without_rows(node)
        assert draw is not None
        rows, columns = plan.sides[node.name]
        part = slices(plan.dims(node.name), plan.owned(node.name, self._member), (Span(0, rows), Span(0, columns)))
        mask, compute = node.name + MASK, operation.compute

        def drop(known: Values, context: ForwardContext, _: Values = NO_PRIORS) -> Any:
            patches, resolve = load(known), resolver(known)
            drawn = context.run_with_rng(lambda: draw(make(patches, resolve)))
            return compute(make(patches, resolve, known={mask: drawn[part].clone()}))

        return drop

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [source for source in node.all_input_nodes if self._plan.placement(source.name) == "shard"]

    def _exchange(self, step: str, source: fx.Node) -> BoundExchange:
        exchange = self._plan.exchange(step, source.name)
        return BoundExchange(exchange, self._member, self._plan.dims(source.name))

    def _patch(self, step: str, source: fx.Node) -> Patch:
        """Return the patch of a map that a step takes, without a tensor."""
        plan, name = self._plan, source.name
        made = plan.mesh.owned(self._member, plan.by_name[step].sides)
        return patch_of(plan.exchange(step, name), self._member, None, made, plan.sides[name], plan.dims(name))

    def _patches(self, node: fx.Node, step: str) -> Callable[[Values], dict[str, Patch]]:
        """Return what gives the patches of all maps that a step of a node takes, by name."""
        sources = [
            (source.name, self._load_part(node, self._exchange(step, source)), _frame(self._patch(step, source)))
            for source in self._sources(node)
        ]

        def load(known: Values) -> dict[str, Patch]:
            patches = {}
            for name, part, frame in sources:
                value = known[name]
                patches[name] = frame(value if part is None else part(value))
            return patches

        return load

    def _load_part(self, node: fx.Node, exchange: BoundExchange) -> Callable[[Any], Any] | None:
        """Return own part -> what the member needs of the map; None where that is its part as it is."""
        comm, box, own, dims = self._comm, exchange.box, exchange.own, exchange.dims
        if exchange.exchange.is_local:
            if box == own:
                return None
            where = cut_of(box, own)
            return lambda value: narrowed(value, dims, where) if isinstance(value, Tensor) else value

        def fetch(value: Any) -> Tensor:
            if not isinstance(value, Tensor):
                raise ValueError(f"{node.name} needs what others have of several maps at once: take them apart before")
            return halo_exchange(comm, exchange, value)

        return fetch

    def _may_change(self, node: fx.Node) -> bool:
        """Nobody else uses the memory of the only map that it takes."""
        region, step = self._plan.region, self._plan.by_name[node.name]
        assert region is not None
        return step.maps[0] not in self._entering and region.may_change(step)

    def _arguments(self, node: fx.Node, may_change: bool = False) -> Callable[..., Arguments]:
        """Return (patches, resolve, known=) -> ``Arguments``."""
        return functools.partial(Arguments, self._stage, node, may_change=may_change)

    def _without_rows(self, node: fx.Node) -> Callable[[Values], Callable[[fx.Node], Any]]:
        """Return known values -> value of a node that a node takes; of sharded maps this member's part."""
        return functools.partial(functools.partial, lambda known, source: known[source.name])


def _frame(patch: Patch) -> Callable[[Any], Patch]:
    """Return tensor -> patch."""
    return functools.partial(Patch, need=patch.need, have=patch.have, box=patch.box, sides=patch.sides, dims=patch.dims)
