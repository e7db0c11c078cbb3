"""Pictures of schedules: well-formed, each action in them once, one time scale."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from parallel.draw.schedule_svg import IDLE, KINDS, LABELS, MARGIN, WIDTH, schedule_svg
from parallel.schedule.action import COMPUTE, Action
from parallel.schedule.passes import lower
from parallel.schedule.registry import SCHEDULES, build_schedule, mesh_for
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import StageCost, Timeline

SVG = "{http://www.w3.org/2000/svg}"


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
