"""Write a model's graph as text: a table, data for ``json.dump``, or the DOT language.

DOT is for Graphviz and the many tools that read it (``dot -Tsvg graph.dot > graph.svg``; grammar:
graphviz.org/doc/info/lang.html).
Each part is a node, called by its number as in JSON; each stage is a cluster. An edge stands for all values that one
part gives another, as wide as their bytes.

The schema of JSON, version 1; bytes and flops are for the traced shapes of one microbatch, seconds null where unknown:

- ``level``: op, layer, block or module. ``title``: as given.
- ``nodes``: ``id`` (0, 1, ... in the order they run), ``name`` (unique), ``kind``, ``scope`` (path of the module that
  is all of it, or ""), ``layers`` (names), ``stage``, ``flops``, ``param_bytes``, ``saved_bytes`` (saved for backward),
  ``output_bytes``, ``forward_s``, ``backward_s``.
- ``edges``: ``source`` and ``target`` (ids), ``values`` (names of layers; none between operations of one layer),
  ``bytes``.
- ``groups``: ``first`` and ``last`` (ids), ``label``: blocks of one class in one place, layers of one block.
- ``cuts``: ``before`` (name of the layer that begins the next stage), ``position`` of it, ``values``, ``bytes``.
- ``stages``: ``stage``, ``first`` and ``last`` (ids of nodes), ``flops``, ``param_bytes``, ``saved_bytes``,
  ``forward_s``, ``backward_s``; ``sends``: ``target`` (stage) and ``bytes`` of each stage it sends to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from parallel.draw.outline import Link, ModelView, Part
from parallel.units import bytes_text, flops_text, seconds_text

NAME, KIND, INPUTS = 36, 44, 22
"""Most characters of these columns; names lose their beginning, the others their end."""


def graph_text(view: ModelView) -> str:
    """Return a table of the model: what each part is, takes and gives, its sizes, its time and its stage."""
    sums, rows = view.stage_sums, _rows(view)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    whole = sum(widths) + 2 * (len(widths) - 1)

    text = [view.title, ""] if view.title else []
    text += [lines[0], "─" * whole]
    stage = 0
    for number, part in enumerate(view.parts):
        if part.start in view.cuts and (number == 0 or view.parts[number - 1].start != part.start):
            text += [_sum_line(sums[stage]), _cut_line(view.cuts[part.start], whole)]
            stage += 1
        text.append(lines[number + 1])
    text += ["─" * whole, _sum_line(sums[stage], last=len(sums) == 1)]
    return "\n".join(line.rstrip() for line in text) + "\n"


def _rows(view: ModelView) -> list[list[str]]:
    times = {"forward": [part.forward_s for part in view.parts], "backward": [part.backward_s for part in view.parts]}
    times = {name: column for name, column in times.items() if any(seconds is not None for seconds in column)}
    rows = [["#", "part", "kind", "takes", "gives", "params", "saved", "flops", *times]]
    sources: dict[int, list[int]] = {}
    for link in view.links:
        sources.setdefault(link.target, []).append(link.source)
    for number, part in enumerate(view.parts):
        row = [
            str(number),
            part.name if len(part.name) <= NAME else f"…{part.name[1 - NAME :]}",
            _short(part.kind, KIND),
            _short(_ranges(sources.get(number, [])), INPUTS),
            *(bytes_text(size) if size else "" for size in (part.output_bytes, part.param_bytes, part.saved_bytes)),
            flops_text(part.flops) if part.flops else "",
        ]
        rows.append([*row, *(seconds_text(column[number] or 0.0) for column in times.values())])
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
    cells = [
        cell.ljust(width) if 0 < column < 4 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells)


def _sum_line(total: Part, *, last: bool = False) -> str:
    time = [
        f"{name} {seconds_text(seconds)}"
        for name, seconds in (("forward", total.forward_s), ("backward", total.backward_s))
        if seconds is not None
    ]
    sizes = [f"params {bytes_text(total.param_bytes)}", f"saved {bytes_text(total.saved_bytes)}"]
    return f"{'all' if last else total.name}: {', '.join([*sizes, f'flops {flops_text(total.flops)}', *time])}"


def _cut_line(cut: Link, width: int) -> str:
    values = "1 value" if len(cut.values) == 1 else f"{len(cut.values)} values"
    return f"──── cut: {values}, {bytes_text(cut.bytes)} ".ljust(width, "─")


VERSION = 1
SUMS = ("flops", "param_bytes", "saved_bytes", "forward_s", "backward_s")


def graph_json(view: ModelView) -> dict[str, Any]:
    """Return the model as data, in the schema above. Without a partition there is one stage and no cut."""
    graph, partition, stage_of = view.graph, view.stages, view.stage_of
    nodes = []
    for number, part in enumerate(view.parts):
        node = {"id": number, **asdict(part), "stage": stage_of[number]}
        node["layers"] = [layer.name for layer in graph.layers[node.pop("start") : node.pop("stop")]]
        nodes.append(node)
    return {
        "version": VERSION,
        "level": view.level,
        "title": view.title,
        "nodes": nodes,
        "edges": [{**asdict(link), "values": list(link.values)} for link in view.links],
        "groups": [asdict(group) for group in view.groups],
        "cuts": [
            {"before": graph.layers[start].name, "position": start, "values": list(cut.values), "bytes": cut.bytes}
            for start, cut in view.cuts.items()
        ],
        "stages": [
            {
                "stage": stage,
                "first": stage_of.index(stage),
                "last": len(stage_of) - 1 - stage_of[::-1].index(stage),
                **{name: getattr(total, name) for name in SUMS},
                "sends": [
                    {"target": target, "bytes": partition.bytes_over(source, target)}
                    for source, target in partition.links
                    if source == stage
                ],
            }
            for stage, total in enumerate(view.stage_sums)
        ],
    }


HUES = (
    ("#dbe9fa", "#1f66b1"),
    ("#fde3c8", "#c25a0a"),
    ("#d5eee6", "#157f64"),
    ("#ecdff5", "#7b42a8"),
    ("#f8dbe1", "#b52c4b"),
    ("#f3ecc4", "#8a7300"),
    ("#d4ecf1", "#1b7f93"),
    ("#e4e6ea", "#566074"),
)
"""(fill, line) of a stage; neighbours differ for colour-blind eyes too."""


def graph_dot(view: ModelView) -> str:
    """Return the text of a DOT file."""
    return "\n".join(
        [
            "digraph model {",
            f"  label={_quoted(view.title)}; labelloc=t; fontname=Helvetica;",
            '  node [shape=box, style="rounded,filled", fontname=Helvetica, fontsize=11];',
            "  edge [fontname=Helvetica, fontsize=9];",
            *_clusters(view),
            *_edges(view.links),
            "}\n",
        ]
    )


def _clusters(view: ModelView) -> Iterator[str]:
    """The nodes of each stage; without a partition no cluster is around them."""
    for stage, total in enumerate(view.stage_sums):
        fill, line = HUES[stage % len(HUES)]
        if view.partition:
            yield f"  subgraph cluster_{stage} {{"
            yield f'    label={_quoted(f"{total.name}: {_sizes(total)}")}; color="{line}"; fontcolor="{line}";'
        for number, part in enumerate(view.parts):
            if view.stage_of[number] == stage:
                yield f'    {number} [label={_quoted(_words(part))}, fillcolor="{fill}", color="{line}"];'
        if view.partition:
            yield "  }"


def _edges(links: tuple[Link, ...]) -> Iterator[str]:
    most = max((link.bytes for link in links), default=0) or 1
    for link in links:
        width = 1 + 3 * math.sqrt(link.bytes / most)
        yield f'  {link.source} -> {link.target} [label="{bytes_text(link.bytes)}", penwidth={width:.1f}];'


def _words(part: Part) -> str:
    return "\n".join(filter(None, [part.name, part.kind if part.kind != part.name else "", _sizes(part)]))


def _sizes(part: Part) -> str:
    return ", ".join([*part.sizes, *([seconds_text(part.seconds)] if part.seconds else [])])


def _quoted(text: str) -> str:
    r"""
    >>> _quoted('a "b"\n')
    '"a \\"b\\"\\n"'
    """
    return json.dumps(text, ensure_ascii=False)
