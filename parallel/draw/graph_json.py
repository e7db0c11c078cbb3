"""From a graph to plain data for ``json.dump``: nodes, edges, groups, cuts and stages.

The schema, version 1; bytes and flops are for the traced shapes of one microbatch, seconds null where unknown:

- ``level``: op, layer, block or module. ``title``: as given.
- ``nodes``: ``id`` (0, 1, ... in the order they run), ``name`` (unique), ``kind``, ``scope`` (path of the module that
  is all of it, or ""), ``layers`` (names), ``stage``, ``flops``, ``param_bytes``, ``saved_bytes`` (kept for backward),
  ``output_bytes``, ``forward_s``, ``backward_s``.
- ``edges``: ``source`` and ``target`` (ids), ``values`` (names of layers; none between operations of one layer),
  ``bytes``.
- ``groups``: ``first`` and ``last`` (ids), ``label``: blocks of one class in one place, layers of one block.
- ``cuts``: ``before`` (name of the layer that begins the next stage), ``position`` of it, ``values``, ``bytes``.
- ``stages``: ``stage``, ``first`` and ``last`` (ids of nodes), ``flops``, ``param_bytes``, ``saved_bytes``,
  ``forward_s``, ``backward_s``; ``sends``: ``target`` (stage) and ``bytes`` of each stage it sends to.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from parallel.draw.model_view import ModelView

VERSION = 1


def graph_json(view: ModelView) -> dict[str, Any]:
    """Return the model as data, in the schema above. Without a partition there is one stage and no cut."""
    graph, outline, partition, stage_of = view.graph, view.outline, view.stages, view.stage_of
    nodes = []
    for number, part in enumerate(outline.parts):
        node = {"id": number, **asdict(part), "stage": stage_of[number]}
        node["layers"] = [layer.name for layer in graph.layers[node.pop("start") : node.pop("stop")]]
        nodes.append(node)
    return {
        "version": VERSION,
        "level": view.level,
        "title": view.title,
        "nodes": nodes,
        "edges": [{**asdict(link), "values": list(link.values)} for link in outline.links],
        "groups": [asdict(group) for group in outline.groups],
        "cuts": [
            {
                "before": graph.layers[cut.position].name,
                "position": cut.position,
                "values": list(cut.values),
                "bytes": cut.bytes,
            }
            for cut in view.cut_sums
        ],
        "stages": [
            {
                "stage": total.stage,
                "first": stage_of.index(total.stage),
                "last": len(stage_of) - 1 - stage_of[::-1].index(total.stage),
                "flops": total.flops,
                "param_bytes": total.param_bytes,
                "saved_bytes": total.saved_bytes,
                "forward_s": total.forward_s,
                "backward_s": total.backward_s,
                "sends": [
                    {"target": target, "bytes": partition.bytes_over(source, target)}
                    for source, target in partition.links
                    if source == total.stage
                ],
            }
            for total in view.stage_sums
        ],
    }
