"""The page of all slides: who is flagged, in which order, and that names do no harm."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.helpers.slides_page import write_many


def test_flags_orders_and_names(tmp_path: Path) -> None:
    page = write_many(tmp_path, 40)
    root = ElementTree.fromstring(page.read_text().removeprefix("<!DOCTYPE html>"))  # well-formed, names escaped
    slides = {
        "".join(item.find("h3").itertext()): item  # type: ignore[union-attr]
        for item in root.iter("li")
        if "card" in item.get("class", "")
    }
    assert len(slides) == 40

    def flagged(name: str) -> set[int]:
        return {int(slide[7:10]) for slide, item in slides.items() if name in item.get("class", "").split()}

    assert flagged("fault") == {1, 10, 20, 30}
    assert flagged("pale") == set(range(5))
    assert flagged("drawn") == {0, 4, 8, 12, 16, 24, 28, 32, 36}
    counts = re.findall(r"<span>([a-z ]+) <small>(\d+)</small>", page.read_text())
    assert counts[:3] == [("all", "40"), ("with faults", "4"), ("little tissue", "5")]

    def first(order: str, count: int = 3) -> list[int]:
        places = {
            int(slide[7:10]): int(re.findall(rf"--{order}:(\d+);", item.get("style", ""))[0])
            for slide, item in slides.items()
        }
        return sorted(places, key=lambda k: places[k])[:count]

    assert first("name") == [0, 1, 2]
    assert first("faults", 4) == [1, 10, 20, 30]
    assert first("tissue", 2) == [10, 20]
    assert first("tiles", 5) == [10, 20, 30, 0, 1]
    picture = slides["slide <004>"].find(".//img")
    assert picture is not None
    assert (picture.get("src"), picture.get("loading")) == ("tissue/small/slide%20%3C004%3E.jpg", "lazy")
    assert (
        "".join(slides["slide <010>"].itertext()).split("open: ")[1].strip() == "/slides/10.svs: the file is cut short"
    )
