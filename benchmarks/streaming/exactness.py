"""Whether models computed box by box give what the plain step gives: loss, every gradient, running statistics.

Takes nothing; gives ``results/exactness.json`` beside it and the table of the README. A cell is one model, with its
norms in training or frozen, in one precision, in boxes of one side: a step of ``parallel.streaming.streamed`` beside
the same step of the plain model, with the same random numbers for dropout and stochastic depth. Tiles are small, and
odd where the model takes odd ones, so that boxes are uneven. Allowed is 1e-10 in float64. In float32 a cell above 1e-5
is called rounding if the same cell passes in float64: a value that rounding moves across the kink of a ReLU changes a
tenth of a gradient of small maps. In float32 with batch norm in training most cells are such, so that only those are
computed that are asked for (``--chaotic``).

    python -m benchmarks.streaming.exactness [--only NAME ...] [--again] [--chaotic]
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from app.training.exactness import Errors, StepOutcome, compare
from app.training.projected_error import ProjectedError
from benchmarks.in_boxes import BoxedModel, planned_regions, streamed
from benchmarks.machine import measured_on
from benchmarks.results import markdown_table, parser_of, results, write_results
from models.blocks import Norm
from models.registry import build_model
from parallel.streaming.box_sums import BoxSums
from parallel.team.boxed_nodes import PlannedRegion
from parallel.trace.patched_kernels import patch_kernels

OUT = Path(__file__).with_name("results")
README = Path(__file__).with_name("README.md")
COMMAND = "python -m benchmarks.streaming.exactness"

CLASSES, SEED, TILES = 3, 11, 2
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Subject:
    """A model of the table.

    Attributes:
        model: as for ``--model``.
        side: (rows, columns) of its tiles, px.
        boxes: their sides, px.
        norms: as for ``--norm``.
    """

    model: str
    side: tuple[int, int]
    boxes: tuple[int, int, int]
    norms: tuple[Norm, ...] = ("frozen", "batch")


SUBJECTS = (
    Subject("resnet18", (131, 101), (96, 64, 40)),
    Subject("resnet50", (99, 77), (64, 48, 33)),
    Subject("resnet110_v2", (49, 37), (32, 24, 16)),
    Subject("unet", (96, 80), (64, 48, 32)),
    Subject("unet(5,16)", (96, 64), (64, 48, 32)),
    Subject("amoebanet(6,190)", (99, 77), (64, 48, 33)),
    Subject("torchvision:densenet121", (99, 77), (64, 48, 33)),
    Subject("torchvision:inception_v3", (107, 91), (75, 60, 48)),
    Subject("torchvision:googlenet", (131, 101), (96, 64, 40)),
    Subject("torchvision:mobilenet_v3_large", (99, 77), (64, 48, 33)),
    Subject("torchvision:efficientnet_b0", (99, 77), (64, 48, 33)),
    Subject("torchvision:convnext_tiny", (99, 77), (64, 48, 33), ("batch",)),
    Subject("torchvision:deeplabv3_resnet50", (99, 77), (64, 48, 33)),
)
"""ConvNeXt has layer norms alone."""


@dataclass(frozen=True)
class Row:
    """What became of a cell.

    Attributes:
        status: passed; rounding: passed in float64 alone; inexact; refused: before the first step, with the reason.
        loss, gradients, statistics: largest relative errors.
        note: why not passed, or where the boxes end before the pooling.
    """

    model: str
    norm: str
    dtype: str
    box: int
    status: str
    seconds: float
    loss: float = 0.0
    gradients: float = 0.0
    statistics: float = 0.0
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.model, self.norm, self.dtype, self.box


def build(subject: Subject, norm: Norm, dtype: torch.dtype) -> nn.Module:
    """Return the model in training; norms have the statistics of its tiles, a tenth off, as trained ones would."""
    torch.manual_seed(SEED)
    learning = build_model(subject.model, classes=CLASSES).double().eval()  # a dropped channel has no variance
    for part in learning.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.train().momentum = 1.0
    with torch.no_grad():
        learning(images_of(subject, torch.float64))
        for part in learning.modules():
            if isinstance(part, nn.BatchNorm2d) and part.running_mean is not None and part.running_var is not None:
                part.running_mean += 0.1 * part.running_var.sqrt() * torch.rand_like(part.running_mean)
                part.running_var *= 1 + 0.1 * torch.rand_like(part.running_var)
    model = build_model(subject.model, classes=CLASSES, norm=norm)
    model.load_state_dict(learning.state_dict())
    return model.to(dtype).train()


def images_of(subject: Subject, dtype: torch.dtype) -> Tensor:
    """Return random tiles."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (TILES, 3, *subject.side)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def step(module: nn.Module, images: Tensor) -> StepOutcome:
    """Return loss, gradients and running statistics of one forward and backward pass; in boxes the loss is summed over
    them too, where it is of px."""
    generator, error = torch.Generator().manual_seed(SEED), ProjectedError()
    targets = torch.randn((TILES, *images.shape[2:]), generator=generator, dtype=torch.float64).to(images.dtype)
    torch.manual_seed(SEED)
    if isinstance(module, BoxedModel):
        sums = BoxSums(error.sums, targets)
        loss = error.value(module(images, sums=sums), sums.pixels)
    else:
        loss = error(module(images), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return StepOutcome(
        float(loss.detach()), gradients, {"model": dict(module.named_buffers()), "optimizer": {"state": {}}}
    )


def measure(subject: Subject, norm: Norm, dtype: str, wanted: Callable[[int], bool]) -> Iterator[Row]:
    """Yield a row for each box side that is wanted; the plain step is computed once for all."""
    boxes = [box for box in subject.boxes if wanted(box)]
    if not boxes:
        return
    fresh, images, plain = _plain(subject, norm, dtype)
    for box in boxes:
        start = time.perf_counter()
        key = subject.model, norm, dtype, box
        try:
            ours = streamed(copy.deepcopy(fresh), box, tuple(images.shape))
        except ValueError as fault:
            yield Row(*key, "refused", time.perf_counter() - start, note=str(fault))
            continue
        errors = _compared(plain, step(ours, images), fresh)
        status, note = "passed", _ends(ours, tuple(images.shape))
        if not errors.passed:
            status, note = "inexact", " ".join(errors.excesses[0]) if errors.excesses else "loss"
        if status == "inexact" and dtype == "float32":
            wide, wide_images, expected = _plain(subject, norm, "float64")
            found = step(streamed(wide, box, tuple(images.shape)), wide_images)
            in_float64 = _compared(expected, found, fresh)
            if in_float64.passed:
                status, note = "rounding", f"{in_float64.largest:.0e} in float64"
        kinds = (errors.of_kind(kind) for kind in ("gradients", "statistics"))
        yield Row(*key, status, time.perf_counter() - start, errors.loss, *kinds, note)
        del ours
        gc.collect()


def _plain(subject: Subject, norm: Norm, dtype: str) -> tuple[nn.Module, Tensor, StepOutcome]:
    """Return the model, its images, and the plain step."""
    fresh, images = build(subject, norm, DTYPES[dtype]), images_of(subject, DTYPES[dtype])
    return fresh, images, step(copy.deepcopy(fresh), images)


def _compared(plain: StepOutcome, found: StepOutcome, module: nn.Module) -> Errors:
    return compare(plain, [found], [name for name, _ in module.named_parameters()])


def _ends(module: BoxedModel, shape: tuple[int, ...]) -> str:
    """Return the layer before the pooling that boxes end at, "" where they get there."""
    plan = planned_regions(module, shape)[-1]
    assert isinstance(plan, PlannedRegion)
    region = plan.run.region
    whole = [name for name in region.leaving if name in region.dims]
    return f"boxes end at {': '.join(region.ends_at)}" if whole and region.ends_at else ""


def table(rows: list[Row], subjects: Sequence[Subject] = SUBJECTS) -> str:
    """Return a line for each model and norm: largest error of each precision and kind over its boxes."""
    lines = []
    for model, norm in dict.fromkeys((row.model, row.norm) for row in rows):
        of_model = [row for row in rows if (row.model, row.norm) == (model, norm)]
        subject = next(subject for subject in subjects if subject.model == model)
        cells = [_cell([row for row in of_model if row.dtype == dtype]) for dtype in DTYPES]
        notes = "; ".join(dict.fromkeys(row.note for row in of_model if row.note))
        tile = "x".join(map(str, subject.side))
        lines.append([model, norm, tile, ", ".join(map(str, subject.boxes)), *cells, notes])
    header = ["model", "norm", "tile px", "boxes px", "float64: loss, gradients, statistics", "float32", "note"]
    counts = {
        status: sum(row.status == status for row in rows) for status in ("passed", "rounding", "refused", "inexact")
    }
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    return markdown_table(header, lines) + f"\n{len(rows)} cells: {summary}.\n"


def _cell(rows: list[Row]) -> str:
    """Return the largest errors of a model in one precision, and how many of its cells passed."""
    if not rows:
        return ""
    statuses = [row.status for row in rows]
    if set(statuses) == {"refused"}:
        return "refused"
    errors = ", ".join(f"{max(getattr(row, kind) for row in rows):.0e}" for kind in ("loss", "gradients", "statistics"))
    return f"{errors} ({statuses.count('passed')} of {len(rows)})"


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models whose names have one of these words")
    parser.add_argument("--chaotic", action="store_true", help="float32 with batch norm in training, too")
    parser.add_argument("--again", action="store_true", help="also cells that an earlier call computed")
    asked = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    patch_kernels()
    path = OUT / "exactness.json"
    rows: dict[tuple[str, str, str, int], Row] = {}
    if path.exists() and not asked.again:
        rows = {row.key: row for row in (Row(**fields) for fields in json.loads(path.read_text())["rows"])}
    subjects = [s for s in SUBJECTS if not asked.only or any(word in s.model for word in asked.only)]
    for dtype, k in [(dtype, k) for dtype in DTYPES for k in range(2)]:
        for subject in (s for s in subjects if k < len(s.norms)):
            norm = subject.norms[k]
            if dtype == "float32" and k and not asked.chaotic:
                continue
            known = {box for *rest, box in rows if tuple(rest) == (subject.model, norm, dtype)}
            for row in measure(subject, norm, dtype, lambda box, known=known: box not in known):  # type: ignore[misc]
                rows[row.key] = row
                print(
                    f"{row.model:32} {row.norm:7} {row.dtype} {row.box:4} px {row.status:8} {row.loss:8.1e} "
                    f"{row.gradients:8.1e} {row.statistics:8.1e} {row.seconds:6.1f} s {row.note:.90}",
                    flush=True,
                )
                OUT.mkdir(exist_ok=True)
                result = {"environment": measured_on(), "rows": [asdict(each) for each in rows.values()]}
                path.write_text(json.dumps(result, indent=1) + "\n")
    ordered = [row for s in SUBJECTS for row in rows.values() if row.model == s.model]
    print(table(ordered))
    if not asked.only:
        write_results(README, results(COMMAND, table(ordered)), "exactness")
    return int(any(row.status == "inexact" for row in ordered))


if __name__ == "__main__":
    sys.exit(main())
