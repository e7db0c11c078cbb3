"""Draw memory.svg: ``PYTHONPATH=. python docs/pictures/memory.py``.

It shows the bytes of one microbatch on the device, without parameters, their gradients and the optimizer state, as
``parallel.memory`` predicts them under four policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from matplotlib.ticker import MaxNLocator

from app.planning.workload import with_loss
from docs.pictures.svg_style import style, svg_text
from models.registry import build_model
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy, segments_of
from parallel.memory.stage_bytes import StageMemory
from parallel.trace.trace import trace
from parallel.units import bytes_text

FILE = Path(__file__).with_suffix(".svg")
SIDE = 2048
RULES = {
    "all kept": ActivationPolicy(),
    "--recompute block": ActivationPolicy("block"),
    "--offload overlap": ActivationPolicy(offload="overlap"),
    "both": ActivationPolicy("block", offload="overlap"),
}
COLOURS = (0, 1, 2, 4)
"""Numbers in ``HUES``, for each rule."""

LEFT, TOP, WIDTH, HEIGHT, MARGIN = 84.0, 116.0, 900.0, 330.0, 24.0
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
GIB = 1 << 30


def graph() -> LayerGraph:
    """Of ResNet-50 and its loss for one tile; no memory is taken."""
    with torch.device("meta"):
        model = build_model("resnet50", classes=2)
    return with_loss(trace(model, (1, 3, SIDE, SIDE)).graph, 2, None)


def bytes_over_a_step(graph: LayerGraph, rule: ActivationPolicy) -> tuple[list[int], int]:
    """Bytes while each layer is computed, forward, again and backward; and how many of these are forward."""
    segments = segments_of(Partition(graph, (0,)), 0, rule)
    timeline = StageMemory(graph).arrays((0, len(graph.layers))).timeline(segments, rule)
    return timeline.live.tolist(), timeline.moments.backward_start


def picture() -> str:
    """The text of the file."""
    of_model = graph()
    found = {name: bytes_over_a_step(of_model, rule) for name, rule in RULES.items()}
    turn = next(iter(found.values()))[1]
    across = max(len(live) for live, _ in found.values())
    most = max(max(live) for live, _ in found.values()) / GIB
    *ticks, high = MaxNLocator(9, steps=[1, 2, 5, 10]).tick_values(0, most)
    whole = (LEFT + WIDTH + MARGIN, TOP + HEIGHT + 44)

    def x(moment: float) -> float:
        return LEFT + WIDTH * moment / across

    def y(size: float) -> float:
        return TOP + HEIGHT * (1 - size / GIB / high)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]:g} {whole[1]:g}" font-family="{FONT}">',
        f'<style>{style()}</style><rect class="paper" width="100%" height="100%"/>',
        svg_text(MARGIN, 40, "What a step takes on the device", 19, bold=True),
        svg_text(
            MARGIN,
            64,
            f"ResNet-50, one tile of {SIDE} px: activations and their gradients, as predicted, and the most of each",
            14,
            "pale",
        ),
    ]
    at = MARGIN
    for colour, (name, (live, _)) in zip(COLOURS, found.items(), strict=True):
        words = f"{name}: {bytes_text(max(live))}"
        parts.append(f'<rect class="f{colour}" x="{at:.1f}" y="82" width="14" height="5"/>')
        parts.append(svg_text(at + 20, 90, words, 14))
        at += 56 + 7.2 * len(words)
    for tick in [*ticks, high]:
        level = y(tick * GIB)
        parts.append(f'<path class="edge" d="M{LEFT:g} {level:.1f}h{WIDTH:g}"/>')
        parts.append(svg_text(LEFT - 8, level + 4.5, f"{tick:g} GiB", 13, "pale", "end"))
    parts.append(f'<path class="bracket" stroke-dasharray="4 4" d="M{x(turn):.1f} {TOP:g}v{HEIGHT:g}"/>')
    for colour, (live, _) in zip(COLOURS, found.values(), strict=True):
        line = "".join(_steps(live, x, y))
        parts.append(f'<path class="w{colour}" stroke-width="2" stroke-linejoin="round" d="{line}"/>')
    low = TOP + HEIGHT + 20
    parts.append(svg_text(x(turn) - 8, low, "forward", 13, "pale", "end"))
    parts.append(svg_text(x(turn) + 8, low, "backward, with what is computed again", 13, "pale"))
    parts.append(svg_text(LEFT + WIDTH, low, "layers computed", 13, "pale", "end"))
    return "\n".join([*parts, "</svg>\n"])


def _steps(live: list[int], x: Callable[[float], float], y: Callable[[float], float]) -> Iterator[str]:
    """A path that is level while a layer is computed."""
    yield f"M{x(0):.1f} {y(live[0]):.1f}"
    for moment, size in enumerate(live):
        if not moment or size != live[moment - 1]:
            yield f"H{x(moment):.1f}V{y(size):.1f}"
    yield f"H{x(len(live)):.1f}"


if __name__ == "__main__":
    FILE.write_text(picture())
