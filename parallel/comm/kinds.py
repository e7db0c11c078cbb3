"""The device and machine of each rank: all ranks decide from the same table which backend a group has."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Of Linux; tells machines apart that go by one name."""


@dataclass(frozen=True, slots=True)
class RankKind:
    """One rank.

    Attributes:
        node: the machine, by a name that no other machine of the run has; its ranks share memory.
        unit: the device, by a name that no other of its machine has; empty on a CPU.
    """

    node: str
    kind: Literal["cpu", "cuda"]
    unit: str = ""


def own_kind(device: torch.device) -> RankKind:
    """Return the kind of a rank that computes on ``device``."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    node = f"{platform.node()} {boot}".strip()
    if device.type != "cuda":
        return RankKind(node, "cpu")
    # Not its number: ranks may have been given a view of one GPU each, which all of them number 0.
    return RankKind(node, "cuda", str(torch.cuda.get_device_properties(device).uuid))


def has_gpu_each(kinds: Sequence[RankKind]) -> bool:
    """Return whether every rank computes on a GPU, and no two on the same: what NCCL takes."""
    return all(kind.kind == "cuda" for kind in kinds) and len(set(kinds)) == len(kinds)


def backend_of(kinds: Sequence[RankKind]) -> str:
    """Return the backend of a group of ranks of ``kinds``, as torch.distributed names it."""
    return "cpu:gloo,cuda:nccl" if has_gpu_each(kinds) else "gloo"


def describe_shared_gpu(kinds: Sequence[RankKind]) -> str:
    """Name the first two ranks that share a GPU; "" where none do.

    >>> describe_shared_gpu([RankKind("a", "cuda", "7c"), RankKind("b", "cuda", "7c"), RankKind("a", "cuda", "7c")])
    'ranks 0 and 2 share GPU 7c of a'
    """
    first: dict[RankKind, int] = {}
    for rank, kind in enumerate(kinds):
        if kind.kind == "cuda" and first.setdefault(kind, rank) != rank:
            return f"ranks {first[kind]} and {rank} share GPU {kind.unit} of {kind.node.split()[0]}"
    return ""


def are_mixed(kinds: Sequence[RankKind]) -> bool:
    """Return whether some compute on a CPU and others on a GPU."""
    return len({kind.kind for kind in kinds}) > 1


def by_node(kinds: Sequence[RankKind]) -> list[list[int]]:
    """Return the ranks of each machine, in order; machines in order of their first rank.

    >>> by_node([RankKind("a", "cpu"), RankKind("b", "cpu"), RankKind("a", "cuda", "0")])
    [[0, 2], [1]]
    """
    nodes: dict[str, list[int]] = {}
    for rank, kind in enumerate(kinds):
        nodes.setdefault(kind.node, []).append(rank)
    return list(nodes.values())


def to_text(kinds: Sequence[RankKind]) -> str:
    """Return ``kinds`` as text that ``from_text`` reads."""
    return json.dumps([asdict(kind) for kind in kinds])


def from_text(text: str | bytes) -> tuple[RankKind, ...]:
    """Return what ``to_text`` wrote."""
    return tuple(RankKind(**fields) for fields in json.loads(text))
