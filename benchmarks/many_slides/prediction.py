"""Whole slides predicted: px per second compared with MONAI's sliding window, and memory on a large slide.

Takes nothing; draws two slides, writes a checkpoint of an untrained narrow U-Net, predicts the small slide with
``app.predict`` and with MONAI's ``sliding_window_inference``, holds the two maps against each other, and predicts the
large slide while its memory is sampled. Both blend probabilities with the same Gaussian at the same places.

    python -m benchmarks.many_slides.prediction [--size 50000] [--peer-size 4096] [--tile 512] [--overlap 0.25]
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from monai.inferers import sliding_window_inference  # type: ignore[attr-defined]

from app.checkpoint.file import save_checkpoint
from app.settings.fields import flat
from app.settings.optimization import ModelSettings
from app.settings.run import DataSettings, RunConfig
from benchmarks.many_slides.run import sampled
from benchmarks.results import OUT as BENCH_DATA
from benchmarks.results import markdown_table, parser_of, publish, results
from benchmarks.timing import run_app
from models.registry import build_model
from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Region
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.device_pixels import PixelMaker
from pipelines.tiles.tiling import IndexSettings

OUT = BENCH_DATA / "prediction"
MODEL, MPP, BATCH = "unet_w4", 0.5, 4


def write_checkpoint(path: Path, tile: int) -> None:
    """A checkpoint of the model with random weights, as ``app.train`` writes it, that looks at every window."""
    torch.manual_seed(0)
    net = build_model(MODEL, classes=2)
    index = IndexSettings(tile=tile, mpp=MPP, min_tissue=0)
    config = RunConfig(DataSettings(Path("slides")), index=index, net=ModelSettings(model=MODEL))
    state = {"model": net.state_dict(), "classes": ["background", "gland"], "settings": flat(config), "step": 0}
    state["task"] = "segment"
    save_checkpoint(path, state)


def predicted(slides: Path, checkpoint: Path, out: Path, overlap: float) -> dict[str, Any]:
    """Run ``app.predict`` on the one slide of a folder: seconds of the slide, and resident bytes of all processes of
    the command, and of the largest."""
    words = ["--slides", slides, "--checkpoint", checkpoint, "--out", out, "--overlap", overlap, "--batch", BATCH]
    log = out.with_suffix(".log")
    sizes = [of_processes for _, of_processes in sampled(["app.predict", *words], log)]
    printed = log.read_text()
    told = re.search(r": (\d+) windows, .* ([\d.]+) s\n", printed)
    if "failed" in printed or not told:
        sys.exit(f"app.predict failed: {printed}")
    most = {"total_bytes": max(map(sum, sizes)), "largest_bytes": max(max(each, default=0) for each in sizes)}
    return {"windows": int(told[1]), "seconds": float(told[2]), **most}


def by_monai(slide: Path, checkpoint: Path, tile: int, overlap: float) -> tuple[float, np.ndarray]:
    """Seconds that MONAI takes for the whole slide, reading included, and its map of class 1."""
    module = build_model(MODEL, classes=2).to(memory_format=torch.channels_last).eval()
    module.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    pixel_maker = PixelMaker(torch.device("cpu"), AugmentSettings(augment="none"), 0, channels_last=True)
    begun_s = time.perf_counter()
    with open_slide(slide, mpp=None, backend="auto") as opened:
        level = opened.levels[0]
        pixels = opened.read(Region(0, 0, level.width, level.height, MPP))
    images = pixel_maker.floats(torch.from_numpy(pixels[None]), None)
    with torch.inference_mode():
        blended = sliding_window_inference(
            images,
            tile,
            BATCH,
            lambda windows: module(windows).softmax(1),
            overlap=overlap,
            mode="gaussian",
            sigma_scale=0.125,
        )
    return time.perf_counter() - begun_s, blended[0, 1].numpy()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", type=int, default=50_000, help="px of the large slide's side; 0: none")
    parser.add_argument("--peer-size", type=int, default=4096, help="px of the side of the slide that MONAI predicts")
    parser.add_argument("--rounds", type=int, default=5, help="of the small slide, alternating")
    parser.add_argument("--tile", type=int, default=512, help="px of a window")
    parser.add_argument("--overlap", type=float, default=0.25, help="of windows")
    given = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    checkpoint = OUT / "model.pt"
    write_checkpoint(checkpoint, given.tile)
    rows: list[dict[str, Any]] = []
    for name, size in (("small", given.peer_size), ("large", given.size))[: 2 if given.size else 1]:
        run_app("app.synth", str(OUT / name), "--slides", "1", "--size", str(size), "--task", "segment")
    (slide,) = (OUT / "small").glob("*.tif")
    ratios = []
    for round_ in range(given.rounds):
        measured = predicted(OUT / "small", checkpoint, OUT / f"small-out{round_}", given.overlap)
        seconds, theirs = by_monai(slide, checkpoint, given.tile, given.overlap)
        ratios.append(seconds / measured["seconds"])
        print(f"round {round_}: app.predict {measured['seconds']:.1f} s, MONAI {seconds:.1f} s", flush=True)
    rows.append({"who": "app.predict", "size": given.peer_size, **measured})
    rows.append({"who": "MONAI", "size": given.peer_size, "seconds": seconds})
    (path,) = (OUT / "small-out0" / "heat_maps").glob("*.tif")
    difference = float(np.abs(tifffile.imread(path, key=0) / 255 - theirs).max())
    if given.size:
        measured = predicted(OUT / "large", checkpoint, OUT / "large-out", given.overlap)
        rows.append({"who": "app.predict", "size": given.size, **measured})
        print(json.dumps(rows[-1]), flush=True)
    table = markdown_table(
        ("", "slide", "windows", "s", "Mpx/s", "resident, all processes", "largest process"),
        [
            (
                row["who"],
                f"{row['size']:,} px",
                str(row.get("windows", "")),
                f"{row['seconds']:.0f}",
                f"{row['size'] ** 2 / 1e6 / row['seconds']:.2f}",
                f"{row['total_bytes'] / 1e9:.2f} GB" if "total_bytes" in row else "",
                f"{row['largest_bytes'] / 1e9:.2f} GB" if "largest_bytes" in row else "",
            )
            for row in rows
        ],
    )
    each, median = ", ".join(f"{ratio:.2f}" for ratio in ratios), statistics.median(ratios)
    said = (
        f"The two maps of the small slide differ by {difference:.5f} at most; a byte of a heat map is 1/255. "
        f"Over {given.rounds} rounds, alternating, app.predict did {median:.2f} times as many px a second as MONAI "
        f"({each}); its time has tissue, areas and files in it.\n"
    )
    command = f"python -m benchmarks.many_slides.prediction --size {given.size} --peer-size {given.peer_size} --write"
    publish(__file__, results(command, table, said), given.write, "prediction")


if __name__ == "__main__":
    main()
