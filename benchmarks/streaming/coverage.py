"""Which models can be computed box by box down to their pooling: torchvision's classifiers, and 50 CNNs of timm.

Takes nothing; gives ``results/coverage.json`` beside it and the tables of the README. Models are built without
numbers, traced (without the comparison of graph and model that a run makes), and their region is read at one size:
seconds a model. A model counts where all that leaves its region is sums, or the fixed number of cells that it is pooled
to; of the others the layer and the reason are told.

    python -m benchmarks.streaming.coverage [--only NAME ...] [--again]
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.machine import measured_on
from benchmarks.model_zoo.zoo import TIMM
from benchmarks.results import markdown_table, parser_of, results, write_results
from models.external import freeze_norms
from models.registry import build_model
from parallel.graph.partition import Partition
from parallel.streaming.read_region import read_region
from parallel.trace.cut import cut_stage
from parallel.trace.trace import Traced, trace

OUT = Path(__file__).with_name("results")
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


def build(name: str) -> nn.Module:
    """Return the model, without numbers where it is built so."""
    try:
        with torch.device("meta"):
            return build_model(name, classes=2)
    except NotImplementedError:  # it looks at numbers while it is built
        return build_model(name, classes=2)


def traced_at(model: nn.Module) -> tuple[Traced, int]:
    """Return the model's graphs, and the side of the tile that they are of."""
    try:
        return trace(model, (2, 3, TILE, TILE), torch.float32), TILE
    except ValueError:
        return trace(model, (2, 3, FIXED_TILE, FIXED_TILE), torch.float32), FIXED_TILE


def refusals(name: str) -> tuple[str, str]:
    """Return the layer at which boxes end and why, with frozen norms and as the model is; "" where they get to the
    pooling."""
    model = build(name).train()
    traced, tile = traced_at(model)
    own = _refusal(traced, tile)
    if any(isinstance(part, _BatchNorm) and part.track_running_stats for part in model.modules()):
        freeze_norms(model, name)
    return _refusal(traced, tile), own


def _refusal(traced: Traced, tile: int) -> str:
    whole = cut_stage(traced, Partition(traced.graph, (0,)), 0).train()
    device = next(traced.model.parameters()).device
    image = torch.zeros((), device=device).expand(2, 3, tile, tile)
    try:
        region = read_region(whole, list(traced.training.graph.nodes), {whole.inputs[0]: image})
    except ValueError as fault:
        return str(fault)
    maps = {name: region.sides[name] for name in region.leaving if name in region.dims}
    if all(max(sides) <= CELLS for sides in maps.values()):
        return ""
    return ": ".join(region.ends_at) if region.ends_at else f"its output {', '.join(maps)} has rows"


def measure(name: str) -> dict[str, Any]:
    """Return the refusal of a model with frozen norms and as it is, "" for none."""
    row: dict[str, Any] = {"model": name}
    start = time.perf_counter()
    try:
        row["frozen"], row["own"] = refusals(name)
    except ValueError as fault:  # it cannot be traced
        row["frozen"] = row["own"] = str(fault)
    row["seconds"] = time.perf_counter() - start
    print(f"{name:45} {row['seconds']:5.1f} s  {row['frozen'] or 'yes':.100}", flush=True)
    return row


def tables(rows: list[dict[str, Any]]) -> str:
    """Return the shares, and a line for each model that is refused."""
    shares = []
    for library in ("torchvision", "timm"):
        of_library = [row for row in rows if row["model"].startswith(library)]
        if of_library:
            counts = [sum(not row[norm] for row in of_library) for norm in ("frozen", "own")]
            shares.append([library, str(len(of_library)), *(f"{n} ({n / len(of_library):.0%})" for n in counts)])
    refused = [[row["model"], row["frozen"] or row["own"]] for row in rows if row["frozen"] or row["own"]]
    header = ["of", "models", "to their pooling, `--norm frozen`", "with their own norms, in training"]
    return "\n".join([markdown_table(header, shares), markdown_table(["refused", "layer and reason"], refused)])


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models, as --model takes them; no README is written")
    parser.add_argument("--again", action="store_true", help="also models that an earlier call looked at")
    asked = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    names = asked.only or [*torchvision_classifiers(), *(f"timm:{name}" for name in TIMM)]
    path = OUT / "coverage.json"
    known = {}
    if path.exists() and not asked.again:
        known = {row["model"]: row for row in json.loads(path.read_text())["rows"]}
    for name in names:
        if name not in known:
            known[name] = measure(name)
            OUT.mkdir(exist_ok=True)
            result = {"environment": measured_on(), "tile_px": TILE, "rows": list(known.values())}
            path.write_text(json.dumps(result, indent=1) + "\n")
    rows = [known[name] for name in names]
    streamed = sum(not row["frozen"] for row in rows)
    print(f"{streamed} of {len(rows)} models are computed box by box to their pooling; asked {ASKED:.0%}")
    reasons = Counter(row["frozen"].partition(": ")[2][:90] for row in rows if row["frozen"])
    print("\n".join(f"{count:3} {reason}" for reason, count in reasons.most_common()))
    if not asked.only:
        write_results(README, results(COMMAND, tables(rows)), "coverage")
    return 0 if streamed >= ASKED * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
