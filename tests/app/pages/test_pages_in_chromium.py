"""The pages in a real browser: light, dark, on a phone and on paper, nothing fetched, nothing cut or hard to read."""

import json

import cv2
import numpy as np
import pytest

from app.benchmark.page import write_page
from app.pages.run_page import write_comparison, write_report
from tests.helpers.bench_folder import row, unfit, write_bench, write_rows
from tests.helpers.chromium import browser, find_chromium
from tests.helpers.run_folder import add_examples, write_run
from tests.helpers.slides_page import write_many

pytestmark = pytest.mark.browser

PAPER_PX = 718
"""Width of what is printed on A4 with the browser's margins."""

PALE = """
(() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = one => { for (; one; one = one.parentElement) {
    const colour = parse(getComputedStyle(one).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour; } return [255, 255, 255]; };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || one.closest("title, style")) continue;
    const style = getComputedStyle(one);
    const colour = parse(one.ownerSVGElement ? style.fill : style.color);
    const [a, b] = [light(colour), light(ground(one))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push(contrast.toFixed(2) + " " + walker.currentNode.textContent.slice(0, 40));
  }
  return found;
})()
"""
"""Text whose contrast is below 4.5, the least that WCAG 2.2 (1.4.3, AA) asks for."""

BEYOND = """
[...document.querySelectorAll(".table, figure, .card, pre")].filter(one =>
  one.scrollWidth > one.clientWidth + 1).map(one => one.className + ": " + one.textContent.slice(0, 60))
"""
"""Boxes whose content is wider than they are: on paper nobody can scroll."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every kind of page, and one with almost nothing on it."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [write_run(folder / f"run-with-a-rather-long-name-{n}") for n in range(3)]
    add_examples(runs[0])
    many = "fsdp does not go with an MPI launcher; " * 9
    one = [unfit("ddp"), row("gpipe", status="cannot", reason=many + "x" * 200, images_per_second=None)]
    return {
        "benchmark": write_page(write_bench(folder / "bench", tiles=(512, 1024, 2048), ranks=(1, 2))),
        "nothing ran": write_page(write_rows(folder / "none", one)),
        "comparison": write_comparison(runs, folder / "compare.html"),
        "run": write_report(runs[0]),
    }


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine (chromium, chromium-browser or google-chrome)")
    with browser(program, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.mark.parametrize("name", ["benchmark", "nothing ran", "comparison", "run"])
def test_page_in_a_browser(chromium, pages, name, tmp_path):
    page = pages[name]
    chromium.told.clear()
    chromium.requested.clear()
    for width, phone, dark in ((1280, False, False), (1280, False, True), (390, True, False)):
        chromium.open(page, width=width, dark=dark, phone=phone)
        where = f"{name}, {width} px, {'dark' if dark else 'light'}"
        assert chromium.run("document.documentElement.scrollWidth") <= width, where
        assert chromium.run(PALE) == [], where
        _check_picture(chromium.picture(), width, dark, tmp_path / f"{width}-{dark}.png")
    assert set(chromium.requested) == {page.resolve().as_uri()}
    assert chromium.told == []


@pytest.mark.parametrize("name", ["benchmark", "run"])
def test_page_on_paper(chromium, pages, name):
    """Light, even for a reader whose screen is dark, and nothing wider than the paper."""
    chromium.open(pages[name], width=PAPER_PX, dark=True)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    chromium.ask("Emulation.setEmulatedMedia", media="print", features=dark)
    assert chromium.run("document.documentElement.scrollWidth") <= PAPER_PX
    assert chromium.run(BEYOND) == []
    assert chromium.run(PALE) == []
    ink = chromium.run("getComputedStyle(document.body).color")
    assert max(json.loads(f"[{ink.removeprefix('rgb(').removesuffix(')')}]")) < 64
    made = chromium.pdf()
    assert made.startswith(b"%PDF")
    assert made.count(b"/Type /Page\n") > 1


def test_a_page_of_300_slides(chromium, tmp_path):
    """Read within seconds on a busy machine, pictures only where they are looked at, filters and orders by a click."""
    page = write_many(tmp_path, 300)
    assert page.stat().st_size < 1 << 19
    for width, phone, dark in ((1280, False, False), (1280, False, True), (390, True, False)):
        chromium.told.clear()
        chromium.requested.clear()
        chromium.open(page, width=width, dark=dark, phone=phone)
        assert chromium.run("performance.timing.loadEventEnd - performance.timing.navigationStart") < 5000
        assert chromium.run("document.documentElement.scrollWidth") <= width
        assert chromium.run(PALE) == []
        assert chromium.told == []
        assert len(chromium.requested) < 150
    assert chromium.run(f"{SHOWN}.length") == 300
    chromium.run("document.querySelector('#only-drawn').click()")
    assert chromium.run(f"{SHOWN}.length") == len([k for k in range(300) if k % 4 == 0 and (k % 10 or not k)])
    chromium.run("document.querySelector('#only-all').click(), document.querySelector('#by-faults').click()")
    first = f"{SHOWN}.sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)[0].textContent"
    assert "slide <001>" in chromium.run(first)
    chromium.run("document.querySelector('#by-tiles').click()")
    assert "slide <010>" in chromium.run(first)


SHOWN = "[...document.querySelectorAll('.slides > li')].filter(one => getComputedStyle(one).display !== 'none')"


def _check_picture(png, width, dark, path):
    """As wide as the window, on the right ground, and with many colours on it."""
    path.write_bytes(png)  # to be looked at when the test fails
    image = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    assert image.shape[1] == width
    ground = image[2, 2].mean()
    assert ground < 60 if dark else ground > 200
    grey = image[::3, ::3].mean(axis=2)
    assert np.mean(np.abs(grey - ground) > 40) > 0.01, "blank, or almost"
    assert len(np.unique(grey.round())) > 50
