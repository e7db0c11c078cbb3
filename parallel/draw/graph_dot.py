"""A model's graph in the DOT language, for Graphviz and the many tools that read it: ``dot -Tsvg graph.dot``.

A node for each part, a cluster for each stage, an edge for all values that one part gives another, as wide as their
bytes; nodes are called by their number, as in ``graph.json``. Grammar: graphviz.org/doc/info/lang.html.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from parallel.draw.graph_style import HUES
from parallel.draw.model_view import ModelView, StageSum
from parallel.draw.outline import Link, Part
from parallel.units import bytes_text, seconds_text


def graph_dot(view: ModelView) -> str:
    """Return the text of a DOT file."""
    return "\n".join(
        [
            "digraph model {",
            f"  label={_quoted(view.title)}; labelloc=t; fontname=Helvetica;",
            '  node [shape=box, style="rounded,filled", fontname=Helvetica, fontsize=11];',
            "  edge [fontname=Helvetica, fontsize=9];",
            *_clusters(view),
            *_edges(view.outline.links),
            "}\n",
        ]
    )


def _clusters(view: ModelView) -> Iterator[str]:
    """The nodes of each stage; without a partition no cluster is around them."""
    for total in view.stage_sums:
        fill, line, *_ = HUES[total.stage % len(HUES)]
        if view.partition:
            yield f"  subgraph cluster_{total.stage} {{"
            yield f'    label={_quoted(f"stage {total.stage}: {_sizes(total)}")}; color="{line}"; fontcolor="{line}";'
        for number, part in enumerate(view.outline.parts):
            if view.stage_of[number] == total.stage:
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


def _sizes(part: Part | StageSum) -> str:
    """Bytes of parameters, bytes kept for backward and seconds, where there are any."""
    words = [f"{bytes_text(part.param_bytes)} params"] if part.param_bytes else []
    words += [f"{bytes_text(part.saved_bytes)} saved"] if part.saved_bytes else []
    seconds = (part.forward_s or 0.0) + (part.backward_s or 0.0)
    return ", ".join([*words, *([seconds_text(seconds)] if seconds else [])])


def _quoted(text: str) -> str:
    r"""
    >>> _quoted('a "b"\n')
    '"a \\"b\\"\\n"'
    """
    return json.dumps(text, ensure_ascii=False)
