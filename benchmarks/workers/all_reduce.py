"""Three ways of summing gradients over CPU and GPU ranks, by size: flat, in host memory, and on the GPUs.

Takes nothing; gives seconds of a sum of 4 KiB to 256 MiB over two machines of a CPU rank and a GPU rank each. All four
are processes on the CPU of this machine: the GPUs are stand-ins, and the machines two in name only.

    python -m benchmarks.workers.all_reduce [--largest 256] [--rounds 9] [--write]
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import measured_on
from benchmarks.ranks import run_on_ranks
from benchmarks.results import markdown_table, parser_of, publish, results
from benchmarks.workers.all_reduce_model import WAYS, Machine, fit_stand_ins
from benchmarks.workers.all_reduce_picture import draw_picture, in_words
from parallel.comm.communicator import Communicator
from parallel.comm.kinds import RankKind
from parallel.comm.mixed_comm import MixedCommunicator
from parallel.cost.devices import device_named, link_named

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "bench-data"
NODES, GPUS = 2, 1
KINDS = [RankKind(f"machine {node}", kind) for node in range(NODES) for kind in ("cuda", "cpu")]  # type: ignore[arg-type]
SMALLEST, STEP = 4 << 10, 4
FEWER_FROM = 16 << 20
"""Bytes from which a sum lasts so long that a third of the rounds tell as much."""
HOST_BYTES_S = 153.6e9
"""Two processors with four channels of DDR4-2400 each."""


def sweep(communicator: Communicator, argument: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    """Seconds of each way's sums on this rank, by size and round; the ways take turns."""
    ways: dict[str, Communicator] = {"flat": communicator}
    for way in ("host", "device"):
        ways[way] = MixedCommunicator(communicator, KINDS, way)
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for size in argument["sizes"]:
        tensor = torch.empty(size // 4)
        for way in WAYS:
            found[way].append([])
        rounds = argument["rounds"] if size < FEWER_FROM else max(2, argument["rounds"] // 3)
        for turn in range(rounds + 1):
            for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                tensor.fill_(communicator.rank + 1)
                communicator.barrier()
                begun_s = time.perf_counter()
                ways[way].all_reduce(tensor)
                seconds = time.perf_counter() - begun_s
                assert tensor.min() == tensor.max() == 10, f"{way} of {size} bytes"
                if turn:  # the first one warms up
                    found[way][-1].append(seconds)
    return found


def medians(ranks: Sequence[Mapping[str, list[list[float]]]]) -> dict[str, list[float]]:
    """Of the rounds of each size; a sum is done when its last rank is."""
    return {
        way: [
            statistics.median(map(max, zip(*rounds, strict=True)))
            for rounds in zip(*(rank[way] for rank in ranks), strict=True)
        ]
        for way in WAYS
    }


def data_sheet() -> Machine:
    """Two machines of a CPU rank and two P100 each, all at the speeds of their data sheets."""
    network, gpu = link_named("edr-infiniband").bandwidth, device_named("p100-16gb").bandwidth
    speeds = {"copy": link_named("pcie3").bandwidth, "host": HOST_BYTES_S, "gpu": gpu}
    return Machine(2, 2, speeds | {"network": network, "ring": network}, dict.fromkeys(WAYS, 0.0))


def report(sizes: Sequence[int], measured: Mapping[str, Sequence[float]], fitted: Machine) -> str:
    """The part of the README that a run writes."""
    rows = []
    for k, size in enumerate(sizes):
        cells = [in_words(size)]
        for way in WAYS:
            seconds = measured[way][k]
            cells += [f"{1e3 * seconds:.3g}", f"{fitted.seconds(way, size) / seconds:.2f}"]
        rows.append([*cells, min(WAYS, key=lambda way: measured[way][k])])
    header = ["a rank's bytes", *(text for way in WAYS for text in (f"{way}, ms", "formula over it")), "fastest"]
    off = sorted(abs(fitted.seconds(way, s) / measured[way][k] - 1) for way in WAYS for k, s in enumerate(sizes))
    within = sum(each <= 0.15 for each in off)
    speeds = ", ".join(
        f"{name} {fitted.speeds[key] / 1e9:.2f} GB/s" for name, key in (("memory", "host"), ("link", "ring"))
    )
    waits = ", ".join(f"{way} {1e3 * fitted.latency_s[way]:.2f} ms" for way in WAYS)
    about = (
        f"Fitted to all {len(off)} medians: {speeds}; latencies {waits}. The formula is within 15 % of {within} of "
        f"them, and off by {off[len(off) // 2]:.0%} in the middle, {off[-1]:.0%} at most.\n"
    )
    sheet = data_sheet()
    size = 100e6
    ahead = ", ".join(f"{way} {1e3 * sheet.seconds(way, size):.1f} ms" for way in ("host", "device"))
    sheet_text = (
        "By the formula alone, for 100 MB on two machines of a CPU rank and two P100 each, at what links attain of "
        f"PCIe 3 and 100 Gb/s and at {HOST_BYTES_S / 1e9:g} GB/s of host memory, latencies left out: {ahead}. Not "
        "measured.\n"
    )
    return results("python -m benchmarks.workers.all_reduce --write", markdown_table(header, rows), about, sheet_text)


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--largest", type=int, default=256, help="MiB of the largest sum")
    parser.add_argument("--rounds", type=int, default=9, help="sums of a way and size, a third of them of large ones")
    parser.add_argument("--write", action="store_true", help="put table and picture into the folder of the benchmark")
    arguments = parser.parse_args()
    sizes = [SMALLEST]
    while sizes[-1] * STEP <= arguments.largest << 20:
        sizes.append(sizes[-1] * STEP)
    target = "benchmarks.workers.all_reduce:sweep"
    ranks = run_on_ranks(len(KINDS), target, {"sizes": sizes, "rounds": arguments.rounds})
    measured = medians(ranks)
    points = [(way, size, measured[way][k]) for way in WAYS for k, size in enumerate(sizes)]
    fitted = fit_stand_ins(NODES, GPUS, points)
    OUT.mkdir(exist_ok=True)
    found = {"sizes": sizes, "seconds": measured, "ranks": ranks, "environment": measured_on()}
    (OUT / "all_reduce_ways.json").write_text(json.dumps(found, indent=2) + "\n")
    text = report(sizes, measured, fitted)
    publish(__file__, text, arguments.write, "all_reduce")
    if arguments.write:
        title = "Summing gradients of 2 x (CPU rank + stand-in of a GPU), four processes of one machine"
        draw_picture(sizes, measured, fitted, title, HERE / "all_reduce_ways.svg")


if __name__ == "__main__":
    main()
