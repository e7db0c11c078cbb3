"""Pictures of graphs and schedules: well-formed, everything in them once, nothing over anything else, one scale."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.draw.graph_layout import BOX_HEIGHT, Layout, Wire, lay_out
from parallel.draw.graph_svg import graph_svg
from parallel.draw.outline import Level, ModelView
from parallel.draw.schedule_svg import IDLE, KINDS, LABELS, MARGIN, WIDTH, schedule_svg
from parallel.draw.svg_style import text_width
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition, bytes_across, partition_at, partition_equal
from parallel.schedule.action import COMPUTE, Action
from parallel.schedule.passes import lower
from parallel.schedule.registry import SCHEDULES, build_schedule, mesh_for
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import StageCost, Timeline
from parallel.units import bytes_text
from tests.helpers.drawn_graphs import graphs
from tests.helpers.graph_pictures import FOLDER, PICTURES, picture, traced
from tests.helpers.lanes import long_where

SVG = "{http://www.w3.org/2000/svg}"
CASES: tuple[tuple[str, Level, int], ...] = (
    ("unet", "block", 3),
    ("unet", "layer", 2),
    ("torchvision:densenet121", "block", 4),
    ("torchvision:inception_v3", "layer", 2),
    ("amoebanet(3,64)", "block", 3),
    ("amoebanet(3,64)", "layer", 3),
    ("torchvision:resnet50", "layer", 4),
    ("torchvision:resnet50", "op", 1),
    ("torchvision:resnet50", "module", 2),
)
LARGE = ("torchvision:densenet121", "torchvision:inception_v3")
"""Takes seconds to trace."""


def laid_out(graph: LayerGraph, level: Level, stages: int, rows: int = 16) -> tuple[ModelView, Layout]:
    view = ModelView(graph, level, partition_equal(graph, stages))
    return view, lay_out(view, box_width=200, margin=140, top=80, column_rows=rows)


def pieces(wire: Wire) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    return list(pairwise(wire.points))


def check_apart(drawn: tuple[ModelView, Layout]) -> None:
    """No box over another, no wire under a box, nothing outside the picture."""
    view, layout = drawn
    assert sorted(box.number for box in layout.boxes) == list(range(len(view.parts)))
    by_column: dict[int, list[tuple[float, float]]] = {}
    for box in layout.boxes:
        by_column.setdefault(box.column, []).append((box.x, box.y))
    for places in by_column.values():
        for (ax, ay), (bx, by) in combinations(places, 2):
            assert abs(ax - bx) >= 200 or abs(ay - by) >= BOX_HEIGHT
    lefts = [min(x for x, _ in places) for places in by_column.values()]
    rights = [max(x for x, _ in places) + 200 for places in by_column.values()]
    assert all(right < left for right, left in zip(rights, lefts[1:], strict=False))
    # Every piece is level or upright, and runs through the inside of no box.
    walls = [(box.x + 0.5, box.y + 0.5, box.x + 199.5, box.y + BOX_HEIGHT - 0.5) for box in layout.boxes]
    for wire in layout.wires:
        for (ax, ay), (bx, by) in pieces(wire):
            assert ax == bx or ay == by
            left, right, top, bottom = min(ax, bx), max(ax, bx), min(ay, by), max(ay, by)
            assert not any(left < x1 and right > x0 and top < y1 and bottom > y0 for x0, y0, x1, y1 in walls)
            assert left >= 0
            assert right <= layout.width
            assert bottom <= layout.height


def check_wires(drawn: tuple[ModelView, Layout]) -> None:
    """Each arrow points at a target of its source, each target has one; no line is of two sources and two targets."""
    view, layout = drawn
    boxes = {box.number: box for box in layout.boxes}

    def at(x: float, y: float) -> int:
        return next(
            n for n, b in boxes.items() if b.x - 0.5 <= x <= b.x + 200.5 and b.y - 0.5 <= y <= b.y + BOX_HEIGHT + 0.5
        )

    arrows = [(wire.source, at(*wire.points[-1])) for wire in layout.wires if wire.arrow]
    assert sorted(arrows) == sorted((link.source, link.target) for link in view.links)
    for wire, rest in pairwise(layout.wires):
        # What does not end at a part goes on in a later column, in the same place.
        assert wire.arrow or (wire.source == rest.source and wire.points[-1][1] > rest.points[0][1])
    runs: dict[tuple[int, float], list[tuple[float, float, int, int]]] = {}
    for wire in layout.wires:
        target = at(*wire.points[-1]) if wire.arrow else -1
        for start, end in pieces(wire):
            along = 1 if start[0] == end[0] else 0
            reach = sorted((start[along], end[along]))
            runs.setdefault((along, start[1 - along]), []).append((*reach, wire.source, target))
    for side_by_side in runs.values():
        for first, second in combinations(side_by_side, 2):
            same = first[2] == second[2] or first[3] == second[3] >= 0
            assert same or min(first[1], second[1]) - max(first[0], second[0]) < 0.5


def check_bands(drawn: tuple[ModelView, Layout]) -> None:
    """Each box lies between the cuts of its stage."""
    view, layout = drawn
    for box in layout.boxes:
        inside = [
            b for b in layout.bands if b.column == box.column and b.top <= box.y and box.y + BOX_HEIGHT <= b.bottom
        ]
        assert [band.stage for band in inside] == [view.stage_of[box.number]]
    assert [band.stage for band in layout.bands if band.begins] == list(range(max(view.stage_of) + 1))


@pytest.mark.parametrize(("model", "level", "stages"), long_where(CASES, *(case for case in CASES if case[0] in LARGE)))
def test_nothing_lies_over_anything(model: str, level: Level, stages: int) -> None:
    drawn = laid_out(traced(model), level, stages)
    check_apart(drawn)
    check_wires(drawn)
    check_bands(drawn)


@settings(max_examples=80, deadline=None)
@given(graphs(), st.integers(1, 3), st.integers(1, 12))
def test_nothing_lies_over_anything_in_any_graph(graph: LayerGraph, stages: int, rows: int) -> None:
    """However many rows a column has."""
    stages = min(stages, max(len(graph.layers) - 2, 1))
    for level in ("layer", "block"):
        drawn = laid_out(graph, level, stages, rows)
        check_apart(drawn)
        check_wires(drawn)
        check_bands(drawn)


def test_everything_is_said() -> None:
    graph = traced("unet")
    partition = partition_at(graph, ["down_1", "decoder_1_up"])
    seconds = [1e-3] * len(graph.layers)
    svg = graph_svg(
        ModelView(graph, partition=partition, forward_s=seconds, backward_s=seconds, title="U-Net <512 px> & cuts")
    )
    root = ET.fromstring(svg)
    assert "href" not in svg
    assert svg.count("http") == 1  # the name of the format: nothing is loaded from elsewhere
    sheets = (root.findtext(f"{SVG}style") or "").split("@media (prefers-color-scheme:dark)")
    light, dark = (re.findall(r"\.(\w+)\{", sheet) for sheet in sheets)
    assert light == dark
    said = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert said[0] == "U-Net <512 px> & cuts"
    names = [part.name for part in ModelView(graph, "block").parts]
    assert set(names) <= set(said)
    across = bytes_across(graph)
    assert [text for text in said if text.startswith("cut")] == [
        f"cut: {bytes_text(across[start])}" for start in partition.starts[1:]
    ]
    assert [text for text in said if text.startswith("stage")] == ["stage 0", "stage 1", "stage 2"]
    assert f"{2 * partition.starts[1]} ms" in said  # of stage 0: 1 ms forward, 1 ms backward a layer
    assert {"5 × encoder", "4 × Up"} <= set(said)
    hover = [group.findtext(f"{SVG}title") or "" for group in root.iter(f"{SVG}g") if group.get("class") == "part"]
    assert [text.splitlines()[0] for text in hover] == names
    assert "forward 7 ms" in hover[2]
    assert len([path for path in root.iter(f"{SVG}path") if "cut" in (path.get("class") or "")]) == 2


@pytest.mark.parametrize("model", long_where(["amoebanet(3,64)", *LARGE], *LARGE))
def test_words_stay_in_their_boxes(model: str) -> None:
    graph = traced(model)
    seconds = [1e-4] * len(graph.layers)
    root = ET.fromstring(
        graph_svg(ModelView(graph, level="layer", partition=Partition(graph, (0,)), forward_s=seconds))
    )
    for group in (group for group in root.iter(f"{SVG}g") if group.get("class") == "part"):
        box = next(group.iter(f"{SVG}rect"))
        left, width = float(box.get("x", 0)), float(box.get("width", 0))
        lines: dict[str | None, list[tuple[float, float]]] = {}
        for text in group.iter(f"{SVG}text"):
            wide, x = text_width(text.text or "", float(text.get("font-size", 0))), float(text.get("x", 0))
            begin = x if text.get("text-anchor") == "start" else x - wide
            lines.setdefault(text.get("y"), []).append((begin, begin + wide))
        for line in lines.values():
            assert min(begin for begin, _ in line) >= left + 4
            assert max(end for _, end in line) <= left + width - 4
            assert all(first[1] < second[0] for first, second in pairwise(sorted(line)))


@pytest.mark.parametrize("file", long_where(sorted(PICTURES), *sorted(set(PICTURES) - {"graph_unet.svg"})))
def test_pictures_of_the_documents_are_those_drawn_today(file: str) -> None:
    """``python -m tests.helpers.graph_pictures`` draws them anew."""
    assert (FOLDER / file).read_text() == picture(file)


def step(name: str, *, unit_s: float = 0.05) -> Timeline:
    mesh = mesh_for(name, groups=1, depth=4, chunks=2 if SCHEDULES[name].chunks else 1)
    schedule = build_schedule(name, mesh, 2 if name == "mast" else 8)
    links = {(stage, stage + 1): True for stage in range(mesh.stages - 1)}
    costs = [StageCost(unit_s, 2 * unit_s, unit_s, unit_s, 1)] * mesh.stages
    return simulate(lower(schedule, mesh, links, recompute=True), mesh, costs)


def boxes(svg: str) -> list[tuple[str, ET.Element]]:
    groups = [g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.get("class") == "action"]
    return [(g.findtext(f"{SVG}title") or "", next(g.iter(f"{SVG}rect"))) for g in groups]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_one_box_for_each_compute_action(name: str) -> None:
    timeline = step(name)
    actions = [span.action for rank in sorted(timeline.spans) for span in timeline.spans[rank]]
    drawn = boxes(schedule_svg(timeline, title=name))
    assert [text for text, _ in drawn] == [str(action) for action in actions if action.kind in COMPUTE]
    for (_, box), action in zip(drawn, (a for a in actions if a.kind in COMPUTE), strict=True):
        assert box.get("fill") == KINDS[action.kind][1 + action.replica].fill


def test_boxes_stand_where_time_says() -> None:
    timeline = step("1f1b")
    svg = schedule_svg(timeline, title="1f1b")
    spans = [span for rank in sorted(timeline.spans) for span in timeline.compute(rank)]
    for (_, box), span in zip(boxes(svg), spans, strict=True):
        start = MARGIN + LABELS + span.start_s / timeline.makespan_s * WIDTH
        width = span.duration_s / timeline.makespan_s * WIDTH
        assert float(box.get("x", 0)) == pytest.approx(start, abs=0.01)
        assert width - 1.5 < float(box.get("width", 0)) < width
    assert len({box.get("y") for _, box in boxes(svg)}) == 4


def test_later_chunks_of_a_rank_are_underlined() -> None:
    root = ET.fromstring(schedule_svg(step("interleaved"), title=""))
    for group in root.iter(f"{SVG}g"):
        action = Action.parse(group.findtext(f"{SVG}title") or "")
        assert len(list(group.iter(f"{SVG}path"))) == action.stage // 4


@pytest.mark.parametrize(("unit_s", "axis"), [(0.05, "time, s"), (0.001, "time, ms"), (1e-6, "time, µs")])
def test_title_step_time_bubble_and_unit_are_said(unit_s: float, axis: str) -> None:
    svg = schedule_svg(step("gpipe", unit_s=unit_s), title="gpipe <4 ranks> & 8 microbatches")
    assert "href" not in svg
    said = words(svg)
    assert said[0] == "gpipe <4 ranks> & 8 microbatches"
    assert {"forward", "backward", "recompute", axis, "0"} <= set(said)
    assert unit_s != 0.05 or said[1] == "2.05 s, bubble 22.0%"


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_measured_stands_below_simulated_on_the_same_scale() -> None:
    simulated, measured = step("master"), step("master", unit_s=0.1)
    svg = schedule_svg(simulated, title="master", compare=measured)
    said = words(svg)
    assert [text.split(":")[0] for text in said if "bubble" in text] == ["simulated", "measured"]
    rows = [rect for rect in ET.fromstring(svg).iter(f"{SVG}rect") if rect.get("fill") == IDLE]
    assert [float(row.get("width", 0)) for row in rows] == pytest.approx([WIDTH / 2] * 4 + [WIDTH] * 4)
    tops = [float(row.get("y", 0)) for row in rows]
    assert tops == sorted(tops)
    assert float(ET.fromstring(svg).get("height", 0)) > tops[-1]
