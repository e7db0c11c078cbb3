"""ASAP and ImageScope XML: real files, the conventions of Camelyon, holes, and documents that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipelines.catalog.catalog import SlideSpec
from pipelines.labels import annotation_xml
from pipelines.labels.annotation_xml import read_xml
from pipelines.labels.annotations import SlideAnnotations
from pipelines.labels.drawing import Origin
from pipelines.labels.slide_labels import find_labels
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import SlideError
from tests.helpers.drawings import blank_slide, edge_distance

SAMPLES = Path(__file__).parents[2] / "data" / "annotations"


def square(left: float, top: float, side: float) -> list[tuple[float, float]]:
    return [(left, top), (left + side, top), (left + side, top + side), (left, top + side)]


def asap(path: Path, *annotations: tuple[str, str, Sequence[tuple[float, float]]], groups: str = "") -> Path:
    """Group, type and points of each annotation; the points are written backwards, with their order."""
    body = ""
    for group, kind, points in annotations:
        numbered = list(enumerate(points))[::-1]
        coordinates = "".join(f'<Coordinate Order="{k}" X="{x}" Y="{y}"/>' for k, (x, y) in numbered)
        body += f'<Annotation Name="a" Type="{kind}" PartOfGroup="{group}"><Coordinates>{coordinates}</Coordinates>'
        body += "</Annotation>"
    named = "".join(f'<Group Name="{name}" PartOfGroup="None"/>' for name in groups.split())
    path.write_text(
        f"<ASAP_Annotations><Annotations>{body}</Annotations><AnnotationGroups>{named}</AnnotationGroups>"
        "</ASAP_Annotations>"
    )
    return path


def region(points: Sequence[tuple[float, float]], kind: int = 0, negative: int = 0) -> str:
    vertices = "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in points)
    return (
        f'<Region Id="1" Type="{kind}" NegativeROA="{negative}"><Attributes/><Vertices>{vertices}</Vertices></Region>'
    )


def imagescope(path: Path, *layers: str) -> Path:
    path.write_text(f'<Annotations MicronsPerPixel="0.25">{"".join(layers)}</Annotations>')
    return path


def layer(name: str, *regions: str, attribute: str = "") -> str:
    return (
        f'<Annotation Id="7" Name="{name}"><Attributes>{attribute}</Attributes>'
        f"<Regions><RegionAttributeHeaders/>{''.join(regions)}</Regions></Annotation>"
    )


def mask_of(folder: Path, width: int, height: int, bounds: Bounds | None = None) -> tuple[np.ndarray, SlideAnnotations]:
    """Class ids of the first pixels of slide ``a``, from the files in ``folder``."""
    truth = find_labels(Path("slides"), (SlideSpec("a", Path("slides/a.svs")),), annotations=folder)
    assert isinstance(truth, SlideAnnotations)
    out = np.full((height, width), 77, np.uint8)
    truth.read_mask("a", blank_slide(400, 300, bounds=bounds), Region(0, 0, width, height, 0.5), out)
    return out, truth


@pytest.mark.parametrize(
    ("name", "polygons", "classes", "left_out"),
    [
        ("asap-polygon.xml", 1, ("foreground",), {}),
        ("asap-pointset.xml", 0, (), {"PointSet": 1}),
        ("imagescope-tcga.xml", 4, ("CaP", "layer_3", "layer_4"), {}),
    ],
)
def test_real_files(name: str, polygons: int, classes: tuple[str, ...], left_out: dict[str, int]) -> None:
    drawing = read_xml(SAMPLES / name)
    assert (len(drawing.box), drawing.classes, drawing.left_out) == (polygons, classes, left_out)
    assert drawing.origin is Origin.LEVEL0


def test_areas_are_those_that_imagescope_states() -> None:
    """Its Area attributes, in px squared, of the four regions."""
    drawing = read_xml(SAMPLES / "imagescope-tcga.xml")
    for polygon, stated in enumerate([29046449.6, 641099844.1, 3853031.2, 8308723.7]):
        (x, y) = drawing.rings(polygon)[0].T
        area = abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2
        assert area == pytest.approx(stated, rel=2e-3), polygon


def test_camelyon16_exclusions_are_painted_last(tmp_path: Path) -> None:
    asap(
        tmp_path / "a.xml",
        ("_2", "Polygon", square(2, 2, 3)),
        ("_0", "Polygon", square(0, 0, 8)),
        ("_1", "Spline", square(9, 0, 2)),
    )
    mask, truth = mask_of(tmp_path, 12, 9)
    expected = np.zeros((9, 12), np.uint8)
    expected[:8, :8] = 1
    expected[2:5, 2:5] = 0
    expected[:2, 9:11] = 1
    np.testing.assert_array_equal(mask, expected)
    assert truth.classes == ("background", "Tumor")


def test_camelyon17_normal_lies_within_metastases(tmp_path: Path) -> None:
    drawn = ("normal", "Polygon", square(2, 2, 3)), ("metastases", "Polygon", square(0, 0, 8))
    asap(tmp_path / "a.xml", *drawn, groups="metastases normal")
    mask, truth = mask_of(tmp_path, 9, 9)
    assert truth.classes == ("background", "metastases")
    assert (mask[3, 3], mask[1, 1], mask.sum()) == (0, 1, 55)
    asap(tmp_path / "a.xml", drawn[0])  # of another study: a class like any other
    assert mask_of(tmp_path, 9, 9)[1].classes == ("background", "normal")


@pytest.mark.parametrize(
    "ring",
    [
        [(0, 0), (20, 0), (20, 14), (4, 14), (4, 6), (12, 6), (12, 18), (0, 18)],  # crosses its own area: wound twice
        [(1, 1), (15, 15), (15, 1), (1, 15)],  # two lobes, one each way
        [(2, 2), (18, 2), (18, 18), (2, 18), (2, 2), (6, 6), (14, 6), (14, 14), (6, 14), (6, 6)],  # twice around
    ],
)
def test_rings_that_cross_themselves_have_all_that_they_wind_around(
    ring: list[tuple[int, int]], tmp_path: Path
) -> None:
    """As in ASAP's own masks (AnnotationToMask.cpp: a winding number that is not zero)."""
    asap(tmp_path / "a.xml", ("x", "Polygon", ring))
    mask, _ = mask_of(tmp_path, 22, 22)
    centres = np.arange(22) + 0.5
    winding = np.zeros((22, 22), int)
    for (x0, y0), (x1, y1) in zip(ring, [*ring[1:], ring[0]], strict=True):
        if y0 != y1:
            down, up = (y0 <= centres) & (y1 > centres), (y1 <= centres) & (y0 > centres)
            right_of = centres[None, :] < (x0 + (centres - y0) * (x1 - x0) / (y1 - y0))[:, None]
            winding += right_of * (down.astype(int) - up.astype(int))[:, None]
    assert (np.abs(winding) > 1).any() == (len(ring) != 4)
    near = edge_distance([ring], centres, centres) < 1e-6  # on the edge itself rounding decides
    np.testing.assert_array_equal(mask[~near], (winding != 0)[~near].astype(np.uint8))


def test_an_area_that_encloses_nothing_is_counted(tmp_path: Path) -> None:
    path = asap(tmp_path / "a.xml", ("x", "Polygon", square(0, 0, 4)), ("x", "Polygon", [(0, 0), (5, 5), (9, 9)]))
    drawing = read_xml(path)
    assert (len(drawing.box), drawing.left_out) == (1, {"area that encloses nothing": 1})


def test_groups_are_classes_and_the_rest_is_counted(tmp_path: Path) -> None:
    path = asap(
        tmp_path / "a.xml",
        ("gland &amp; duct", "Rectangle", square(0, 0, 4)),
        ("None", "Polygon", square(5, 0, 2)),
        ("x", "Dot", [(1, 1)]),
        ("x", "Polygon", [(1, 1), (2, 2)]),
        groups="x",
    )
    drawing = read_xml(path)
    assert drawing.classes == ("gland & duct", "foreground")
    assert drawing.left_out == {"Dot": 1, "Polygon of fewer than 3 points": 1}
    np.testing.assert_array_equal(drawing.rings(0)[0], square(0, 0, 4))


def test_coordinates_count_from_level_0_whatever_the_bounds(tmp_path: Path) -> None:
    asap(tmp_path / "a.xml", ("x", "Polygon", square(10, 20, 5)))
    mask, _ = mask_of(tmp_path, 40, 40, Bounds(3, 4, 300, 200))
    assert np.argwhere(mask)[[0, -1]].tolist() == [[20, 10], [24, 14]]


def test_negative_regions_are_cut_out_of_their_layer_only(tmp_path: Path) -> None:
    imagescope(
        tmp_path / "a.xml",
        layer("stroma", region(square(0, 0, 12))),
        # one hole inside, one that reaches beyond its area, two that overlap
        layer(
            "tumor",
            region(square(6, 6, 3), negative=1),
            region(square(2, 2, 8)),
            region(square(8, 1, 3), negative=1),
            region(square(7, 7, 3), negative=1),
        ),
    )
    mask, truth = mask_of(tmp_path, 13, 13)
    expected = np.zeros((13, 13), np.uint8)
    expected[:12, :12] = truth.classes.index("stroma")
    expected[2:10, 2:10] = truth.classes.index("tumor")
    for left, top, side in ((6, 6, 3), (8, 1, 3), (7, 7, 3)):
        expected[top : top + side, left : left + side] = truth.classes.index("stroma")
    np.testing.assert_array_equal(mask, expected)


def test_rectangles_and_ellipses_by_their_corners(tmp_path: Path) -> None:
    """The ellipse's box and area are those of a file of ImageScope: Area="1517.4" for 46 x 42 px."""
    path = imagescope(
        tmp_path / "a.xml",
        layer("x", region([(0, 0), (30, 20)], kind=1), region([(6595, 24009), (6641, 24051)], kind=2)),
        layer("", region([(0, 0), (9, 9)], kind=3), attribute='<Attribute Name="Description" Id="0" Value=""/>'),
        layer("", region(square(0, 0, 2)), attribute='<Attribute Name="Description" Id="0" Value="gland"/>'),
    )
    drawing = read_xml(path)
    assert drawing.classes == ("x", "gland")
    assert drawing.left_out == {"region of type 3": 1}
    np.testing.assert_array_equal(drawing.box[:2], [[0, 0, 30, 20], [6595, 24009, 6641, 24051]])
    (x, y) = drawing.rings(1)[0].T
    assert abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2 == pytest.approx(1517.4, rel=3e-4)


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><ASAP_Annotations>&b;</ASAP_Annotations>'
FOREIGN = '<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/hostname">]><Annotations>&f;</Annotations>'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (BOMB, "declares a document type"),
        (FOREIGN, "declares a document type"),
        ("<Annotations>&x;</Annotations>", "not XML"),
        ("", "not XML"),
        ("<ASAP_Annotations><Annotations>", "not XML"),
        ("<html></html>", "root element is 'html'"),
        ('<ASAP_Annotations>\n<Annotation Type="Blob"/></ASAP_Annotations>', "line 2: unknown annotation type 'Blob'"),
        ('<ASAP_Annotations><Coordinate X="1"/></ASAP_Annotations>', "KeyError: 'Y'"),
        ('<ASAP_Annotations><Coordinate X="1" Y="b"/></ASAP_Annotations>', "could not convert"),
        (f"<Annotations>{layer('x', region(square(0, 0, float('nan'))))}</Annotations>", "not a finite number"),
        (f"<Annotations>{layer('x', region(square(0, 0, 9), kind=2))}</Annotations>", "two corners of its box"),
    ],
)
def test_what_is_refused_says_why(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "a.xml").write_text(text)
    with pytest.raises(SlideError, match=r"a\.xml") as caught:
        read_xml(tmp_path / "a.xml")
    assert complaint in str(caught.value)


@pytest.mark.parametrize("token", ['<Annotation Name="{}"', "<!--{}", "<{}", "<?p {}"])
def test_a_long_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """The parser reads an unfinished token again and again: 100 MB of it took hours."""
    monkeypatch.setattr(annotation_xml, "TOKEN_BYTES", 1 << 10)
    monkeypatch.setattr(annotation_xml, "CHUNK_BYTES", 1 << 8)
    path = tmp_path / "a.xml"
    path.write_text("<ASAP_Annotations>" + token.format("a" * 10_000))
    with pytest.raises(SlideError, match="a tag, comment or value of more than"):
        read_xml(path)


def test_long_text_and_many_elements_are_no_long_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotation_xml, "TOKEN_BYTES", 1 << 10)
    monkeypatch.setattr(annotation_xml, "CHUNK_BYTES", 1 << 8)
    path = asap(tmp_path / "a.xml", *[("x", "Polygon", square(k, 0, 5)) for k in range(50)])
    path.write_text(path.read_text().replace("<Annotations>", "<Annotations>" + "text \n" * 5000))
    assert len(read_xml(path).polygon_class) == 50


def test_rings_that_cross_themselves_very_often_are_refused(tmp_path: Path) -> None:
    """The areas of a ring with 25 million crossings would take gigabytes."""
    star = [(1000.0 * (k % 2) + k / 100, float(k)) for k in range(10_000)]
    star += [(float(k), 1000.0 * (k % 2) + k / 100) for k in range(10_000)]
    with pytest.raises(SlideError, match="crosses itself more than"):
        read_xml(asap(tmp_path / "a.xml", ("x", "Polygon", star)))
    cut = imagescope(tmp_path / "b.xml", layer("x", region(square(0, 0, 900)), region(star, negative=1)))
    with pytest.raises(SlideError, match="crosses itself more than"):
        read_xml(cut)
