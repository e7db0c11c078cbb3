"""The same network, tile and bytes by lightstream, the published StreamingCNN library, and by our boxes.

Takes a folder that lightstream was installed into, with what it imports; gives ``results/lightstream.json`` beside it
and the tables of the README. ResNet-18's trunk with frozen norms, none of whose parameters are trained, as lightstream
asks; a random tile, one forward and one backward pass; each way in a process of its own. Bytes are those of live
tensors while it computes (parameters and tile left out), and the growth of the process from before the network was made
ready. Errors are against the plain step in the same process, in float64; networks that lightstream makes no claim for
are tried as well.

lightstream computes overlapping pieces of ``piece`` px from the image to the last map, and keeps each gradient once.
Its constructor asks for CUDA: it moves the network there after it has measured what borders lose. Here that move does
nothing (``nn.Module.cuda`` is shadowed meanwhile) and its device is set to the CPU; else it is as published.

    pip install --no-deps --target FOLDER lightstream lightning pytorch-lightning lightning-utilities torchmetrics
    python -m benchmarks.streaming.lightstream_peer --packages FOLDER [--tile 2048] [--boxes 256 512]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.in_boxes import streamed
from benchmarks.machine import measured_on
from benchmarks.results import markdown_table, parser_of, results, write_results
from models.external import freeze_norms
from parallel.offload.live_bytes import LiveBytes

README = Path(__file__).with_name("README.md")
OUT = Path(__file__).with_name("results")
COMMAND = "python -m benchmarks.streaming.lightstream_peer --packages FOLDER"

ERRORS = {
    "resnet18": ("frozen", 1536, 1280),
    "resnet18, odd tile": ("frozen", 1511, 1280),
    "resnet18, batch norm in training": ("batch", 1536, 1280),
    "mobilenet_v3_small (squeeze-and-excitation)": ("frozen", 1536, 1280),
    "densenet121": ("frozen", 1536, 1280),
    "googlenet (pools in ceil mode)": ("frozen", 1536, 1280),
}
"""Name -> (norm, tile px, px of lightstream's pieces)."""
BOX = 512
"""px of ours, where errors are compared."""


class Trunk(nn.Module):
    """The feature maps of a classifier of torchvision."""

    def __init__(self, name: str, norm: str) -> None:
        super().__init__()
        from torchvision import models

        options = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
        net = models.get_model(name, weights=None, **options)
        children = dict(net.named_children())
        self.layers = children.get("features") or nn.Sequential(
            *(layer for key, layer in children.items() if key not in ("avgpool", "fc", "dropout"))
        )
        if norm == "frozen":
            freeze_norms(self, name)
            for part in self.modules():
                if isinstance(part, nn.BatchNorm2d):
                    part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps (n, c, h, w)."""
        maps: Tensor = self.layers(x)
        return maps


class Pooled(nn.Module):
    """A trunk and a mean over the image."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, x: Tensor) -> Tensor:
        """Return features (n, c)."""
        features: Tensor = self.trunk(x).mean((2, 3))
        return features


def objective(features: Tensor) -> Tensor:
    """Return a loss of pooled features, each with a weight of its own."""
    return (features * torch.linspace(-1, 1, features.shape[1], dtype=features.dtype)).sum()


def lightstream_of(trunk: Trunk, piece: int) -> Any:
    """Return lightstream's network of ``trunk``, on the CPU."""
    from lightstream.core.constructor import StreamingConstructor

    to_cuda = nn.Module.cuda
    nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign, assignment]
    try:
        constructor = StreamingConstructor(
            trunk.layers, piece, verbose=False, copy_to_gpu=False, statistics_on_cpu=True, normalize_on_gpu=False
        )
        constructor.add_modules_to_keep([nn.BatchNorm2d])  # as its own ResNet does
        network = constructor.prepare_streaming_model()
    finally:
        nn.Module.cuda = to_cuda  # type: ignore[method-assign]
    network.device = torch.device("cpu")
    return network


def lightstream_step(network: Any, images: Tensor) -> None:
    """Compute all gradients by lightstream."""
    maps = network.forward(images).requires_grad_()
    objective(maps.mean((2, 3))).backward()  # type: ignore[no-untyped-call]
    network.backward(images, maps.grad)


def cell(asked: argparse.Namespace) -> dict[str, Any]:
    """Return what one way takes: seconds of the processor, bytes; and its error, where it is asked for."""
    name, norm, tile, way, size = asked.cell
    tile, size, dtype = int(tile), int(size), torch.float64 if asked.error else torch.float32
    torch.manual_seed(0)
    plain = Trunk(name, norm).to(dtype).train()
    torch.manual_seed(0)
    trunk = Trunk(name, norm).to(dtype).train()
    images = torch.randn(1, 3, tile, tile, generator=torch.Generator().manual_seed(1), dtype=dtype)
    before = psutil.Process().memory_info().rss
    if way == "lightstream":
        with contextlib.redirect_stdout(io.StringIO()):
            network = lightstream_of(trunk, size)
        if norm == "batch":
            network.stream_module.train()
        compute, ours = lambda: lightstream_step(network, images), network.stream_module
    else:
        whole = Pooled(trunk)
        run = streamed(whole, size, tuple(images.shape)) if way == "boxes" else whole
        compute, ours = lambda: objective(run(images)).backward(), trunk.layers  # type: ignore[no-untyped-call]
    live = LiveBytes()
    start = time.process_time()
    with live:
        compute()
    result = {"seconds": time.process_time() - start, "live_bytes": live.peak_bytes}
    result["process_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    if asked.error:
        objective(plain(images).mean((2, 3))).backward()  # type: ignore[no-untyped-call]
        result["error"] = error(plain.layers, ours)
    return result


def error(plain: nn.Module, ours: nn.Module) -> float:
    """Return the largest error of a gradient, relative to the largest value of the tensor it is in."""
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    computed = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(
        float((gradient - computed.get(name, torch.zeros_like(gradient))).abs().max())
        / max(float(gradient.abs().max()), 1e-9 * largest)
        for name, gradient in expected.items()
    )


def measured(
    library: Path, name: str, norm: str, tile: int, way: str, size: int, *, with_error: bool
) -> dict[str, Any]:
    """Return a row, computed in a process of its own; why not, where it fails."""
    words = [sys.executable, "-m", "benchmarks.streaming.lightstream_peer", "--packages", str(library), "--cell"]
    words += [name, norm, str(tile), way, str(size), *(["--error"] if with_error else [])]
    done = subprocess.run(words, cwd=README.parents[2], capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"model": name, "norm": norm, "tile_px": tile, "way": way, "size_px": size}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return row | {"fault": lines[-1] if lines else f"ended with {done.returncode}"}
    row |= json.loads(done.stdout.strip().splitlines()[-1])
    print({key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return row


def tables(rows: list[dict[str, Any]]) -> str:
    """Return the table of speed and memory, and that of errors."""
    costs = [
        [
            row["way"] + (f", {row['size_px']} px" if row["size_px"] else ""),
            f"{row['tile_px']:,}",
            f"{row['seconds']:.1f}" if "fault" not in row else row["fault"],
            *(f"{row[key] / 2**20:,.0f}" if key in row else "" for key in ("live_bytes", "process_bytes")),
        ]
        for row in rows
        if row["kind"] == "cost"
    ]
    errors = [
        [row["case"], row["way"], f"{row['tile_px']:,}", f"{row['error']:.0e}" if "error" in row else row["fault"]]
        for row in rows
        if row["kind"] == "error"
    ]
    return "\n".join([
        markdown_table(["way", "tile px", "processor s", "live tensors, MiB", "growth of process, MiB"], costs),
        markdown_table(["network", "way", "tile px", "largest error of a gradient, float64"], errors),
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--packages", type=Path, required=True, help="folder that lightstream was installed into")
    parser.add_argument("--tile", type=int, default=2048, help="px")
    parser.add_argument("--pieces", type=int, nargs="+", default=[1280, 1536], help="px of lightstream's pieces")
    parser.add_argument("--boxes", type=int, nargs="+", default=[256, 512], help="px of ours")
    parser.add_argument("--only", nargs="+", help="networks of the table of errors, by a word of their names")
    parser.add_argument("--cell", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--error", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if asked.cell:
        sys.path.append(str(asked.packages.resolve()))
        print(json.dumps(cell(asked)))
        return 0
    ways = [("plain", 0), *(("boxes", box) for box in asked.boxes), *(("lightstream", piece) for piece in asked.pieces)]
    rows = [
        measured(asked.packages, "resnet18", "frozen", asked.tile, *way, with_error=False) | {"kind": "cost"}
        for way in ways
    ]
    for case, (norm, tile, piece) in ERRORS.items():
        if not asked.only or any(word in case for word in asked.only):
            for way, size in (("lightstream", piece), ("boxes", BOX)):
                row = measured(asked.packages, case.split(",")[0].split()[0], norm, tile, way, size, with_error=True)
                rows.append(row | {"kind": "error", "case": case})
    print(tables(rows))
    if not asked.only:
        OUT.mkdir(exist_ok=True)
        result = {"environment": measured_on(), "rows": rows}
        (OUT / "lightstream.json").write_text(json.dumps(result, indent=1) + "\n")
        write_results(README, results(COMMAND, tables(rows)), "lightstream")
    return 0


if __name__ == "__main__":
    sys.exit(main())
