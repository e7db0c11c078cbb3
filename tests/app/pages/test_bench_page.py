"""The page of a benchmark: all rows are on it, as they are, whatever came of them."""

import re
from xml.etree import ElementTree

import pytest

from app.benchmark.page import HEADERS, charts, write_page
from app.report import main
from app.settings.cli import RunError
from tests.helpers.bench_folder import REFUSED, row, unfit, write_bench, write_rows


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return write_bench(tmp_path_factory.mktemp("bench"))


def page(folder):
    return ElementTree.fromstring(write_page(folder).read_text().removeprefix("<!DOCTYPE html>"))


def text(element):
    return " ".join(" ".join(element.itertext()).split())


def lines(folder):
    """Cells of the table of all rows."""
    table = next(one for one in page(folder).iter("section") if text(one).startswith("All rows"))
    return [[text(cell) for cell in line.iter("td")] for line in table.iter("tr")][1:]


def test_the_page_is_whole_and_needs_nothing_but_itself(bench):
    html = write_page(bench).read_text()
    assert not re.search(r"<(script|link|iframe|object)\b|@import|url\(|href=", html)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'src="([^"]*)"', html))
    assert "<friends>" not in html
    assert "unet &amp; &lt;friends&gt;" in html
    assert write_page(bench).read_text() == html
    headings = [text(heading) for heading in page(bench).iter("h2")]
    assert headings == ["All rows", "Images per second", "Run it again", "Settings", "Environment"]


def test_commands_name_the_folder_that_is_reported(bench):
    """They had named the --out of the settings, where a folder that was moved is no longer."""
    html = write_page(bench).read_text()
    assert f"--memory 3GiB --out {bench}-again\n" in html
    assert f"python -m app.report {bench}<" in html


def test_every_row_is_in_the_table_as_it_is(tmp_path):
    refused = row("gpipe", status="cannot", reason=REFUSED, images_per_second=None)
    rows = [row(images_per_second=2.5, bubble=0.25, bubble_predicted=0.2), unfit("fsdp"), refused]
    ran, out_of_memory, cannot = lines(write_rows(tmp_path, rows))
    known = dict(zip((HEADERS[0], HEADERS[-1], *HEADERS[1:-1]), ran[4:], strict=True))
    assert ran[:4] == ["resnet50", "512", "2", "8"]
    assert known["images/s"] == "2.5"
    assert known["range"] == "1.9-2.1"
    assert known["bubble"] == "25 % (20 %)"
    assert known["fullest rank"] == "1 GiB"
    assert known["claim"] == "2 images/s: the baseline"
    assert (out_of_memory[4], out_of_memory[6]) == ("fsdp", "out-of-memory")
    assert "lower --tile" in out_of_memory[5]
    assert cannot[5] == REFUSED


def test_charts_show_the_speeds_of_rows_that_did_the_same_work():
    rows = [
        *(row("ddp", tile_px=tile, images_per_second=512 / tile) for tile in (512, 1024)),
        *(row("gpipe", tile_px=tile, loss_matches=False) for tile in (512, 1024)),
        unfit("fsdp", tile_px=512),
    ]
    (chart,) = charts(rows, "tile_px", "ranks")
    assert chart.title == "resnet50, ranks: 2"
    assert "ddp: 1 at 512, 0.5 at 1024" in chart.alt
    assert "gpipe" not in chart.alt
    assert "fsdp" not in chart.alt
    assert charts(rows, "ranks", "tile_px") == []


@pytest.mark.parametrize("rows", [[], [unfit(), unfit("gpipe")], [row(), row("gpipe", chosen=None)]])
def test_any_number_of_rows_makes_a_page(tmp_path, rows):
    shown = page(write_rows(tmp_path, rows))
    assert len(list(shown.iter("thead"))) == bool(rows)
    assert not re.search(r"\b(nan|inf|None)\b", text(shown))


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "is not there"), ("{", "run app.bench again"), ("[]", "TypeError"), ('{"rows": [{}]}', "KeyError")],
)
def test_a_file_that_is_no_benchmark_is_named(tmp_path, content, words):
    if content is not None:
        (tmp_path / "bench.json").write_text(content)
    with pytest.raises(RunError, match=words):
        write_page(tmp_path)


def test_command_writes_it_anew(bench, capsys):
    assert main([str(bench)]) == 0
    assert capsys.readouterr().out.strip() == str(bench / "report.html")
