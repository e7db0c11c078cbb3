"""Parts of pages: charts, numbers, templates, and the page of all slides."""

import base64
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.evaluation.report_page import _share_chart
from app.pages.html import Chart, Series, format_value, line_chart
from app.pages.pictures import as_png, overlays, slide_rows, small_pictures, tinted, write_slides_page
from pipelines.catalog.catalog import SlideSpec
from pipelines.tiles.tile_table import IndexedSlide, TileTable
from pipelines.tiles.tiling import IndexSettings
from tests.helpers.slides_page import write_many

SVG = "{http://www.w3.org/2000/svg}"


def series(y, kind="line"):
    values = np.array(y, np.float64)
    return Series("loss & <x>", np.arange(1.0, len(values) + 1), values, 0, kind)


def drawing(chart):
    return ElementTree.fromstring(base64.b64decode(chart.svg))


def words(chart):
    return ["".join(text.itertext()) for text in drawing(chart).iter(f"{SVG}text")]


@settings(deadline=None, max_examples=8)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20), st.booleans())
@example([1.0, 5e-324], False)
@example([0.0, 5e-324], True)
@example([5e-324, 1e-323], True)
@example([0.0, 0.0], True)
@example([1e9, 1e9 + 1e-6], False)
@example([-2.0, -2.0], True)
def test_whatever_the_values_there_is_a_picture_and_no_warning(y, from_zero):
    shown = line_chart([series(y)], "t", "u", from_zero=from_zero, mark="max")
    assert any(word.startswith("loss & <x>") for word in words(shown))


def test_gaps_stay_gaps_and_nothing_finite_has_no_picture():
    chart = line_chart([series([3.0, np.nan, 2.5], "dots")], "t", "u", sizes=(1, 3))
    assert chart.alt == "t. loss & <x>: 3 at 1, 2.5 at 3"
    assert line_chart([series([np.nan, np.inf])], "Empty", "u") == Chart("Empty", "u", "", "Empty")


def test_shares_begin_at_zero_however_small_the_least():
    axis = [word for word in words(_share_chart([series([0.001, 0.9])], "t", "u")) if re.fullmatch(r"0(\.0+)?", word)]
    assert len(axis) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.123456, "0.1235"),
        (1024.0, "1024"),
        (40000.0, "40\u2009000"),
        (12345678.0, "1.23e7"),
        (1e-5, "1e-5"),
        (25557032, "25\u2009557\u2009032"),
        (-3.5, "−3.5"),
        (float("nan"), "–"),
    ],
)
def test_numbers_are_written_short(value, text):
    assert format_value(value) == text
    assert (format_value(0.46612, 3), format_value(1234.5, 3)) == ("0.466", "1234")


def test_a_map_that_reaches_beyond_its_picture_is_not_squeezed():
    white, tumour = np.full((6, 6, 3), 255, np.uint8), np.zeros((1, 2, 2), np.uint8)
    tumour[0, :, 1] = 255
    coloured = (tinted(white, tumour, covered=(8, 8)) != 255).any(2)
    assert not coloured[:, :2].any()
    assert coloured[:, 4:].all()
    assert (tinted(white, tumour, covered=(8, 8))[:, 4] == tinted(white, tumour, covered=(8, 6))[:, 4]).all()


def test_pictures_of_slides_in_folders_are_linked_and_named(tmp_path):
    names = ("a/1", "b/1")
    for name in names:
        path = tmp_path / "tissue" / f"{name}.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(as_png(np.full((200, 90, 3), 120, np.uint8)))
    pictures = small_pictures(tmp_path / "tissue", [SlideSpec(name, tmp_path / name) for name in names], None, 1)
    sources = tuple(IndexedSlide(name, 10, None, 0.25, 9000, 8000, "tiled") for name in names)
    none = np.zeros(0, np.int64)
    table = TileTable(names, none.astype(np.int32), none, none, none.astype(np.float32), IndexSettings(), sources)
    page = write_slides_page(tmp_path / "slides.html", slide_rows(table, [], pictures), pictures, (), "")
    linked = [tmp_path / link for link in re.findall(r'(?:href|src)="(tissue/[^"]+)"', page.read_text())]
    assert len(linked) == 4
    assert all(path.is_file() for path in linked)
    shown = overlays(tmp_path / "tissue", sorted((tmp_path / "tissue").glob("?/*.png")))
    assert [name for name, _ in shown] == [*names]


def test_the_page_of_all_slides_has_flags_orders_and_names(tmp_path):
    html = write_many(tmp_path, 40).read_text()
    root = ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))  # well-formed, names escaped
    cards = [item for item in root.iter("li") if "card" in item.get("class", "")]
    slides = {"".join(item.find("h3").itertext()): item for item in cards}
    assert len(slides) == 40

    def flagged(name):
        return {int(slide[7:10]) for slide, item in slides.items() if name in item.get("class", "").split()}

    assert (flagged("fault"), flagged("pale"), flagged("drawn")) == (
        {1, 10, 20, 30},
        set(range(5)),
        {0, 4, 8, 12, 16, 24, 28, 32, 36},
    )
    counts = re.findall(r"<span>([a-z ]+) <small>(\d+)</small>", html)
    assert counts[:3] == [("all", "40"), ("with faults", "4"), ("little tissue", "5")]
    for order, first in (
        ("name", [0, 1, 2]),
        ("faults", [1, 10, 20, 30]),
        ("tissue", [10, 20]),
        ("tiles", [10, 20, 30, 0]),
    ):
        place = {slide: int(re.findall(rf"--{order}:(\d+);", item.get("style"))[0]) for slide, item in slides.items()}
        assert [int(slide[7:10]) for slide in sorted(place, key=place.get)][: len(first)] == first
    picture = slides["slide <004>"].find(".//img")
    assert (picture.get("src"), picture.get("loading")) == ("tissue/small/slide%20%3C004%3E.jpg", "lazy")
    assert (
        "".join(slides["slide <010>"].itertext()).split("open: ")[1].strip() == "/slides/10.svs: the file is cut short"
    )
