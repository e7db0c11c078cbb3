"""Bytes that the stages of one graph hold, remembered: a search asks for the same stages again and again.

Takes a graph that was traced with its loss; gives ``StageBytes`` and ``HostBytes``, stage by stage. A stage is worked
out once for each choice of segments, whatever the other stages do. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.liveness import Piece, pieces
from parallel.memory.offload_window import HostBytes
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
        self._arrays: dict[Bound, StageArrays] = {}
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

    def of_segments(self, segments: Sequence[Segment], policy: ActivationPolicy) -> StageBytes:
        """Return the bytes of the stage whose layers ``segments`` cover."""
        return self._bytes(segments, policy)[0]

    def _bytes(self, segments: Sequence[Segment], policy: ActivationPolicy) -> tuple[StageBytes, HostBytes]:
        key = tuple(segments), (policy.smallest, policy.ahead) if policy.moves else None
        if key not in self._known:
            arrays = self.arrays((segments[0].start, segments[-1].stop))
            self._known[key] = arrays.stage_bytes(segments, policy)
        return self._known[key]

    def arrays(self, bound: Bound) -> StageArrays:
        """Return what the bytes of these layers are worked out with."""
        if bound not in self._arrays:
            self._arrays[bound] = StageArrays(self.graph, *bound, self.touched(bound))
        return self._arrays[bound]

    def touched(self, bound: Bound) -> list[Piece]:
        """Return the pieces that these layers make, keep or use."""
        if bound not in self._touched:
            numbers = {number for place in range(*bound) for number in self._at[place]}
            self._touched[bound] = [self.pieces[number] for number in sorted(numbers)]
        return self._touched[bound]
