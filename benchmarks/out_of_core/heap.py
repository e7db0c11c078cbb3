"""Training steps on a CPU with the heap as glibc keeps it, and as ranks do: how much faster, for how much memory.

Takes nothing; gives, for each model and tile, the time of a step and the bytes by which the process grows. The two take
turns, each time in processes of their own of one thread.

    python -m benchmarks.out_of_core.heap [--rounds 1] [--write]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks.results import markdown_table, parser_of, publish, results

CASES = (("unet_w16", 512, 2), ("unet_w16", 2048, 1), ("resnet50", 1024, 1), ("torchvision:mobilenet_v2", 512, 2))
"""Model, side of the tile in px, tiles."""
WARM_UP, TIMED = 2, 3
MIB = 1 << 20


def step_times(model: str, tile: int, tiles: int, kept: bool) -> tuple[float, int]:
    """Median seconds of a step, and bytes by which this process is larger at its peak than before the model."""
    import torch

    from app.training.throughput import peak_resident_bytes
    from models.registry import build_model
    from parallel.profile.malloc import keep_freed_memory

    torch.set_num_threads(1)
    if kept:
        keep_freed_memory()
    before = peak_resident_bytes()
    trained = build_model(model, classes=2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3, momentum=0.9)
    images = torch.randn(tiles, 3, tile, tile).to(memory_format=torch.channels_last)
    taken = []
    for _ in range(WARM_UP + TIMED):
        begun = time.perf_counter()
        trained(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[WARM_UP:]), peak_resident_bytes() - before


def in_a_process(model: str, tile: int, tiles: int, kept: bool) -> tuple[float, int]:
    """As ``step_times``, in a process of its own."""
    asked = (model, tile, tiles, kept)
    call = f"import json; from benchmarks.out_of_core.heap import step_times; print(json.dumps(step_times{asked}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    seconds, grown = json.loads(done.stdout.splitlines()[-1])
    return seconds, grown


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="times that each is run")
    arguments = parser.parse_args()
    lines, slower = [], []
    for case in CASES:
        rounds = [(in_a_process(*case, False), in_a_process(*case, True)) for _ in range(arguments.rounds)]
        ratio = statistics.median(given[0] / kept[0] for given, kept in rounds)
        sizes = [statistics.median(each[side][1] for each in rounds) / MIB for side in (0, 1)]
        times = [statistics.median(each[side][0] for each in rounds) for side in (0, 1)]
        model, tile, tiles = case
        lines.append(
            (
                f"{model.removeprefix('torchvision:')}, {tiles} x {tile} px",
                *(f"{seconds:.2f}" for seconds in times),
                f"{ratio:.2f}x",
                *(f"{size:.0f}" for size in sizes),
            )
        )
        slower += [lines[-1][0]] if ratio < 1 else []
    header = ("tiles of a step", "step, s: given back", "kept", "faster", "peak MiB: given back", "kept")
    text = results("python -m benchmarks.out_of_core.heap --write", markdown_table(header, lines))
    publish(__file__, text, arguments.write, "heap")
    sys.exit(f"slower with freed memory kept: {', '.join(slower)}" if slower else 0)


if __name__ == "__main__":
    main()
