"""What is computed again where everything else goes to the host: blocks, but for those whose second pass has no room.

A block that is computed again leaves less for the host, and takes more of the device for as long as it runs again: its
values live beside the gradients. Takes a partition and what its ranks would take; gives runs of layers for
``ActivationPolicy.chosen``. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy
from parallel.memory.recompute_ranks import Runs
from parallel.memory.segments import segments_of


def runs_beside_offload(partition: Partition, fits: Callable[[Runs], bool]) -> Runs | None:
    """Return the runs of all stages; None where not even without any the ranks take no more than they may.

    Blocks with the largest values are given up first, and taken again where that turns out to fit.

    Args:
        fits: whether ranks that compute these runs again, and offload, take no more than they may.
    """
    graph = partition.graph
    blocks = chain.from_iterable(
        segments_of(partition, stage, ActivationPolicy("block")) for stage in range(partition.depth)
    )
    runs = [(one.start, one.stop) for one in blocks if one.recompute]
    largest = {run: max(layer.output_bytes for layer in graph.layers[slice(*run)]) for run in runs}

    def named(chosen: set[tuple[int, int]]) -> Runs:
        return tuple((graph.layers[start].name, graph.layers[stop - 1].name) for start, stop in sorted(chosen))

    chosen, given_up = set(runs), []
    for run in sorted(runs, key=lambda run: (-largest[run], run)):
        if fits(named(chosen)):
            break
        chosen.remove(run)
        given_up.append(run)
    if not fits(named(chosen)):
        return None
    for run in given_up:
        if fits(named(chosen | {run})):
            chosen.add(run)
    return named(chosen)
