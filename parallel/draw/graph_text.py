"""From a graph to a table: a line for each part, a ruled line for each cut, sums under each stage."""

from __future__ import annotations

from parallel.draw.model_view import CutSum, ModelView, StageSum
from parallel.draw.outline import Outline
from parallel.units import bytes_text, flops_text, seconds_text

NAME, KIND, INPUTS = 36, 44, 22
"""Most characters of these columns; names lose their beginning, the others their end."""


def graph_text(view: ModelView) -> str:
    """Return a table of the model: what each part is, takes and gives, its sizes, its time and its stage."""
    outline, sums = view.outline, view.stage_sums
    cuts = {cut.position: cut for cut in view.cut_sums}
    rows = _rows(outline)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    whole = sum(widths) + 2 * (len(widths) - 1)

    text = [view.title, ""] if view.title else []
    text += [lines[0], "─" * whole]
    stage = 0
    for number, part in enumerate(outline.parts):
        if part.start in cuts and (number == 0 or outline.parts[number - 1].start != part.start):
            text += [_sum_line(sums[stage]), _cut_line(cuts[part.start], whole)]
            stage += 1
        text.append(lines[number + 1])
    text += ["─" * whole, _sum_line(sums[stage], last=len(sums) == 1)]
    return "\n".join(line.rstrip() for line in text) + "\n"


def _rows(outline: Outline) -> list[list[str]]:
    """Headings, then a row for each part."""
    columns = [[part.forward_s for part in outline.parts], [part.backward_s for part in outline.parts]]
    times = [column for column in columns if any(seconds is not None for seconds in column)]
    names = ["forward" if column is columns[0] else "backward" for column in times]
    rows = [["#", "part", "kind", "takes", "gives", "params", "saved", "flops", *names]]
    sources: dict[int, list[int]] = {}
    for link in outline.links:
        sources.setdefault(link.target, []).append(link.source)
    for number, part in enumerate(outline.parts):
        row = [
            str(number),
            part.name if len(part.name) <= NAME else f"…{part.name[1 - NAME :]}",
            _short(part.kind, KIND),
            _short(_ranges(sources.get(number, [])), INPUTS),
            *(bytes_text(size) if size else "" for size in (part.output_bytes, part.param_bytes, part.saved_bytes)),
            flops_text(part.flops) if part.flops else "",
        ]
        row += [seconds_text(column[number] or 0.0) for column in times]
        rows.append(row)
    return rows


def _ranges(numbers: list[int]) -> str:
    """
    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _line(row: list[str], widths: list[int]) -> str:
    """Words to the left, numbers to the right."""
    cells = [
        cell.ljust(width) if 0 < column < 4 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells)


def _sum_line(total: StageSum, *, last: bool = False) -> str:
    time = [
        f"{name} {seconds_text(seconds)}"
        for name, seconds in (("forward", total.forward_s), ("backward", total.backward_s))
        if seconds is not None
    ]
    sizes = [f"params {bytes_text(total.param_bytes)}", f"saved {bytes_text(total.saved_bytes)}"]
    name = "all" if last else f"stage {total.stage}"
    return f"{name}: {', '.join([*sizes, f'flops {flops_text(total.flops)}', *time])}"


def _cut_line(cut: CutSum, width: int) -> str:
    values = "1 value" if len(cut.values) == 1 else f"{len(cut.values)} values"
    return f"──── cut: {values}, {bytes_text(cut.bytes)} ".ljust(width, "─")
