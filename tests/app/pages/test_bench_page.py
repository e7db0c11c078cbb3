"""The page of a benchmark: all rows are on it, as they are, whatever came of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from app.pages.bench_page import write_page
from app.report import main
from app.settings.cli import RunError
from tests.helpers.bench_folder import GIB, REFUSED, picture, row, unfit, write_bench, write_rows

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bench(tmp_path_factory.mktemp("bench"))


def page(folder: Path) -> ElementTree.Element:
    return ElementTree.fromstring(write_page(folder).read_text().removeprefix("<!DOCTYPE html>"))


def text(folder: Path) -> str:
    return told(page(folder))


def told(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def headings(folder: Path) -> list[str]:
    return [told(heading) for heading in page(folder).iter("h2")]


def part(folder: Path, title: str) -> ElementTree.Element:
    """The section under a heading."""
    return next(one for one in page(folder).iter("section") if told(one).startswith(title))


def bars(folder: Path, title: str = "Images per second") -> list[ElementTree.Element]:
    """Lines of bars of a section."""
    found = part(folder, title).iter("figure")
    return [line for figure in found if figure.get("class") == "bars" for line in figure.iter("li")]


def widths(line: ElementTree.Element) -> list[float]:
    return [float(rect.get("width", 0)) for rect in line.iter("rect")]


def test_page_needs_nothing_but_itself(bench: Path) -> None:
    html = write_page(bench).read_text()
    assert not re.search(r"<(script|link|iframe|object|img)\b|@import|src=|href=\"(?!#)", html)
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert set(re.findall(r"url\(([^)]*)\)", html)) <= {f"#p{number}-again" for number in range(99)}


def test_all_parts_are_there_in_order(bench: Path) -> None:
    assert headings(bench) == [
        "What was found",
        "Images per second",
        "Where data parallelism stops fitting",
        "Memory of each rank",
        "Where the time goes",
        "Over the number of ranks",
        "What each rank does in a step",
        "All rows",
        "Run it again",
        "Settings",
        "Environment",
    ]


def test_every_strategy_of_every_row_is_in_the_table_and_in_the_bars(tmp_path: Path) -> None:
    rows = [row("ddp"), unfit("fsdp"), row("gpipe", status="cannot", reason=REFUSED, images_per_second=None)]
    folder = write_rows(tmp_path, rows)
    for section in ("Images per second", "Memory of each rank", "All rows"):
        words = told(part(folder, section))
        for word in ("ddp", "out of memory : fsdp" if section != "All rows" else "fsdp out of memory", "gpipe"):
            assert word in words, section
    assert REFUSED in told(part(folder, "All rows"))
    assert f"gpipe cannot run : {REFUSED}" in told(part(folder, "Images per second"))


def test_a_rank_that_was_killed_is_not_among_those_that_do_not_fit(tmp_path: Path) -> None:
    killed = row("gpipe", status="killed", reason="ended by signal 9", images_per_second=None)
    folder = write_rows(tmp_path, [row("ddp"), unfit("fsdp"), killed])
    for section in ("Images per second", "Memory of each rank"):
        assert "out of memory : fsdp gpipe killed by signal 9" in told(part(folder, section))
    assert "gpipe killed by signal 9: ended by signal 9" in told(part(folder, "All rows")).replace(" :", ":")


def test_bars_are_as_long_as_speeds(tmp_path: Path) -> None:
    rows = [row("ddp", images_per_second=2.0), row("gpipe", images_per_second=1.0, baseline="ddp")]
    first, second = bars(write_rows(tmp_path, rows))
    assert widths(first)[0] == pytest.approx(2 * widths(second)[0], abs=0.02)
    assert "0.5 × ddp" in told(second)
    line = first.find(".//path[@class='line']")
    assert line is not None
    assert float(line.get("d", "").removeprefix("M").split()[0]) == pytest.approx(widths(first)[0], abs=0.02)


def test_ranges_are_drawn_where_there_are_repeats(tmp_path: Path) -> None:
    rows = [row("ddp", images_per_second_range=[1.5, 2.5]), row("fsdp", images_per_second_repeats=[2.0])]
    first, second = bars(write_rows(tmp_path, rows))
    low, high = re.findall(r"M([\d.]+) [\d.]+v8", first.findall(".//path")[-1].get("d", ""))
    per_image = widths(first)[0] / 2.0
    assert float(low) == pytest.approx(1.5 * per_image, abs=0.02)
    assert float(high) == pytest.approx(2.5 * per_image, abs=0.02)
    assert all("v8" not in path.get("d", "") for path in second.iter("path"))


def test_memory_has_a_bar_for_each_rank_and_the_limit(tmp_path: Path) -> None:
    folder = write_rows(tmp_path, [row("gpipe", device_bytes=[2 * GIB, GIB])])
    (line,) = bars(folder, "Memory of each rank")
    assert widths(line)[0] == pytest.approx(2 * widths(line)[1], rel=1e-3)
    assert "2 GiB least 1 GiB" in told(line)
    limit = line.find(".//path[@class='limit']")
    assert limit is not None
    assert float(limit.get("d", "").removeprefix("M").split()[0]) == pytest.approx(1.5 * widths(line)[0], rel=1e-3)


def test_a_limit_far_beyond_the_bars_is_told(tmp_path: Path) -> None:
    folder = write_rows(tmp_path, [row("ddp")], settings={"memory": "64GiB"})
    (line,) = bars(folder, "Memory of each rank")
    assert line.find(".//path[@class='limit']") is None
    assert "the limit, 64 GiB, is far beyond these bars" in text(folder)


def test_without_counted_bytes_the_resident_growth_is_shown(tmp_path: Path) -> None:
    folder = write_rows(tmp_path, [row("ddp", device_bytes=None)])
    assert "growth of resident memory at most" in text(folder)
    assert "2 GiB each rank" in told(bars(folder, "Memory of each rank")[0])


def test_time_is_cut_into_its_parts(tmp_path: Path) -> None:
    time = {"compute": 3.0, "transfer": 0.5, "bubble": 0.5, "data": 0.0}
    folder = write_rows(tmp_path, [row("gpipe", time=time)])
    (line,) = bars(folder, "Where the time goes")
    assert [width / widths(line)[0] for width in widths(line)] == pytest.approx([1, 1 / 6, 1 / 6, 0], abs=1e-3)
    assert "4 s compute 75 %, transfer 12 %, bubble 12 %, data 0 %" in told(line)


def test_the_tile_where_data_parallelism_stops_is_marked(tmp_path: Path) -> None:
    rows = [
        *(row("ddp", tile_px=512), row("gpipe", tile_px=512), unfit("ddp", tile_px=1024), row("gpipe", tile_px=1024)),
        *(row("ddp + recompute", tile_px=tile) for tile in (512, 1024)),
    ]
    folder = write_rows(tmp_path, rows)
    charts = [one for one in page(folder).iter("figure") if one.get("class") == "chart"]
    assert len(charts) == 2
    for chart in charts:
        assert "from 1024 px out of memory: ddp" in told(chart)
        (line,) = [one for one in chart.iter("path") if "--bad" in one.get("style", "")]
        tick = next(one for one in chart.iter("text") if one.text == "1024")
        assert line.get("d", "").split()[1] == tick.get("x")
    assert "on 2 ranks: ddp fits up to 512 px." in text(folder)


def test_scaling_is_drawn_beside_its_ideal(tmp_path: Path) -> None:
    rows = [
        row("single", ranks=1, scaling="weak", global_batch=4, images_per_second=1.0),
        row("ddp", ranks=2, scaling="weak", images_per_second=1.9),
        row("ddp", ranks=4, scaling="weak", global_batch=16, images_per_second=3.5),
    ]
    chart = next(one for one in part(write_rows(tmp_path, rows), "Over the number of ranks").iter("figure"))
    assert "Weak scaling, 512 px tiles" in told(chart)
    drawing = chart.find("svg")
    assert drawing is not None
    said = drawing.get("aria-label", "")
    assert "ddp: 1 at 1, 1.9 at 2, 3.5 at 4" in said
    assert "in proportion to the ranks, from single: 1 at 1, 4 at 4" in said


def test_timelines_are_inlined_with_names_of_their_own(tmp_path: Path) -> None:
    for name in ("gpipe", "master"):
        (tmp_path / f"{name}.svg").write_text(picture(name, 2))
    rows = [row(name, schedule_svg=f"{name}.svg", bubble=0.25, bubble_predicted=0.2) for name in ("gpipe", "master")]
    shown = part(write_rows(tmp_path, rows), "What each rank does")
    pictures = list(shown.iter(f"{SVG}svg"))
    assert len(pictures) == 2
    assert [one.get("id") for one in shown.iter(f"{SVG}pattern")] == ["p0-again", "p1-again"]
    assert "bubble measured 25.0 %, predicted before the run 20.0 %" in told(shown)


@pytest.mark.parametrize(
    "content", [None, "<svg", "<html/>", '<svg xmlns="http://www.w3.org/2000/svg"><script/></svg>']
)
def test_a_picture_that_is_none_is_left_out_with_a_word(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "step.svg").write_text(content)
    folder = write_rows(tmp_path, [row("gpipe", schedule_svg="step.svg")])
    assert "Its picture, step.svg, cannot be read." in text(folder)


def test_a_picture_outside_the_folder_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "step.svg").write_text(picture("gpipe", 2))
    folder = write_rows(tmp_path / "bench", [row("gpipe", schedule_svg="../step.svg")])
    assert "cannot be read" in text(folder)


def test_names_are_escaped(bench: Path) -> None:
    html = write_page(bench).read_text()
    assert "<friends>" not in html
    assert "unet &amp; &lt;friends&gt;" in html


EMPTY: dict[str, Any] = {key: None for key in row() if key not in ("model", "strategy", "ranks", "tile_px", "status")}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "Nothing was measured yet."),
        ([row()], "ddp runs at 2 images/s (1.9 to 2.1); no other strategy ran."),
        ([unfit(), unfit("gpipe")], "Nothing could be measured"),
        ([{**row(), **EMPTY}], "Nothing could be measured"),
        ([{**row(), **EMPTY, "status": "failed"}], "failed"),
        ([row(images_per_second=float("nan"), bytes_sent=[1, None], time={"compute": "?"})], "ddp not measured"),
        ([{key: row()[key] for key in ("model", "strategy", "ranks", "tile_px")}], "unknown"),
        ([row(images_per_second=0.0, images_per_second_range=[0.0, 0.0], time={"compute": 0.0})], "ddp"),
    ],
)
def test_whatever_there_is_makes_a_page(tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    folder = write_rows(tmp_path, rows)
    shown = text(folder)
    assert words in shown
    assert not re.search(r"\b(nan|inf|None)\b", shown)


def test_an_almost_empty_file_makes_a_page(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("{}")
    assert headings(tmp_path) == ["Run it again"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "is not there"), ("{", "cannot be read"), ("[]", "found a list"), ('{"rows": [{"model": "a"}]}', "row 0")],
)
def test_a_file_that_is_no_benchmark_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "bench.json").write_text(content)
    with pytest.raises(RunError, match=words):
        write_page(tmp_path)


def test_a_planners_choice_is_told(tmp_path: Path) -> None:
    rows = [row("ddp"), row("auto", chosen="1f1b")]
    names = [told(line).split(" 2")[0] for line in bars(write_rows(tmp_path, rows))]
    assert names == ["ddp", "auto (1f1b)"]


def test_a_scaling_row_stands_back_behind_the_plain_one(tmp_path: Path) -> None:
    rows = [row("ddp", scaling="weak", images_per_second=9.0), row("ddp", images_per_second=3.0)]
    (line,) = bars(write_rows(tmp_path, rows))
    assert told(line).startswith("ddp 3")


def test_many_ranks_have_two_bars(tmp_path: Path) -> None:
    folder = write_rows(tmp_path, [row("gpipe", ranks=16, device_bytes=[GIB + n for n in range(16)])])
    (line,) = bars(folder, "Memory of each rank")
    assert len(widths(line)) == 2


def test_command_writes_it_anew(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bench)]) == 0
    assert capsys.readouterr().out.strip() == str(bench / "report.html")


def test_same_rows_same_page(bench: Path) -> None:
    assert write_page(bench).read_bytes() == write_page(bench).read_bytes()
