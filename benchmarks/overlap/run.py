"""Which of the settings that run something beside the computation help, which help together, and which fight.

    python -m benchmarks.overlap.run [--models resnet18] [--repeats 2] [--steps 10] [--knobs NAME ...] [--spare]
        [--write]

Runs ``app.train`` on real slides with each setting: on as many data-parallel ranks as there are cores, or with
``--spare`` on one rank of one thread, which leaves the other cores to what runs beside it, as a GPU would. Runs that
were made before are kept in ``bench-data/overlap``. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from app.benchmark.case import Case
from app.benchmark.trial import Trial, run_trial
from app.settings.run import DataSettings, RunConfig, SplitSettings
from app.training.dataset import prepare
from app.training.run_folder import RunFolder
from benchmarks.overlap.findings import COLUMNS, cells, findings, rows_of
from benchmarks.overlap.settings import KNOBS, Setting, arguments, label, settings_of
from benchmarks.results import markdown_table, results, write_results
from demo.run import collect_slides
from pipelines.tiles.index_settings import IndexSettings

OUT = Path(__file__).parents[2] / "bench-data" / "overlap"
README = Path(__file__).with_name("README.md")
RANKS, TILE, BATCH, EVERY, LONGEST_S = os.cpu_count() or 1, 512, 8, 5, 3600.0
SHARED = {"min-tissue": "0.1", "validation": "0.0", "checkpoint-every": str(EVERY)}


def measure(model: str, asked: argparse.Namespace) -> Iterator[str]:
    """Run every setting of a model, all of them once before any a second time; give a paragraph, a table and what can
    be said of it."""
    if not (OUT / "slides" / "labels.csv").exists():
        collect_slides(OUT)
    tiles = OUT / "tiles"
    tiles.mkdir(exist_ok=True)
    index = IndexSettings(tile=TILE, min_tissue=float(SHARED["min-tissue"]))
    prepare(RunConfig(DataSettings(OUT / "slides"), index, SplitSettings(0.0), out=tiles), RunFolder(tiles), print)
    ranks = 1 if asked.spare else RANKS
    case = Case("ddp" if ranks > 1 else "single", (), ranks, TILE, BATCH, 2 * ranks)
    shared = ["--slides", str(OUT / "slides"), "--model", model, "--steps", str(asked.steps)]
    shared += ["--developer", "twin-steps=0"]
    shared += [word for name, value in SHARED.items() for word in (f"--{name}", value)]
    # There are no buckets where no gradients are summed.
    knobs = [k for k in KNOBS if k.name in asked.knobs and (ranks > 1 or k.name != "gradient-buckets")]
    trials: dict[Setting, list[Trial]] = {on: [] for on in settings_of(knobs)}
    for repeat in range(asked.repeats):
        for on, done in trials.items():
            folder = OUT / f"{model}-{ranks}x-{asked.steps}" / label(on).replace(" ", "") / str(repeat + 1)
            if not (folder / "trial.json").exists():
                run_trial(case, [*shared, *arguments(knobs, on)], tiles, folder, LONGEST_S)
            done.append(Trial.load(folder / "trial.json"))
            print(f"run {repeat + 1}, {label(on)}: {done[-1].status} {done[-1].reason}", flush=True)
    rows = rows_of({on: _speeds(done) for on, done in trials.items()})
    minutes = sum(trial.wall_s for done in trials.values() for trial in done) / 60
    on_ranks = f"{ranks} ranks of one thread under ddp" if ranks > 1 else "one rank of one thread"
    yield (
        f"{model}, {on_ranks}, {TILE} px, batch {BATCH}, a checkpoint every {EVERY} of {asked.steps} steps, "
        f"{asked.repeats} runs of each; {minutes:.0f} min.\n"
    )
    yield markdown_table(COLUMNS, map(cells, rows))
    yield "".join(f"- {finding}\n" for finding in findings(rows))


def _speeds(trials: list[Trial]) -> list[float]:
    """Images/s with what came between steps, as checkpoints count; none where a run failed."""
    if any(trial.status != "ok" for trial in trials):
        return []
    return [trial.summary["images_per_second_sustained"] for trial in trials]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    names = [knob.name for knob in KNOBS]
    parser.add_argument("--knobs", nargs="+", choices=names, default=names)
    parser.add_argument("--spare", action="store_true", help="one rank of one thread, with the other cores idle")
    parser.add_argument("--write", action="store_true", help="write the tables of README.md")
    asked = parser.parse_args()
    if asked.spare:
        os.environ["OMP_NUM_THREADS"] = "1"
    written = [part for model in asked.models for part in measure(model, asked)]
    text = results(f"python -m benchmarks.overlap.run{' --spare' if asked.spare else ''} --write", *written)
    print(text)
    if asked.write:
        write_results(README, text, "spare cores" if asked.spare else "busy cores")


if __name__ == "__main__":
    main()
