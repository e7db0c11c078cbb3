"""Which models can be computed box by box down to their pooling: torchvision's classifiers, and 50 CNNs of timm.

Takes nothing; gives the tables of the README. Models are built without numbers and traced, and their region is read at
one size: seconds a model. A model counts if all that leaves its region is sums, or the fixed number of cells that it is
pooled to; of the others the layer and the reason are given. Exit code 1 if fewer models count than asked.

    python -m benchmarks.streaming.coverage [--only NAME ... | --write]
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.exactness.zoo import TIMM
from benchmarks.results import finish, markdown_table, measured_on, parser_of, publish, results, write_json
from models.external import freeze_norms
from models.registry import build_model
from parallel.graph.partition import Partition
from parallel.streaming.read_region import read_region
from parallel.trace.cut import cut_stage
from parallel.trace.trace import Traced, trace

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


def traced_at(model: nn.Module) -> tuple[Traced, int]:
    """Return the model's graphs, and the side of the tile that they are of."""
    try:
        return trace(model, (2, 3, TILE, TILE), torch.float32), TILE
    except ValueError:
        return trace(model, (2, 3, FIXED_TILE, FIXED_TILE), torch.float32), FIXED_TILE


def refusals(name: str) -> tuple[str, str]:
    """Return the layer at which boxes end and why, with frozen norms and as the model is; "" where they get to the
    pooling."""
    try:
        with torch.device("meta"):
            model: nn.Module = build_model(name, classes=2)
    except NotImplementedError:  # it looks at numbers while it is built
        model = build_model(name, classes=2)
    model.train()
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
    maps = {name: region.sides[name] for name in region.live_out if name in region.dims}
    if all(max(sides) <= CELLS for sides in maps.values()):
        return ""
    return ": ".join(region.ends_at) if region.ends_at else f"its output {', '.join(maps)} has rows"


def measure(name: str) -> dict[str, Any]:
    """Return the refusal of a model with frozen norms and as it is, "" for none."""
    try:
        frozen, own = refusals(name)
    except ValueError as fault:  # it cannot be traced
        frozen = own = str(fault)
    print(f"{name:45} {frozen or 'yes':.100}", flush=True)
    return {"model": name, "frozen": frozen, "own": own}


def tables(rows: list[dict[str, Any]]) -> str:
    """Return the shares, and a line for each model that is refused."""
    shares = []
    for library in ("torchvision", "timm"):
        if own := [row for row in rows if row["model"].startswith(library)]:
            counts = [sum(not row[norm] for row in own) for norm in ("frozen", "own")]
            shares.append([library, str(len(own)), *(f"{n} ({n / len(own):.0%})" for n in counts)])
    refused = [[row["model"], row["frozen"] or row["own"]] for row in rows if row["frozen"] or row["own"]]
    header = ["of", "models", "to their pooling, `--norm frozen`", "with their own norms, in training"]
    return "\n".join([markdown_table(header, shares), markdown_table(["refused", "layer and reason"], refused)])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models, as --model takes them")
    asked = parser.parse_args()
    if asked.write and asked.only:
        parser.error("--write replaces the whole table: leave out --only")
    warnings.simplefilter("ignore")
    names = asked.only or [*torchvision_classifiers(), *(f"timm:{name}" for name in TIMM)]
    rows = [measure(name) for name in names]
    write_json("streaming_coverage", {"rows": rows, "tile_px": TILE, "environment": measured_on()})
    text = results(tables(rows))
    publish(__file__, text, asked.write, "coverage")
    share = sum(not row["frozen"] for row in rows) / len(rows)
    finish(() if share >= ASKED else [f"{share:.0%} of models get to their pooling, asked {ASKED:.0%}"])


if __name__ == "__main__":
    main()
