"""The same network and tile by lightstream, the published StreamingCNN library, by our boxes, and by the plain step.

Takes a folder that lightstream was installed into, with what it imports; gives the table of the README: processor
seconds, bytes of live tensors (parameters and tile left out), and the largest error of a gradient against the plain
step in float64. The network is ResNet-18's trunk with frozen norms, none of whose parameters are trained, as
lightstream asks. Ways take turns in one process.

lightstream computes overlapping pieces of ``piece`` px from the image to the last map, and keeps each gradient once.
Its constructor asks for CUDA: it moves the network there after it has measured what borders lose. Here that move does
nothing (``nn.Module.cuda`` is shadowed meanwhile) and its device is set to the CPU; else it is as published.

    pip install --no-deps --target FOLDER lightstream lightning pytorch-lightning lightning-utilities torchmetrics
    python -m benchmarks.streaming.lightstream_peer --packages FOLDER [--tile 2048] [--boxes 256 512] [--write]
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.in_boxes import streamed
from benchmarks.results import markdown_table, measured_on, parser_of, publish, results, write_json
from models.external import freeze_norms
from parallel.offload.live_bytes import LiveBytes

Step = tuple[nn.Module, Callable[[], None]]
"""Module whose parameters have the gradients, and what computes them."""


class Pooled(nn.Module):
    """A trunk and a mean over the image: features (n, c)."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.trunk(x).mean((2, 3))
        return features


def trunk_of(name: str) -> nn.Sequential:
    """Return the layers of a ResNet of torchvision that give its last map, with frozen norms."""
    from torchvision import models

    torch.manual_seed(0)
    children = dict(models.get_model(name, weights=None).named_children())
    trunk = nn.Sequential(*(layer for key, layer in children.items() if key not in ("avgpool", "fc")))
    freeze_norms(trunk, name)
    for part in trunk.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.requires_grad_(False)
    return trunk.train()


def objective(features: Tensor) -> Tensor:
    """Return a loss of pooled features, each with a weight of its own."""
    return (features * torch.linspace(-1, 1, features.shape[1], dtype=features.dtype)).sum()


def lightstream_step(trunk: nn.Module, images: Tensor, piece: int) -> Step:
    """Return lightstream's network of ``trunk`` on the CPU, and its step."""
    from lightstream.core.constructor import StreamingConstructor

    to_cuda = nn.Module.cuda
    nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign, assignment]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            options: dict[str, Any] = {"verbose": False, "copy_to_gpu": False, "normalize_on_gpu": False}
            constructor = StreamingConstructor(trunk, piece, statistics_on_cpu=True, **options)
            constructor.add_modules_to_keep([nn.BatchNorm2d])  # as its own ResNet does
            network = constructor.prepare_streaming_model()
    finally:
        nn.Module.cuda = to_cuda  # type: ignore[method-assign]
    network.device = torch.device("cpu")

    def step() -> None:
        maps = network.forward(images).requires_grad_()
        objective(maps.mean((2, 3))).backward()  # type: ignore[no-untyped-call]
        network.backward(images, maps.grad)

    return network.stream_module, step


def our_step(trunk: nn.Module, images: Tensor, box: int) -> Step:
    """Return the trunk, and its step in boxes; at once if ``box`` is 0."""
    whole = Pooled(trunk)
    run = streamed(whole, box, tuple(images.shape)) if box else whole
    return trunk, lambda: objective(run(images)).backward()  # type: ignore[no-untyped-call]


def measure(
    name: str, tile: int, boxes: Sequence[int], pieces: Sequence[int], rounds: int, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Return a row for each way: median seconds of ``rounds`` (None without any), bytes, and the largest error of a
    gradient, relative to its largest value."""
    trunk = trunk_of(name).to(dtype)
    images = torch.randn(1, 3, tile, tile, generator=torch.Generator().manual_seed(1), dtype=dtype)
    steps = {("boxes" if box else "plain", box): our_step(copy.deepcopy(trunk), images, box) for box in (0, *boxes)}
    steps |= {("lightstream", piece): lightstream_step(copy.deepcopy(trunk), images, piece) for piece in pieces}
    took: dict[tuple[str, int], list[float]] = {way: [] for way in steps}
    peaks, gradients = {}, {}
    for number in range(1 + rounds):
        for way, (module, step) in steps.items():
            module.zero_grad()
            start, live = time.process_time(), LiveBytes()
            with live if not number else contextlib.nullcontext():  # counting takes time
                step()
            if number:
                took[way].append(time.process_time() - start)
            else:
                peaks[way] = live.peak_bytes
                gradients[way] = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    plain = gradients["plain", 0]
    errors = {
        way: max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(own, plain, strict=True))
        for way, own in gradients.items()
    }
    return [
        {
            "way": way,
            "px": px,
            "s": median(took[way, px]) if rounds else None,
            "live_bytes": peaks[way, px],
            "error": errors[way, px],
        }
        for way, px in steps
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="folder that lightstream was installed into")
    parser.add_argument("--tile", type=int, default=2048, help="px")
    parser.add_argument("--pieces", type=int, nargs="+", default=[1280, 1536], help="px of lightstream's pieces")
    parser.add_argument("--boxes", type=int, nargs="+", default=[256, 512], help="px of ours")
    parser.add_argument("--rounds", type=int, default=3, help="that are timed, after one that is counted")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.path.append(str(asked.packages.resolve()))
    rows = measure("resnet18", asked.tile, asked.boxes, asked.pieces, asked.rounds, torch.float32)
    exact = measure("resnet18", 1536, asked.boxes[-1:], asked.pieces[:1], 0, torch.float64)
    write_json("lightstream", {"rows": rows, "float64": exact, "environment": measured_on()})
    lines = [(f"{row['way']}, {row['px']} px", f"{row['s']:.1f}", f"{row['live_bytes'] / 2**20:,.0f}") for row in rows]
    errors = [(f"{row['way']}, {row['px']} px", f"{row['error']:.0e}") for row in exact]
    tables = [
        markdown_table([f"ResNet-18's trunk, {asked.tile:,} px", "processor s", "live tensors, MiB"], lines),
        markdown_table(["1,536 px", "largest error of a gradient, float64"], errors),
    ]
    text = results("python -m benchmarks.streaming.lightstream_peer --packages FOLDER --write", *tables)
    publish(__file__, text, asked.write, "lightstream")


if __name__ == "__main__":
    main()
