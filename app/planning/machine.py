"""The machine a plan is for: this one, calibrated, or one that is named.

Takes numbers of ranks and names of devices; returns a ``Machine``: a cluster, and how long layers take on its devices.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from app.launch.host import memory_bytes, usable_cores
from app.launch.place import Precision, autocast_of, decide_precision, device_kind, node_cores, threads_set
from app.settings.cli import RunError
from parallel.cost.calibrated import ADDITION, CostModel
from parallel.cost.cluster import (
    COMMUNICATOR_BYTES,
    LINK_BYTES,
    Cluster,
    DeviceSpec,
    LinkSpec,
    device_named,
    link_named,
)
from parallel.cost.roofline import BANDWIDTH, cost_on
from parallel.cost.stage_cost import Costs, LayerCost
from parallel.graph.layers import LayerGraph
from parallel.graph.scale import with_tiles
from parallel.profile.cache import cpu_model, kept_at
from parallel.profile.calibrate import QUICK_S, DeviceUse, load_or_calibrate
from parallel.profile.gpu import gpu_at
from parallel.profile.link_speed import TAKES_S, LinkSpeed, links_kept_at, load_or_measure_copies, load_or_measure_links
from parallel.units import bytes_text
from pipelines.catalog.table import counted

log = logging.getLogger(__name__)

CUDA_CONTEXT = 600 << 20
"""Bytes that CUDA takes of each GPU for each process, about."""
INSTANT = LinkSpec("none", math.inf, 0.0)
"""Of a node with one rank."""
NODE_HOST_BYTES = 256 << 30
"""Host memory of a node of machines that are described by a data sheet."""
MEASURED_RANKS = 2
"""Most ranks of a core or of a GPU that are started to measure messages: more on the same would show nothing else."""
GPU_LINK, NETWORK = "pcie4", "edr-infiniband"
"""Links between GPUs that are not measured, and between nodes that are not described."""
DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Machine:
    """Machine that a plan is for.

    Attributes:
        estimate: takes a graph of one tile, returns the costs of its layers by tiles of a microbatch.
        autocast: type for mixed precision; None computes in float32 or tf32.
        precision: as ``--precision``, never "auto".
        speeds: takes a graph of a usual microbatch, returns ``Cluster.speeds``.
    """

    cluster: Cluster
    estimate: Callable[[LayerGraph], Callable[[int], Costs]]
    autocast: torch.dtype | None
    precision: str = "fp32"
    speeds: Callable[[LayerGraph], tuple[float, ...]] = lambda _: ()


def this_machine(
    ranks: int,
    *,
    memory: int | None = None,
    host_memory: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    channels_last: bool = True,
    per_node: int | None = None,
    reserved: int = 0,
    timed: bool = True,
    advice: str = "name a device with --device-spec",
) -> Machine:
    """Return a number of machines like this one.

    Args:
        ranks: of the plan, ``per_node`` of them on a machine.
        memory: bytes that each rank may use; None: its share of what is free.
        host_memory: bytes of the host that each rank may fill; None: its share of half of what is free, and no more
            than ``memory`` leaves.
        device, precision: as ``--device``, ``--precision``.
        reserved: bytes of the host that each rank needs besides, of memory that is not given by ``memory``.
        timed: calibrate, unless that was done before; otherwise layers take no time.
        advice: what to do where this machine cannot be measured.

    Raises:
        ValueError: a device that is not there.
        RunError: this machine cannot be measured, or its ranks need more than is free.
    """
    where = torch.device("cuda", 0) if device_kind(device) == "cuda" else torch.device("cpu")
    per_node = min(ranks, per_node or ranks)
    available = memory_bytes()[1] // per_node
    if where.type == "cuda":
        lanes, threads, together = float(torch.cuda.device_count()), 1, 1
        gpu = gpu_at(0)
        free = gpu.free_bytes // -(-per_node // torch.cuda.device_count()) - CUDA_CONTEXT
        name = gpu.name
    else:
        cores = node_cores()
        threads = min(cores, threads_set() or max(1, cores // per_node))
        # Measured are as many ranks at once as this process has cores for; of a task that srun has bound, not all.
        lanes, together = cores / threads, min(per_node, max(1, usable_cores() // threads))
        free = available - reserved
        name = f"{cpu_model()}, {cores} cores"
        if memory is None and free < 0:
            raise RunError(
                f"{bytes_text(available)} of memory are free a rank, and --read-ahead takes {bytes_text(reserved)}: "
                "lower it, start fewer ranks, or give --memory"
            )
    used = precision_here(precision, device)
    autocast = autocast_of(used)
    limit = free if memory is None else memory
    # The host of a CPU is itself: what is moved there takes what the limit leaves.
    left = max(0, available - reserved - (limit if where.type == "cpu" else 0))
    on_host = min(left, available // 2) if host_memory is None else host_memory  # half, as ``host_share``
    between = link_named(NETWORK)
    cluster = Cluster(name, limit, per_node, lanes, INSTANT, between, math.inf, where.type, host_bytes=on_host)
    if where.type == "cuda" and lanes >= per_node:  # over NCCL
        cluster = dataclasses.replace(cluster, link_bytes=LINK_BYTES, communicator_bytes=COMMUNICATOR_BYTES)
    if not timed:
        none = LayerCost(0.0, 0.0, 0.0)
        return Machine(cluster, lambda graph: lambda _: Costs((none,) * len(graph.layers), "none"), autocast, used)
    try:
        model = _calibrated(where, threads, together, used, channels_last)
        copies = load_or_measure_copies(where, threads=threads, together=together).bandwidth
        additions = model.forward[ADDITION]  # the largest of which moves bytes as an update does
        bandwidth = additions.bytes[-1] / additions.seconds[-1]
        cluster = dataclasses.replace(cluster, update_bandwidth=bandwidth, copy_bandwidth=copies)
        if where.type == "cuda":
            cluster = _linked_gpus(cluster)
        elif per_node > 1:
            cluster = _linked(cluster, _links(min(per_node, MEASURED_RANKS * usable_cores()), threads))
    except RuntimeError as fault:
        raise RunError(f"{fault}; {advice}") from fault

    def estimate(graph: LayerGraph) -> Callable[[int], Costs]:
        return lambda tiles: model.estimate(with_tiles(graph, tiles))

    return Machine(cluster, estimate, autocast, used)


def precision_here(asked: str, device: str) -> Precision:
    """Return ``--precision`` of ranks on this machine, auto decided.

    Args:
        device: as ``--device``.

    Raises:
        ValueError: a device or a precision that this machine does not have.
    """
    if device_kind(device) == "cpu":
        return decide_precision(asked, False, "a CPU")
    return decide_precision(asked, gpu_at(0).bf16, gpu_at(0).name)


def _calibrated(device: torch.device, threads: int, together: int, precision: str, channels_last: bool) -> CostModel:
    dtype, tf32 = autocast_of(precision) or torch.float32, precision == "tf32"
    use = DeviceUse(device, threads, together, dtype, channels_last, tf32)
    ranks = f"{counted(together, 'rank')} of {counted(threads, 'thread')}"
    _announce(f"calibrating this machine for {ranks}, about {QUICK_S:.0f} s", kept_at(use.key()))
    return load_or_calibrate(use)


def _announce(what: str, path: Path | None) -> None:
    """Say what takes a while, unless its result is kept in ``path`` already."""
    if path is None or not path.exists():
        print(what + (f"; to be kept in {path.parent}" if path else ""), file=sys.stderr, flush=True)


def _links(ranks: int, threads: int, device: str = "cpu") -> LinkSpeed:
    what = f"measuring messages and sums between {ranks} ranks of this machine, about {TAKES_S} s"
    _announce(what, links_kept_at(ranks, threads, device))
    return load_or_measure_links(ranks, threads=threads, device=device)


def _linked(cluster: Cluster, speed: LinkSpeed) -> Cluster:
    # Where ranks share cores all passes of a rank are stretched, and their measured messages were so already.
    told = dataclasses.replace(speed.in_team, latency_s=speed.told_s / cluster.slowdown(cluster.per_node))
    return dataclasses.replace(
        cluster,
        inside=speed.messages,
        sums=speed.sums,
        inside_team=told,
        beside_backward=speed.beside_backward,
        gathering=speed.gathering,
    )


def _linked_gpus(cluster: Cluster) -> Cluster:
    """Return ``cluster`` with its links as measured over NCCL or Gloo; with ``GPU_LINK`` where they cannot be."""
    if cluster.per_node == 1:
        return dataclasses.replace(cluster, inside=link_named(GPU_LINK))
    try:
        speed = _links(min(cluster.per_node, MEASURED_RANKS * torch.cuda.device_count()), 1, "cuda")
    except RuntimeError as fault:
        log.warning("%s: planned with %s between GPUs", fault, GPU_LINK)
        return dataclasses.replace(cluster, inside=link_named(GPU_LINK))
    cluster = dataclasses.replace(cluster, inside=speed.messages, sums=speed.sums)
    if cluster.lanes < cluster.per_node:  # over Gloo: what was counted is memory of other ranks
        return cluster
    return dataclasses.replace(
        cluster,
        link_bytes=round(speed.link_bytes),
        communicator_bytes=round(speed.communicator_bytes),
    )


def devices_named(text: str, ranks: int) -> list[DeviceSpec]:
    """Return the device of each rank, of a name, or of several with their numbers, as "a40-48gb:2,t4-16gb:2".

    Raises:
        ValueError: a device that is not known, or a number other than ``ranks``.
    """
    words = [word.strip().partition(":") for word in text.split(",")]
    if len(words) == 1 and not words[0][1]:
        return [device_named(text)] * ranks
    specs: list[DeviceSpec] = []
    for name, _, count in words:
        if count and not (count.isascii() and count.isdigit() and int(count)):
            raise ValueError(f"--device-spec names devices as a40-48gb:2,t4-16gb:2; got {text}")
        specs += [device_named(name)] * int(count or 1)
    if len(specs) != ranks:
        raise ValueError(f"--device-spec {text} names {len(specs)} devices, one a rank: give --ranks {len(specs)}")
    return specs


def named_machine(
    device: str,
    ranks: int,
    *,
    memory: int | None = None,
    host_memory: int | None = None,
    per_node: int | None = None,
    link: str | None = None,
    network: str | None = None,
    precision: str = "auto",
) -> Machine:
    """Return machines with devices of a data sheet, one rank a device. Where devices differ, layers take their time on
    the slowest one for the model, and every rank has the memory of the smallest.

    Args:
        device: as for ``devices_named``.
        host_memory: bytes of the host that each rank may fill; None: its share of ``NODE_HOST_BYTES``.
        precision: as ``--precision``; "auto": bf16 if every device computes in it, else fp32.

    Raises:
        ValueError: a device or link that is not known, a number of devices other than ``ranks``, or arithmetic that a
            device does not have.
    """
    specs = devices_named(device, ranks)
    inside, between = link_named(link or GPU_LINK), link_named(network or NETWORK)
    if precision == "auto":
        precision = "bf16" if all("bfloat16" in spec.flops for spec in specs) else "fp32"
    dtype = DTYPES[precision]
    per_node = min(ranks, per_node or 8)
    kinds = {spec.name: spec for spec in specs}
    if lacking := [name for name, spec in kinds.items() if dtype not in spec.flops]:
        known = [name for name, each in DTYPES.items() if all(each in spec.flops for spec in specs)]
        sheets = ", ".join(lacking)
        raise ValueError(f"--precision {precision} is not on the data sheet of {sheets}: use {' or '.join(known)}")
    names = [spec.name for spec in specs]
    what = ", ".join(f"{names.count(name)} x {name}" if len(kinds) > 1 else name for name in kinds)
    name = f"{what}, {per_node} a node, {inside.name}" + (f", {between.name}" if ranks > per_node else "")
    smallest = min(spec.memory_bytes for spec in specs)
    cluster = Cluster(
        name,
        smallest if memory is None else memory,
        per_node,
        float(per_node),
        inside,
        between,
        BANDWIDTH * min(spec.bandwidth for spec in specs),
        copy_bandwidth=min(link_named(spec.host_link).bandwidth for spec in specs),
        host_bytes=NODE_HOST_BYTES // per_node if host_memory is None else host_memory,
        link_bytes=LINK_BYTES,
        communicator_bytes=COMMUNICATOR_BYTES,
    )

    def seconds(graph: LayerGraph, spec: DeviceSpec) -> float:
        return sum(cost_on(graph, spec, dtype).seconds)

    def slowest(graph: LayerGraph) -> DeviceSpec:
        return max(kinds.values(), key=lambda spec: seconds(graph, spec)) if len(kinds) > 1 else specs[0]

    def estimate(graph: LayerGraph) -> Callable[[int], Costs]:
        spec = slowest(graph)
        return lambda tiles: cost_on(with_tiles(graph, tiles), spec, dtype)

    def speeds(graph: LayerGraph) -> tuple[float, ...]:
        if len(kinds) == 1:
            return ()
        took = {name: seconds(graph, spec) for name, spec in kinds.items()}
        return tuple(max(took.values()) / took[name] for name in names)

    return Machine(cluster, estimate, autocast_of(precision), precision, speeds)
