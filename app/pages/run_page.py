"""The report of a run: one self-contained HTML page made from the files of the run folder and nothing else.

Takes a run folder, finished or not; writes ``report.html`` into it: figures, curves, scores by class and slide, tissue
overlays, settings, environment, and how to run it again.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.pages.html import SCORES, Card, Table, curves, flattened, format_setting, format_value, rendered, score_name
from app.pages.pictures import colour_of, overlays, small_jpeg
from app.pages.results import advice, class_table, forecast_table, slide_table, split_table
from app.pages.run_files import RunFiles, naming_the_summary
from parallel.units import bytes_text
from pipelines.catalog.table import COLUMNS
from pipelines.slides.whole_files import write_text

FIGURES = {
    "parameters": ("Parameters of the model", ""),
    "device": ("Device", ""),
    "precision": ("Precision", ""),
    "steps": ("Optimiser steps", ""),
    "images": ("Tiles trained on", ""),
    "replaced": ("Of these, replaced as they cannot be read", ""),
    "unreadable": ("Validation tiles that cannot be read", ", left out of the scores"),
    "global_batch": ("Tiles per step", ""),
    "microbatches": ("Microbatches per step", ""),
    "shares": ("Microbatches of each group", ""),
    "share_changes": ("Changes of them", ""),
    "stale": ("Updates by staleness: number of updates since the parameters were pulled", ""),
    "tile_px": ("Tile side", " px"),
    "slide_sides": ("Whole slides: smallest, median, largest", " px"),
    "mpp": ("Resolution", " µm/px"),
    "images_per_second": ("Speed, data loading included", " images/s"),
    "images_per_second_no_data": ("Speed, fed from memory", " images/s"),
    "megapixels_per_second": ("Pixels trained on", " Mpx/s"),
    "data_wait_fraction": ("Waiting for data", " of the step time"),
    "idle_fraction": ("Waiting for the gradients of slower ranks, by rank", " of the step time"),
    "cached": ("Tiles read from the cache", ""),
    "cache_damaged": ("Of its tiles, damaged and read anew", ""),
    "cache_full": ("The cache takes no more tiles", ""),
    "reading": ("Reading, seconds of all threads", ""),
    "bubble_fraction": ("Bubble of the last step", ""),
    "peak_memory_bytes": ("Peak memory, by rank", ""),
    "peak_resident_bytes": ("Peak resident set, by rank", ""),
    "device_bytes": ("Tensors on the device at most, by rank", ""),
    "host_bytes": ("Tiles and maps in the host's memory at most, by rank", ""),
    "file_bytes": ("Tiles and maps in files at most, by rank", ""),
    "memory_limit_bytes": ("Memory that a rank may take", ""),
    "sent_bytes": ("Sent in a step, by rank", ""),
    "wall_s": ("Duration", ""),
    "final_loss": ("Training loss, last step", ""),
}
"""Figures of ``summary.json``, or derived from them, by their key: name and unit."""
EXAMPLE_PX = 640
"""Longer side of an example: a tile, or three beside each other."""
HOW = {"status": "Ended", "strategy": "Strategy", "ranks": "Ranks"}
"""Of ``summary.json``, above the figures that a run's own report has."""


def write_report(run: Path) -> Path:
    """Write ``report.html`` into the run folder ``run`` and give its path.

    Raises:
        RunError: ``run`` is no run folder, or a file in it cannot be understood.
        OSError: the page cannot be written.
    """
    with naming_the_summary(run):
        page = render(RunFiles(run))
    return write_text(run / "report.html", page)


def render(files: RunFiles) -> str:
    summary, name = files.summary, files.folder.resolve().name
    status = summary.get("status", "no summary: running, or ended without a word")
    return rendered(
        "run.html.j2",
        files=files,
        name=name,
        status=status,
        look={"completed": "good", "failed": "bad"}.get(status, "fair"),
        what=_what(files),
        cards=_cards(files),
        charts=curves(files.metrics, files.validation, _of_pictures(files)),
        advice=advice(files),
        forecast=forecast_table(files),
        examples=_examples(files),
        legend=_legend(summary),
        classes=class_table(files.predictions),
        slides=slide_table(files.predictions),
        splits=split_table(files.splits, summary.get("classes") or []),
        pictures=overlays(files.folder / "tissue", files.overlays),
        failed=Table(COLUMNS, [[row.get(name, "") for name in COLUMNS] for row in files.failed]),
        figures=figures_of(files),
        scores=scores_of(files),
        commands=_commands(files),
        settings=flattened(files.config),
        environment=flattened(files.environment),
    )


def _what(files: RunFiles) -> list[str]:
    """Model, task, tiles and strategy, as far as they are known."""
    summary, ranks, tile = files.summary, files.summary.get("ranks", 1), files.summary.get("tile_px")
    known = [
        summary.get("model", files.config.get("model")),
        {"classify": "classification", "segment": "segmentation"}.get(summary.get("task", ""), summary.get("task")),
        {None: None, "slide": "whole slides"}.get(tile, f"{tile} px tiles"),
        f"{format_value(summary['mpp'])} µm/px" if summary.get("mpp") else None,
        f"{summary['strategy']} on {ranks} {'rank' if ranks == 1 else 'ranks'}" if summary.get("strategy") else None,
        summary.get("gradients"),
    ]
    return [str(word) for word in known if word]


def _of_pictures(files: RunFiles) -> bool:
    return files.config.get("pictures") == "resize"


def _metrics(files: RunFiles) -> Mapping[str, Any]:
    """Scores of the last validation; of pictures each once, as each is one tile."""
    metrics: Mapping[str, Any] = files.summary.get("metrics") or {}
    return {key: v for key, v in metrics.items() if not (_of_pictures(files) and key.startswith("tile_"))}


def _cards(files: RunFiles) -> list[Card]:
    summary, best = files.summary, files.summary.get("best") or {}
    pictures = _of_pictures(files)
    scores = {key: value for key, value in _metrics(files).items() if value is not None}
    cards = []
    for key in [key for key in SCORES if key in scores][:3]:
        name, note = score_name(key, pictures), "last validation"
        if "balanced accuracy" in name:  # the whole name would break into two lines
            name, note = name.replace("balanced ", ""), "balanced; last validation"
        if best.get("metric") == key and best.get("value") is not None:
            note = f"best {format_value(best['value'])} at step {best.get('step')}"
        cards.append(Card(name, format_value(scores[key]), note=note))
    if not scores and summary.get("final_loss") is not None:
        cards.append(Card("Training loss", format_value(summary["final_loss"]), note="last step; not validated"))
    if summary.get("images_per_second") is not None:
        fed = summary.get("images_per_second_no_data")
        note = f"{format_value(fed, 3)} fed from memory" if fed is not None else "data loading included"
        cards.append(Card("Speed", format_value(summary["images_per_second"], 3), "images/s", note))
    if summary.get("data_wait_fraction") is not None:
        waiting = format_setting("data_wait_fraction", summary["data_wait_fraction"])
        cards.append(Card("Data wait", waiting.removesuffix(" %"), "%", "of the step time"))
    if summary.get("peak_memory_bytes"):
        value, unit = bytes_text(max(summary["peak_memory_bytes"])).split(" ")
        cards.append(Card("Peak memory", value, unit, "largest rank"))
    return cards


def figures_of(files: RunFiles) -> list[tuple[str, str]]:
    """Return names and values of the figures that the run has."""
    known = dict(files.summary)
    for key, part, whole in (
        ("replaced", "tiles_replaced", "images"),
        ("unreadable", "validation_tiles_unreadable", "validation_tiles"),
    ):
        if known.get(part):
            known[key] = f"{known[part]} of {known.get(whole)}"
    if known.get("pixels_per_second") is not None:
        known["megapixels_per_second"] = known["pixels_per_second"] / 1e6
    known |= _cache_figures(known.get("tile_cache"))
    known["bubble_fraction"] = known.get("bubble")
    if known.get("staleness"):
        known["stale"] = ", ".join(f"{stale}: {count}" for stale, count in known["staleness"].items())
    if known.get("tile_px") == "slide":
        del known["tile_px"]
        known["slide_sides"] = ", ".join(f"{w} x {h}" for w, h in known.get("tile_sides_px") or ()) or None
    return [
        (name, (format_value(value) if _counted(key, value) else format_setting(key, value)) + unit)
        for key, (name, unit) in FIGURES.items()
        if (value := known.get(key)) is not None
    ]


def _cache_figures(counts: Mapping[str, Any] | None) -> dict[str, str]:
    """Figures of a tile cache in words; {} of a run without one."""
    if not counts:
        return {}
    words = {
        "cached": f"{counts['hits']} of {counts['hits'] + counts['misses']}, {counts['stored']} added",
        "reading": f"cache {counts['hit_s']:.1f}, slides {counts['slide_s']:.1f}, keeping {counts['store_s']:.1f}",
    }
    if counts["damaged"]:
        words["cache_damaged"] = str(counts["damaged"])
    if counts["full"]:
        words["cache_full"] = counts["full"]
    return words


def _counted(key: str, value: Any) -> bool:
    """A number of things, shown with its digits in groups; not of bytes, which have units."""
    return isinstance(value, int) and not key.endswith("_bytes")


def scores_of(files: RunFiles) -> list[tuple[str, str]]:
    """Return names and values of the last validation, and where the checkpoint is."""
    best, pictures = files.summary.get("best") or {}, _of_pictures(files)
    metrics = _metrics(files).items()
    scores = [(score_name(key, pictures), "undefined" if v is None else format_value(v)) for key, v in metrics]
    if best:
        value = format_setting("", best.get("value"))
        scores.append(
            ("Best checkpoint", f"step {best.get('step')}: {score_name(str(best.get('metric')), pictures)} {value}")
        )
    if files.summary.get("checkpoint"):
        scores.append(("Checkpoint", str(files.summary["checkpoint"])))
    return scores


def _examples(files: RunFiles) -> list[tuple[str, str, str]]:
    """Mark, words and base64 JPEG of each example tile whose picture is there."""
    shown = []
    for example in files.summary.get("examples") or ():
        jpeg = small_jpeg(files.folder / example["picture"], EXAMPLE_PX)
        score, slide = format_value(example["score"], 3), example["slide"]
        if example["prediction"] is None:
            words, mark = f"Dice {score}", ""
        elif example["prediction"] == example["truth"]:
            words, mark = f"{example['truth']}, predicted with {score}", "right"
        else:
            words, mark = f"{example['truth']}, predicted {example['prediction']} with {score}", "wrong"
        if jpeg:
            shown.append((mark, f"{words}; {slide} at {example['l0_x']}, {example['l0_y']}", jpeg))
    return shown


def _legend(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Classes of masks, and their colours on example tiles."""
    classes = (summary.get("classes") or [])[1:] if summary.get("task") == "segment" else []
    return [(name, "rgb({}, {}, {})".format(*colour_of(number))) for number, name in enumerate(classes)]


def _commands(files: RunFiles) -> list[str]:
    """Commands that repeat this run, or continue one that was interrupted."""
    out = str(files.folder)  # not that of config.yaml: the folder may have been moved or copied
    launcher, ranks = files.environment.get("launcher") or {}, files.summary.get("ranks", 1)
    per_node = int((launcher.get("variables") or {}).get("LOCAL_WORLD_SIZE", ranks))
    several = f"--nnodes {-(-ranks // per_node)} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " * (ranks > per_node)
    start = {
        "torchrun": f"torchrun {several}--nproc-per-node {per_node}",
        "mpi": f"mpirun -n {ranks} python",
        "slurm": f"srun -n {ranks} python",
    }.get(str(launcher.get("started_by")), "python")
    begin = f"{start} -m app.train --config {shlex.quote(out + '/config.yaml')}"
    anew = f"{begin} --out {shlex.quote(out + '-again')}"
    if files.summary.get("status") == "completed":
        return [anew]
    return ["# go on from the last checkpoint", f"{begin} --out {shlex.quote(out)} --resume", "# or start anew", anew]


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Write the page that compares ``runs`` to ``out`` and give its path.

    Raises:
        ValueError: one of them is named twice.
        RunError: one of them is no run folder, or a file in it cannot be understood.
        OSError: the page cannot be written.
    """
    if len({run.resolve() for run in runs}) < len(runs):
        raise ValueError(f"a comparison takes each run once; got {' '.join(map(str, runs))}")
    files = [RunFiles(run) for run in runs]
    out.parent.mkdir(parents=True, exist_ok=True)
    headers = ("", *names_of(runs))
    folder = os.path.commonpath([run.resolve() for run in runs])
    page = rendered(
        "comparison.html.j2",
        runs=len(runs),
        settings=Table(headers, _differing([run.config for run in files])),
        figures=Table(headers, _rows([_figures(run) for run in files])),
        curves=[f"tensorboard --logdir {shlex.quote(folder)}"],
        environment=Table(headers, _differing([run.environment for run in files])),
    )
    return write_text(out, page)


def names_of(runs: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that tell all of them apart."""
    whole = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(names):
            break
    return names


def _figures(run: RunFiles) -> dict[str, str]:
    known = {name: str(run.summary[key]) for key, name in HOW.items() if run.summary.get(key) is not None}
    with naming_the_summary(run.folder):
        return {**known, **dict(figures_of(run)), **dict(scores_of(run))}


def _rows(values: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """A row for each name that a run has a value of; a value that a run does not have is a dash."""
    names = dict.fromkeys(itertools.chain.from_iterable(values))
    return [[name, *(run.get(name, "–") for run in values)] for name in names]


def _differing(values: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of those values that are not the same in all runs, but for the folder of a run."""
    rows = _rows([dict(flattened(run)) for run in values])
    return [row for row in rows if row[0] != "out" and len(set(row[1:])) > 1]
