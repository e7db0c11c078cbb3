"""Memory that NCCL allocates on a GPU for the communicators of a rank: one for each group of ranks that sums, and one
for each direction between two ranks that send messages (``torch_comm.Links``). No torch here.
"""

from __future__ import annotations

from parallel.cost.cluster import Cluster
from parallel.strategy import Strategy


def communication_bytes(strategy: Strategy, cluster: Cluster) -> int:
    """Return the bytes of the rank with the most communicators.

    Stages are taken to send to their neighbours only; a skip over a stage adds two links.
    """
    if strategy.ranks == 1:
        return 0
    members = strategy.members
    peers = min(strategy.depth - 1, 2) * members
    groups = (strategy.copies * members > 1) + strategy.shard_optimizer + (members > 1)
    return 2 * peers * cluster.link_bytes + groups * cluster.communicator_bytes
