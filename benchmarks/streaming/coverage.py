"""Which models can be computed box by box down to their pooling: torchvision's classifiers, and 50 CNNs of timm.

Takes nothing; gives ``bench-data/streaming/coverage.json`` and the tables of the README. Models are built without
numbers, traced, and their region is read at one size: seconds a model. A model counts where all that leaves its region
is sums, or the fixed number of cells that it is pooled to; of the others the layer and the reason are told.

    python -m benchmarks.streaming.coverage [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.machine import measured_on
from benchmarks.model_zoo.zoo import TIMM
from benchmarks.results import markdown_table, results, write_results
from models.blocks import Norm
from models.registry import build_model
from parallel.graph.partition import Partition
from parallel.streaming.region import read_region
from parallel.trace.cut import cut_stage
from parallel.trace.stage_module import WholeModule
from parallel.trace.trace_alone import trace_as_it_runs

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "streaming"
README = Path(__file__).with_name("README.md")
COMMAND = "python -m benchmarks.streaming.coverage"

TILE = 288
"""px: 9 px after a stride of 32, more than the 7 cells that networks of 2014 pool to."""
FIXED_TILE = 224
"""px, of models that take no other."""
CELLS = 7
"""Rows that a model may pool to and still count."""
ASKED = 0.80


def torchvision_classifiers() -> list[str]:
    """Return all of them, as ``--model`` takes them."""
    from torchvision import models

    return [f"torchvision:{name}" for name in models.list_models(module=models)]


def build(name: str, norm: Norm) -> nn.Module:
    """Return the model, without numbers where it is built so; as it is where it has no norms to freeze."""
    try:
        with torch.device("meta"):
            return build_model(name, classes=2, norm=norm)
    except NotImplementedError:  # it looks at numbers while it is built
        return build_model(name, classes=2, norm=norm)
    except ValueError as fault:
        if "has no BatchNorm" not in str(fault):
            raise
        return build(name, "batch")


def refusal(name: str, norm: Norm) -> str:
    """Return the layer at which boxes end and why; "" where they get to the pooling."""
    model, tile = build(name, norm).train(), TILE
    try:
        traced = trace_as_it_runs(model, (2, 3, tile, tile), torch.float32)
    except ValueError:
        tile = FIXED_TILE
        traced = trace_as_it_runs(model, (2, 3, tile, tile), torch.float32)
    whole = cut_stage(traced, Partition(traced.graph, (0,)), 0, (), WholeModule).train()
    device = next(model.parameters()).device
    image = torch.zeros((), device=device).expand(2, 3, tile, tile)
    region = read_region(whole, list(traced.training.graph.nodes), {whole.inputs[0]: image})
    maps = {name: region.sides[name] for name in region.leaving if name in region.dims}
    if all(max(sides) <= CELLS for sides in maps.values()):
        return ""
    return ": ".join(region.ends_at) if region.ends_at else f"its output {', '.join(maps)} has rows"


def measure(name: str) -> dict[str, Any]:
    """Return the refusal of a model with frozen norms and as it is, "" for none."""
    row: dict[str, Any] = {"model": name}
    start = time.perf_counter()
    for norm in ("frozen", "batch"):
        try:
            row[norm] = refusal(name, norm)  # type: ignore[arg-type]
        except Exception as fault:  # each refusal is a result
            row[norm] = f"{type(fault).__name__ if not isinstance(fault, ValueError) else 'refused'}: {fault}"
    row["seconds"] = time.perf_counter() - start
    print(f"{name:45} {row['seconds']:5.1f} s  {row['frozen'] or 'yes':.100}", flush=True)
    return row


def tables(rows: list[dict[str, Any]]) -> str:
    """Return the shares, and a line for each model that is refused."""
    shares = []
    for library in ("torchvision", "timm"):
        of_library = [row for row in rows if row["model"].startswith(library)]
        if of_library:
            counts = [sum(not row[norm] for row in of_library) for norm in ("frozen", "batch")]
            shares.append([library, str(len(of_library)), *(f"{n} ({n / len(of_library):.0%})" for n in counts)])
    refused = [[row["model"], row["frozen"] or row["batch"]] for row in rows if row["frozen"] or row["batch"]]
    header = ["of", "models", "to their pooling, `--norm frozen`", "with their own norms, in training"]
    return "\n".join([markdown_table(header, shares), markdown_table(["refused", "layer and reason"], refused)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models, as --model takes them; no README is written")
    asked = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    names = asked.only or [*torchvision_classifiers(), *(f"timm:{name}" for name in TIMM)]
    rows = [measure(name) for name in names]
    streamed = sum(not row["frozen"] for row in rows)
    print(f"{streamed} of {len(rows)} models are computed box by box to their pooling; asked {ASKED:.0%}")
    reasons = Counter(row["frozen"].partition(": ")[2][:90] for row in rows if row["frozen"])
    print("\n".join(f"{count:3} {reason}" for reason, count in reasons.most_common()))
    if not asked.only:
        OUT.mkdir(parents=True, exist_ok=True)
        result = {"environment": measured_on(), "tile_px": TILE, "rows": rows}
        (OUT / "coverage.json").write_text(json.dumps(result, indent=1) + "\n")
        write_results(README, results(COMMAND, tables(rows)), "coverage")
    return 0 if streamed >= ASKED * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
