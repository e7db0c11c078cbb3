"""Bytes that a stage takes for one microbatch: held between its passes, and live at most while one runs.

Takes a graph that was traced with its loss, the bounds of a stage and the storages that it touches
(``liveness``); gives ``StageBytes`` for any segments and policy, by arithmetic over all storages together. What moves
to the host is followed storage by storage (``offload_window``). Buffers of modules, a few numbers per channel, are not
counted. ``StageMemory`` remembers stages, since a search asks for the same ones again and again. No torch here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel import remembered
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.liveness import NEVER, Ints, LiveRange, Storage, StorageTable, gradient_spans, storages
from parallel.memory.offload_window import HostBytes, OffloadedStorages, Use
from parallel.memory.policy import KEEP_ALL, SMALLEST, ActivationPolicy, Segment, segments_of


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a stage for one microbatch of the traced size.

    Attributes:
        parameters: of its layers; ``largest_parameter``: of the largest of them.
        inputs: what enters it and is held until its backward pass: values received, or the model's input.
        activations: all that is held between its forward and backward pass, ``inputs`` among it.
        forward: live at most in a forward pass.
        forward_only: live at most in one that keeps nothing, as before recomputation.
        backward: live at most in a backward pass that adds to gradients of parameters.
        first_backward: in one that makes them; they count.
        received, sent: of values from and to other stages; their gradients are ``returned`` and ``awaited``.
    """

    parameters: int
    inputs: int
    activations: int
    forward: int
    forward_only: int
    backward: int
    first_backward: int
    received: int
    returned: int
    sent: int
    awaited: int
    largest_parameter: int


Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Moments:
    """Moments of a stage's layers in the two passes of a microbatch, by position behind the stage's first.

    First every layer runs forward, at the moment of its position; then segment by segment, the last first, forward
    again where it is recomputed, and backward. Layers a b c d, of which c d are recomputed: a b c d, then c d d c b a.

    Attributes:
        backward_start: the first moment of the backward pass.
        end: after the last moment.
        recompute_at, backward_at: of each layer; the first is unused where nothing is recomputed.
    """

    backward_start: int
    end: int
    recompute_at: Ints
    backward_at: Ints


@dataclass(frozen=True)
class Timeline:
    """Bytes of a stage on the device, moment by moment.

    Attributes:
        live: at each moment, gradients of parameters left out.
        forward_only: at most in a forward pass that keeps nothing, as before a recomputation of the whole stage.
        held: between the two passes; ``inputs``: of those, what entered the stage.
        host: bytes on the host.
    """

    moments: Moments
    live: Ints
    forward_only: int
    held: int
    inputs: int
    host: HostBytes


class StageArrays:
    """Bytes of the layers from position ``start`` to ``stop``, not included, for any choice of segments.

    Args:
        table: of the storages of the graph's memory.
    """

    def __init__(self, graph: LayerGraph, start: int, stop: int, table: StorageTable) -> None:
        self._start, self._stop = start, stop
        self._last_layer = len(graph.layers) - 1
        if not (found := table.within(start, stop)).size:
            table = StorageTable([Storage(0, made=[start])])
            found = table.within(start, stop)
        number, self._at, here, saved, self._first_maker, self._last_user = found
        touched, self._storage = np.unique(number, return_inverse=True)
        self._here = np.where(here > 0, self._at, NEVER)
        self._saved = np.where(saved > 0, self._at, NEVER)
        self._bytes = table.bytes[touched]
        heads = np.searchsorted(self._storage, np.arange(len(touched)))
        self._entered = np.logical_or.reduceat(self._first_maker < start, heads)
        self._sent = table.used[touched] >= stop
        self._counted = self._entered | (table.made[touched] < stop)
        self._gradients = np.array(gradient_spans(graph, start, stop), dtype=np.int64).reshape(-1, 3).T
        self._params = np.array(graph.owned_bytes[start:stop], dtype=np.int64)
        keeping = np.zeros(stop - start + 1, dtype=np.int64)
        keeping[1:][self._at[saved > 0] - start] = 1
        self._keeping = keeping.cumsum()  # layers before a position that keep anything
        sent = [graph.layers[k] for k in range(start, stop) if graph.last_uses[k] >= stop]
        names = {name for layer in graph.layers[start:stop] for name in layer.inputs if graph.position[name] < start}
        received = [graph.by_name[name] for name in names]
        self._messages = {
            "received": sum(layer.output_bytes for layer in received),
            "returned": sum(layer.output_bytes for layer in received if layer.differentiable),
            "sent": sum(layer.output_bytes for layer in sent),
            "awaited": sum(layer.output_bytes for layer in sent if layer.differentiable),
            "largest_parameter": max(layer.largest_param_bytes for layer in graph.layers[start:stop]),
        }

    def stage_bytes(
        self, segments: Sequence[Segment], policy: ActivationPolicy = KEEP_ALL
    ) -> tuple[StageBytes, HostBytes]:
        """Return the bytes of the stage, whose layers ``segments`` cover, on the device and on the host."""
        timeline = self.timeline(segments, policy)
        turn, back, live = timeline.moments.backward_start, timeline.moments.backward_at, timeline.live
        own, made = np.zeros((2, len(live) - turn), dtype=np.int64)
        own[back - turn] = self._params
        made[back - turn] = self._params[::-1].cumsum()[::-1]
        stage = StageBytes(
            parameters=int(self._params.sum()),
            inputs=timeline.inputs,
            activations=timeline.held,
            forward=int(live[:turn].max()),
            forward_only=timeline.forward_only,
            backward=int((live[turn:] + own).max()),
            first_backward=int((live[turn:] + np.maximum.accumulate(made)).max()),
            **self._messages,
        )
        return stage, timeline.host

    def timeline(self, segments: Sequence[Segment], policy: ActivationPolicy = KEEP_ALL) -> Timeline:
        """Return the bytes on the device over both passes."""
        starts, stops, again = self._parts(segments)
        moments = _moments(starts, stops, again)
        # Runs of entries of one storage in one segment: a use.
        number = np.searchsorted(starts, self._at, side="right") - 1
        new = np.ones(len(self._at), dtype=bool)
        new[1:] = (self._storage[1:] != self._storage[:-1]) | (number[1:] != number[:-1])
        entry = np.flatnonzero(new)
        storage, segment = self._storage[entry], number[entry]
        runs_again, stop = again[segment], stops[segment]
        enters = np.logical_or.reduceat(self._first_maker < starts[number], entry)
        begin = np.where(enters, starts[segment], np.minimum.reduceat(self._here, entry)) - self._start
        handed = enters & (runs_again | (len(starts) > 1))
        used = np.maximum(self._at, np.minimum(self._last_user, stops[number] - 1))
        last = np.where(handed, stop - 1, np.maximum.reduceat(used, entry)) - self._start
        saved = np.minimum.reduceat(self._saved, entry) - self._start
        keeps = saved < NEVER - self._start
        done = np.where(keeps, moments.backward_at[np.where(keeps, saved, 0)], moments.recompute_at[last])
        needed = np.where(np.where(runs_again, enters, keeps), done, -1)
        # Storages, of one use or more.
        heads = np.flatnonzero(np.concatenate([[True], storage[1:] != storage[:-1]]))
        begins = np.where(self._entered, 0, begin[heads])
        lasts = np.maximum.reduceat(last, heads)
        lasts = np.where(self._entered | self._sent, self._stop - 1 - self._start, lasts)
        # Without offload, the stage holds what it is given.
        given = self._entered & (not policy.moves)
        moves = (self._bytes >= policy.smallest) & policy.moves
        stays = np.where(moves, 0, self._bytes)
        held = np.maximum.reduceat(needed, heads)
        kept = given | (held >= 0)
        anew = runs_again & ~enters
        spans: list[LiveRange] = []
        host = HostBytes(0, 0, 0)
        if moves.any():
            offloaded = OffloadedStorages(moments.recompute_at.tolist(), moments.backward_at.tolist())
            run_ends, use_ends = [*heads.tolist(), len(storage)], [*entry.tolist(), len(number)]
            uses_of = list(zip(begin.tolist(), last.tolist(), enters.tolist(), segment.tolist(), strict=True))
            saved_of, again_of = (self._saved - self._start).tolist(), runs_again.tolist()
            for k in np.flatnonzero(moves).tolist():
                uses = []
                for u in range(run_ends[k], run_ends[k + 1]):
                    first, until, there, within = uses_of[u]
                    at = [p for p in saved_of[use_ends[u] : use_ends[u + 1]] if p < NEVER - self._start]
                    uses.append(Use(first, until, at, there, within if again_of[u] else None))
                whole = int(begins[k]), int(lasts[k])
                offloaded.add(int(self._bytes[k]), *whole, uses, entered=bool(self._entered[k]))
            spans, host = offloaded.spans(policy.ahead, moments.backward_start), offloaded.host
        first, final, size_of_gradient = self._gradients[0] - self._start, self._gradients[1], self._gradients[2]
        messages = (first == 0) & (final == self._stop - 1)
        back = moments.backward_at
        live = _running(
            moments.end,
            (begins, np.where(given, moments.end - 1, np.where(held >= 0, held, lasts)), stays),
            (moments.recompute_at[begin[anew]], done[anew], stays[storage[anew]]),
            (np.where(messages, moments.backward_start, back[final - self._start]), back[first], size_of_gradient),
            tuple(np.array(spans, dtype=np.int64).reshape(-1, 3).T),
        )
        counted = self._counted
        alone = _running(moments.backward_start, (begins[counted], lasts[counted], self._bytes[counted]))
        held_bytes, input_bytes = int(stays[kept].sum()), int(stays[kept & self._entered].sum())
        return Timeline(moments, live, int(alone.max()), held_bytes, input_bytes, host)

    def _parts(self, segments: Sequence[Segment]) -> tuple[Ints, Ints, Flags]:
        """Return first position, position after the last, and whether it is recomputed, of each part.

        A segment that keeps nothing is not recomputed, as nothing asks for it; nor is the loss, which is computed with
        the model's output, but in no segment."""
        parts: list[tuple[int, int, bool]] = []
        for each in segments:
            if each.recompute and each.start < self._last_layer < each.stop:
                parts += [(each.start, self._last_layer, True), (self._last_layer, each.stop, False)]
            else:
                parts.append((each.start, each.stop, each.recompute))
        starts, stops = (np.array([part[k] for part in parts], dtype=np.int64) for k in (0, 1))
        keeps = self._keeping[stops - self._start] > self._keeping[starts - self._start]
        return starts, stops, np.array([part[2] for part in parts], dtype=bool) & keeps


def _moments(starts: Ints, stops: Ints, again: Flags) -> Moments:
    lengths = stops - starts
    turn = int(lengths.sum())
    takes = lengths * (1 + again)
    begins = turn + takes[::-1].cumsum()[::-1] - takes  # the last segment comes first
    at = np.arange(starts[0], stops[-1])
    back = np.repeat(begins + lengths * again + stops - 1, lengths) - at
    return Moments(turn, turn + int(takes.sum()), np.repeat(begins - starts, lengths) + at, back)


def _running(count: int, *spans: Sequence[Any]) -> Ints:
    """Bytes that live at each of ``count`` moments; of spans: first, last, bytes."""
    change = np.zeros(count + 1, dtype=np.int64)
    for first, last, size in spans:
        np.add.at(change, first, size)
        np.subtract.at(change, last + 1, size)
    return change[:-1].cumsum()


Bound = tuple[int, int]


class StageMemory:
    """Bytes that stages of ``graph`` hold, worked out once for each.

    Attributes:
        storages: of the graph's memory.
    """

    def __init__(self, graph: LayerGraph) -> None:
        self.graph = graph
        self.storages = storages(graph)
        self._known: dict[object, tuple[StageBytes, HostBytes]] = {}

    def kept(self, partition: Partition, policy: ActivationPolicy = KEEP_ALL) -> list[StageBytes]:
        """Return the bytes of every stage on the device.

        Raises:
            ValueError: a chosen run of layers does not fit the model.
        """
        return [self.of_stage(partition, stage, policy) for stage in range(partition.depth)]

    def of_stage(self, partition: Partition, stage: int, policy: ActivationPolicy) -> StageBytes:
        """Return the bytes of one stage on the device."""
        return self.of_segments(segments_of(partition, stage, policy), policy)

    def host(self, partition: Partition, policy: ActivationPolicy) -> list[HostBytes]:
        """Return the bytes of every stage on the host."""
        return [self._bytes(segments_of(partition, k, policy), policy)[1] for k in range(partition.depth)]

    def of_layers(self, bound: Bound) -> StageBytes:
        """Return the bytes of the layers from one position to another, not included, when all is kept on the device."""
        return self.of_segments((Segment(*bound, False),), KEEP_ALL)

    def of_segments(self, segments: Sequence[Segment], policy: ActivationPolicy = KEEP_ALL) -> StageBytes:
        """Return the bytes of the stage whose layers ``segments`` cover."""
        return self._bytes(segments, policy)[0]

    def _bytes(self, segments: Sequence[Segment], policy: ActivationPolicy) -> tuple[StageBytes, HostBytes]:
        key = tuple(segments), (policy.smallest, policy.ahead) if policy.moves else None
        if key not in self._known:
            arrays = self.arrays((segments[0].start, segments[-1].stop))
            self._known[key] = arrays.stage_bytes(segments, policy)
        return self._known[key]

    @remembered
    def arrays(self, bound: Bound) -> StageArrays:
        """Return what the bytes of these layers are worked out with."""
        return StageArrays(self.graph, *bound, self.table)

    @remembered
    def touched(self, bound: Bound) -> list[Storage]:
        """Return the storages that these layers make, keep or use."""
        return [self.storages[number] for number in np.unique(self.table.within(*bound)[0]).tolist()]

    @functools.cached_property
    def table(self) -> StorageTable:
        """Return the storages as arrays."""
        return StorageTable(self.storages)

    @functools.cached_property
    def saved_bytes(self) -> int:
        """Return the bytes of the storages that autograd keeps, without those too small to be moved."""
        return sum(storage.bytes for storage in self.storages if storage.saved and storage.bytes >= SMALLEST)
