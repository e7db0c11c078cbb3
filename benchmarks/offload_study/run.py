"""The published study of CPU offload, run again: four networks, five ways to offload activations, and ours.

Takes nothing (pictures are made), or any folder of pictures with a sub-folder per class, such as the study's own. Gives
seconds of training, best validation accuracy and times of the copies.

    python -m benchmarks.offload_study.run [--images DIR] [--models vgg19 ...] [--modes none overlap ...] [--epochs N]
        [--batch N] [--px N] [--pictures N] [--device auto] [--write]
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload_study import published
from benchmarks.offload_study.measure import Trained, measure_model
from benchmarks.offload_study.pictures import Pictures, made_pictures, pictures_of_folder
from benchmarks.results import markdown_table, measured_on, parser_of, publish, results, write_json

MODES = (*published.MODES, "overlap")
SMALL = {"epochs": 3, "px": 64, "pictures": 64}
"""On a CPU."""
FULL = {"epochs": 20, "px": 224, "pictures": 398}
"""On a GPU: as in the study."""
LARGER = {"inception_v3": 299 / 224}
"""Side of a picture over that of the others': what the network is made for."""
ROW_HEADER = (
    "model",
    "mode",
    "training, s",
    "over none",
    "published, over none",
    "best accuracy",
    "GB moved a step",
    "peak on the device, MiB",
)
COPY_HEADER = ("model", "mode", "direction", "mean, ms", "max", "min", "median", "mean, GB/s", "max", "min", "median")


def study(
    models: Sequence[str],
    modes: Sequence[str],
    pictures_at: Callable[[int], Pictures],
    *,
    epochs: int,
    batch: int,
    px: int,
    device: torch.device,
    seconds: float | None = None,
    report: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """The whole table.

    Args:
        pictures_at: takes a side in px.
        seconds: after which a model gets no further epochs, in equal parts; None: no limit.
        report: called with the table after each model.
    """
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"rows": rows, "batch": batch, "px": px, "epochs_asked": epochs}
    began_s = time.perf_counter()
    for number, model in enumerate(models, 1):
        pictures = pictures_at(round(px * LARGER.get(model, 1.0)))
        until_s = None if seconds is None else began_s + seconds * number / len(models)
        trained = measure_model(
            model,
            modes,
            pictures,
            epochs=epochs,
            batch=batch,
            device=device,
            enough=lambda until_s=until_s: until_s is not None and time.perf_counter() > until_s,
        )
        rows += [row_of(model, one, trained) for one in trained]
        result["source"] = pictures.source
        report(result)
    return result


def row_of(model: str, one: Trained, trained: Sequence[Trained]) -> dict[str, Any]:
    """Return a mode's figures and their ratio to those without offload."""
    (none,) = [other for other in trained if other.mode == "none"] or [None]
    return {
        "model": model,
        **dataclasses.asdict(one),
        "epochs": len(one.epochs_s),
        "training_s": sum(one.epochs_s),
        "ratio": None
        if none is None
        else statistics.median(a / b for a, b in zip(one.epochs_s, none.epochs_s, strict=True)),
        "largest_loss_difference": None
        if none is None
        else max(
            abs(a - b) for a, b in zip(one.losses, none.losses, strict=False)
        ),  # copies are timed in further steps
        "published_ratio": published.published_ratio(model, one.mode),
    }


def table(result: dict[str, Any]) -> str:
    """Return the tables of training and of copies."""
    lines = [
        (
            row["model"],
            row["mode"],
            f"{row['training_s']:.2f}",
            _times(row["ratio"]),
            _times(row["published_ratio"]),
            f"{row['best_accuracy']:.2f}",
            _moved(row),
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
        )
        for row in result["rows"]
    ]
    copies = [
        (
            row["model"],
            row["mode"],
            {"out": "to the host", "back": "back"}[direction],
            *(f"{1e3 * found[f'{name}_s']:.3f}" for name in ("mean", "max", "min", "median")),
            *(f"{found[f'{name}_bytes_per_s'] / 1e9:.2f}" for name in ("mean", "max", "min", "median")),
        )
        for row in result["rows"]
        for direction, found in row["copies"].items()
    ]
    epochs = max(row["epochs"] for row in result["rows"])
    differences = [row["largest_loss_difference"] for row in result["rows"] if row["ratio"] is not None]
    about = (
        f"{result['source']}, {result['px']} px, batches of {result['batch']}, epochs: {epochs}, on {result['device']}."
        " Over none: the median of epochs that took turns. "
        f"Largest difference of a step's loss from that without offload: {max(differences, default=0.0):.1g}.\n"
    )
    return "\n".join([about, markdown_table(ROW_HEADER, lines), markdown_table(COPY_HEADER, copies)])


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _moved(row: dict[str, Any]) -> str:
    out = row["copies"].get("out")
    return "0" if out is None else f"{out['bytes'] / row['timed_steps'] / 1e9:.2f}"


def _command() -> str:
    """Return the command as it was given, without the names of folders."""
    words = ["DIR" if before == "--images" else word for before, word in itertools.pairwise(["", *sys.argv[1:]])]
    return " ".join(["python -m benchmarks.offload_study.run", *words])


def device_named(name: str) -> torch.device:
    """auto: the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def device_text(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--images", type=Path, help="folder with a sub-folder per class, below train/ and val/ or not")
    parser.add_argument("--models", nargs="+", default=list(published.SECONDS), help="of torchvision")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--epochs", type=int, help="of each mode; default: 20 on a GPU, 3 on a CPU")
    parser.add_argument("--batch", type=int, default=32, help="pictures of a step")
    parser.add_argument("--px", type=int, help="side of the pictures; default: 224 on a GPU, 64 on a CPU")
    parser.add_argument("--pictures", type=int, help="at most; default: 398 on a GPU, 64 on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    arguments = parser.parse_args()
    device = device_named(arguments.device)
    for key, value in (FULL if device.type == "cuda" else SMALL).items():
        if getattr(arguments, key) is None:
            setattr(arguments, key, value)

    def keep(result: dict[str, Any]) -> None:
        write_json("offload_study", {**result, "device": device_text(device), "environment": measured_on()})
        print(f"{result['rows'][-1]['model']}: done", flush=True)

    result = study(
        arguments.models,
        arguments.modes,
        lambda px: (
            pictures_of_folder(arguments.images, px, arguments.pictures)
            if arguments.images
            else made_pictures(px, arguments.pictures)
        ),
        epochs=arguments.epochs,
        batch=arguments.batch,
        px=arguments.px,
        device=device,
        report=keep,
    )
    text = results(_command(), table({**result, "device": device_text(device)}))
    publish(__file__, text, arguments.write)


if __name__ == "__main__":
    main()
