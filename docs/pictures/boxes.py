"""Draw boxes.svg: ``PYTHONPATH=. python docs/pictures/boxes.py``.

Above, how the parts of ResNet-50 with frozen norms are cut into boxes, and what a box of each fetches; below, the first
phases of ResNet-18 with batch norm in training. Both as ``--stream 512`` plans them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.in_boxes import planned_regions, streamed
from docs.pictures.svg_style import style, svg_text
from models.registry import build_model
from parallel.streaming.part_plan import PartPlan
from parallel.team.boxed_nodes import PlannedRegion
from parallel.team.region_run import Phase, RegionRun
from parallel.units import bytes_text

FILE = Path(__file__).with_suffix(".svg")
TILE, BOX = 4096, 512
MARGIN, SIDE, GAP = 24.0, 216.0, 34.0
WIDTH, TOP, PHASES_TOP = 2 * MARGIN + 4 * SIDE + 3 * GAP, 164.0, 546.0
SHOWN, CARD, ROW = 4, 214.0, 19.0
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
SUMS = {"moments": "mean, squared differences"}


def plan(model: str, norm: str) -> RegionRun:
    """Return how ``model`` is computed in boxes."""
    module = build_model(model, classes=2, norm=norm)  # type: ignore[arg-type]
    shape = (1, 3, TILE, TILE)
    (region,) = planned_regions(streamed(module, BOX, shape), shape)
    assert isinstance(region, PlannedRegion)
    return region.run


def picture() -> str:
    """Return the text of the file."""
    frozen, batch = plan("resnet50", "frozen"), plan("resnet18", "batch")
    whole = (WIDTH, PHASES_TOP + 272)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]:g} {whole[1]:g}" font-family="{FONT}">',
        f'<style>{style()}</style><rect class="paper" width="100%" height="100%"/>',
        svg_text(MARGIN, 38, f"A tile of {TILE:,} px in boxes", 19, bold=True),
        svg_text(
            MARGIN,
            62,
            "ResNet-50, frozen norms: the parts of the model, one after the other; maps between them lie on the host.",
            14,
            "pale",
        ),
        svg_text(
            MARGIN,
            80,
            "A box gives the dark square, and fetches the rim around it, too. Deep maps are small: boxes cover more.",
            14,
            "pale",
        ),
    ]
    (phase,) = frozen.phases
    for number, part in enumerate(phase.parts):
        lines += _part(frozen, part, number, MARGIN + number * (SIDE + GAP))
    phases = len(batch.phases)
    lines += [
        svg_text(MARGIN, PHASES_TOP - 44, f"Batch norm in training: {phases} phases", 19, bold=True),
        svg_text(
            MARGIN,
            PHASES_TOP - 20,
            "ResNet-18: a sum over all boxes ends a phase; what comes after it reads stored maps. The first four:",
            14,
            "pale",
        ),
    ]
    for number, each in enumerate(batch.phases[:SHOWN]):
        lines += _phase(batch, each, number)
    return "\n".join([*lines, "</svg>\n"])


def _part(run: RegionRun, part: PartPlan, number: int, left: float) -> Iterator[str]:
    """A tile with the boxes of a part, one of them with what it fetches."""
    region, first = run.region, part.live_steps[0]
    row, column = len(part.rows) // 2, len(part.columns) // 2
    yield svg_text(left, TOP - 44, f"{number + 1}. {_name(part.steps[0].name)}", 14, bold=True)
    yield svg_text(left, TOP - 26, f"    to {_name(part.steps[-1].name)}", 14, bold=True)
    yield svg_text(left, TOP - 8, f"{len(part.rows)} x {len(part.columns)} boxes", 13, "pale")
    yield f'<rect class="track edge" x="{left:.1f}" y="{TOP:.1f}" width="{SIDE:.1f}" height="{SIDE:.1f}"/>'
    source = part.entering[0]
    scale = TILE / region.sides[source][0]
    rows, columns = part.rows[row][source], part.columns[column][source]
    yield _square(left, columns, rows, region.sides[source], f"s{number}", 'stroke-width="1.5"')
    own_rows, own_columns = part.box(first.name, row, column)
    yield _square(left, own_columns, own_rows, first.sides, f"f{number}", "")
    for axis in (0, 1):
        for span in part.box_spans[first.name][axis][1:]:
            at = SIDE * span.start / first.sides[axis]
            where = f"M{left:.1f} {TOP + at:.1f}h{SIDE:.1f}" if axis == 0 else f"M{left + at:.1f} {TOP:.1f}v{SIDE:.1f}"
            yield f'<path class="bracket" stroke-width="0.6" d="{where}"/>'
    low = TOP + SIDE
    px = f"{rows.size:,} rows of {_name(source)}" if number else f"{rows.size:,} px of the image"
    yield svg_text(left, low + 20, f"fetches {px}", 13)
    if number:
        yield svg_text(left, low + 38, f"({rows.size * scale:,.0f} px of the tile)", 13, "pale")
    if first.sums:
        yield svg_text(left, low + 74, "here the region ends: fc is computed whole", 13, "pale")
    gives = first.value_bytes
    text = "gives a sum: the pooled features" if first.sums else f"stores {_name(first.name)}, {bytes_text(gives)}"
    yield svg_text(left, low + 56, text, 13)


def _square(
    left: float, columns: tuple[int, int], rows: tuple[int, int], sides: tuple[int, int], css: str, more: str
) -> str:
    high, wide = (SIDE / side for side in sides)
    x, y = left + columns[0] * wide, TOP + rows[0] * high
    size = f'width="{(columns[1] - columns[0]) * wide:.1f}" height="{(rows[1] - rows[0]) * high:.1f}"'
    return f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" {size} {more}/>'


def _phase(run: RegionRun, phase: Phase, number: int) -> Iterator[str]:
    """A card: what a phase reads, computes, stores and sums."""
    step = (WIDTH - 2 * MARGIN - CARD) / (SHOWN - 1)
    left, wide = MARGIN + number * step, CARD
    entering = dict.fromkeys(name for part in phase.parts for name in part.entering)
    steps = [each for part in phase.parts for each in part.steps if not each.sums]
    given = [each for part in phase.parts for each in part.live_steps]
    stored = [each for each in given if not each.sums]
    words = [("reads", [_name(name) for name in entering], "ink")]
    words.append(("computes", [_name(each.name) for each in steps], "ink"))
    words.append(("stores", [f"{_name(s.name)}, {bytes_text(s.value_bytes)}" for s in stored], "ink"))
    words.append(("sums", [SUMS[s.name.split("~")[1]] for s in given if s.sums], "f2"))
    high = 254.0
    yield f'<rect class="s7" x="{left:.1f}" y="{PHASES_TOP:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="6"/>'
    y = PHASES_TOP + 24
    yield svg_text(left + 12, y, f"phase {number + 1}", 14, bold=True)
    for verb, names, ink in words:
        if not names:
            continue
        y += ROW
        yield svg_text(left + 12, y, verb, 12, "pale")
        shown = names if len(names) < 5 else [*names[:2], f"... {len(names) - 3} more ...", names[-1]]
        for name in shown:
            y += ROW - 3
            yield svg_text(left + 22, y, name, 13, ink)
    if number < SHOWN - 1:
        line = f"M{left + wide + 6:.1f} {PHASES_TOP + high / 2:.1f}h{step - wide - 12:.1f}"
        yield f'<path class="bracket" stroke-width="1.5" d="{line}"/>'


def _name(name: str) -> str:
    return "image" if name == "x" else name.split("~")[0]


if __name__ == "__main__":
    FILE.write_text(picture())
