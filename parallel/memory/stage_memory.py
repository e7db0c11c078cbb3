"""Bytes that the stages of one graph hold, remembered: a search asks for the same stages again and again.

Takes a graph that was traced with its loss; gives ``StageBytes`` and ``HostBytes``, stage by stage. A stage is worked
out once for each choice of segments, whatever the stages beside it do. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.lifetimes import HostBytes, Lifetimes, passes_of
from parallel.memory.liveness import Piece, pieces
from parallel.memory.policy import KEEP_ALL, ActivationPolicy, Segment, segments_of
from parallel.memory.stage_bytes import StageArrays, StageBytes

Bound = tuple[int, int]


class StageMemory:
    """Bytes that stages of ``graph`` hold, worked out once for each.

    Attributes:
        pieces: of the graph's memory.
    """

    def __init__(self, graph: LayerGraph) -> None:
        self.graph = graph
        self.pieces = pieces(graph)
        self._at: list[list[int]] = [[] for _ in graph.layers]
        for number, piece in enumerate(self.pieces):
            for place in {*piece.made, *piece.saved, *(use for _, use in piece.used)} - {-1}:
                self._at[place].append(number)
        self._touched: dict[Bound, list[Piece]] = {}
        self._plain: dict[Bound, StageBytes] = {}
        self._arrays: dict[Bound, StageArrays] = {}
        self._kept: dict[object, StageBytes] = {}
        self._host: dict[object, HostBytes] = {}

    def kept(self, partition: Partition, policy: ActivationPolicy = KEEP_ALL) -> list[StageBytes]:
        """Return the bytes of every stage on the device.

        Raises:
            ValueError: a chosen run of layers does not fit the model.
        """
        return [self.of_stage(partition, stage, policy) for stage in range(partition.depth)]

    def of_stage(self, partition: Partition, stage: int, policy: ActivationPolicy) -> StageBytes:
        """Return the bytes of one stage on the device."""
        segments = segments_of(partition, stage, policy)
        if not policy.moves and not policy.segmented:
            return self.plain((segments[0].start, segments[-1].stop))
        return self.of_segments(segments, policy)

    def host(self, partition: Partition, policy: ActivationPolicy) -> list[HostBytes]:
        """Return the bytes of every stage on the host."""
        stages = []
        for stage in range(partition.depth):
            key = self._key(segments := segments_of(partition, stage, policy), policy)
            if key not in self._host:
                self._work_out(key, segments, policy)
            stages.append(self._host[key])
        return stages

    def of_segments(self, segments: Sequence[Segment], policy: ActivationPolicy) -> StageBytes:
        """Return the bytes of the stage whose layers ``segments`` cover."""
        key = self._key(segments, policy)
        if key not in self._kept:
            self._work_out(key, segments, policy)
        return self._kept[key]

    def _key(self, segments: Sequence[Segment], policy: ActivationPolicy) -> object:
        moves = (policy.offload, policy.smallest, policy.ahead) if policy.moves else None
        return tuple(segments), moves

    def _work_out(self, key: object, segments: Sequence[Segment], policy: ActivationPolicy) -> None:
        bound = segments[0].start, segments[-1].stop
        if not policy.moves:
            self._kept[key], self._host[key] = self._arrays_of(bound).stage_bytes(segments), HostBytes(0, 0, 0)
            return
        touched = self.touched(bound)
        lives = Lifetimes(touched, passes_of(self.graph, segments, touched), policy)
        self._kept[key], self._host[key] = lives.stage_bytes(self.graph, self.plain(bound)), lives.on_host

    def _arrays_of(self, bound: Bound) -> StageArrays:
        if bound not in self._arrays:
            self._arrays[bound] = StageArrays(self.graph, *bound, self.touched(bound))
        return self._arrays[bound]

    def plain(self, bound: Bound) -> StageBytes:
        """Return the bytes of the layers from one position to another, not included, when all is kept on the device."""
        if bound not in self._plain:
            self._plain[bound] = self._arrays_of(bound).plain
        return self._plain[bound]

    def touched(self, bound: Bound) -> list[Piece]:
        """The pieces that these layers make, keep or use."""
        if bound not in self._touched:
            numbers = {number for place in range(*bound) for number in self._at[place]}
            self._touched[bound] = [self.pieces[number] for number in sorted(numbers)]
        return self._touched[bound]
