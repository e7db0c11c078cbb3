"""ASAP and ImageScope XML: real files, the conventions of Camelyon, holes, and documents that are refused."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.labels import annotation_xml
from pipelines.labels.annotation_xml import read_xml
from pipelines.labels.drawing import Origin
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import SlideError
from tests.helpers.drawings import annotations_in, blank_slide, edge_distance, mask_of

SAMPLES = Path(__file__).parents[2] / "data" / "annotations"


def square(left, top, side):
    return [(left, top), (left + side, top), (left + side, top + side), (left, top + side)]


def asap(path, *annotations, groups=""):
    """Group, type and points of each annotation; the points are written backwards, with their order."""
    body = ""
    for group, kind, points in annotations:
        numbered = list(enumerate(points))[::-1]
        coordinates = "".join(f'<Coordinate Order="{k}" X="{x}" Y="{y}"/>' for k, (x, y) in numbered)
        body += f'<Annotation Name="a" Type="{kind}" PartOfGroup="{group}"><Coordinates>{coordinates}</Coordinates>'
        body += "</Annotation>"
    named = "".join(f'<Group Name="{name}" PartOfGroup="None"/>' for name in groups.split())
    within = f"<Annotations>{body}</Annotations><AnnotationGroups>{named}</AnnotationGroups>"
    path.write_text(f"<ASAP_Annotations>{within}</ASAP_Annotations>")
    return path


def region(points, kind=0, negative=0):
    vertices = "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in points)
    about = f'Id="1" Type="{kind}" NegativeROA="{negative}"'
    return f"<Region {about}><Attributes/><Vertices>{vertices}</Vertices></Region>"


def layer(name, *regions, described=None):
    attribute = "" if described is None else f'<Attribute Name="Description" Id="0" Value="{described}"/>'
    within = f"<Regions><RegionAttributeHeaders/>{''.join(regions)}</Regions>"
    return f'<Annotation Id="7" Name="{name}"><Attributes>{attribute}</Attributes>{within}</Annotation>'


def imagescope(path, *layers):
    path.write_text(f'<Annotations MicronsPerPixel="0.25">{"".join(layers)}</Annotations>')
    return path


def painted(folder, side, bounds=None):
    """Class ids of the first pixels of slide ``a``, from the files in ``folder``, and the classes."""
    truth = annotations_in(folder, "a")
    slide = blank_slide(400, 300, bounds=bounds)
    return mask_of(truth, "a", slide, Region(0, 0, side, side, 0.5)), truth.classes


@pytest.mark.parametrize(
    ("name", "polygons", "classes", "left_out"),
    [
        ("asap-polygon.xml", 1, ("foreground",), {}),
        ("asap-pointset.xml", 0, (), {"PointSet": 1}),
        ("imagescope-tcga.xml", 4, ("CaP", "layer_3", "layer_4"), {}),
    ],
)
def test_real_files(name, polygons, classes, left_out):
    drawing = read_xml(SAMPLES / name)
    assert (len(drawing.box), drawing.classes, drawing.left_out) == (polygons, classes, left_out)
    assert drawing.origin is Origin.LEVEL0


def shoelace(drawing, polygon):
    (x, y) = drawing.rings(polygon)[0].T
    return abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def test_areas_are_those_that_imagescope_states():
    """Its Area attributes, in px squared, of the four regions."""
    drawing = read_xml(SAMPLES / "imagescope-tcga.xml")
    stated = [29046449.6, 641099844.1, 3853031.2, 8308723.7]
    assert [shoelace(drawing, k) for k in range(4)] == pytest.approx(stated, rel=2e-3)


def test_camelyon16_exclusions_are_painted_last(tmp_path):
    drawn = ("_2", "Polygon", square(2, 2, 3)), ("_0", "Polygon", square(0, 0, 8)), ("_1", "Spline", square(9, 0, 2))
    asap(tmp_path / "a.xml", *drawn)
    mask, classes = painted(tmp_path, 12)
    expected = np.zeros((12, 12), np.uint8)
    expected[:8, :8] = expected[:2, 9:11] = 1
    expected[2:5, 2:5] = 0
    np.testing.assert_array_equal(mask, expected)
    assert classes == ("background", "Tumor")


def test_camelyon17_normal_lies_within_metastases(tmp_path):
    drawn = ("normal", "Polygon", square(2, 2, 3)), ("metastases", "Polygon", square(0, 0, 8))
    asap(tmp_path / "a.xml", *drawn, groups="metastases normal")
    mask, classes = painted(tmp_path, 9)
    assert classes == ("background", "metastases")
    assert (mask[3, 3], mask[1, 1], mask.sum()) == (0, 1, 55)
    asap(tmp_path / "a.xml", drawn[0])  # of another study: a class like any other
    assert painted(tmp_path, 9)[1] == ("background", "normal")


@pytest.mark.parametrize(
    "ring",
    [
        [(0, 0), (20, 0), (20, 14), (4, 14), (4, 6), (12, 6), (12, 18), (0, 18)],  # crosses its own area: wound twice
        [(1, 1), (15, 15), (15, 1), (1, 15)],  # two lobes, one each way
        [(2, 2), (18, 2), (18, 18), (2, 18), (2, 2), (6, 6), (14, 6), (14, 14), (6, 14), (6, 6)],  # twice around
    ],
)
def test_rings_that_cross_themselves_have_all_that_they_wind_around(ring, tmp_path):
    """As in ASAP's own masks (AnnotationToMask.cpp: a winding number that is not zero)."""
    asap(tmp_path / "a.xml", ("x", "Polygon", ring))
    mask, _ = painted(tmp_path, 22)
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


def test_groups_are_classes_and_the_rest_is_counted(tmp_path):
    drawn = [("gland &amp; duct", "Rectangle", square(0, 0, 4)), ("None", "Polygon", square(5, 0, 2))]
    rest = [("x", "Dot", [(1, 1)]), ("x", "Polygon", [(1, 1), (2, 2)]), ("x", "Polygon", [(0, 0), (5, 5), (9, 9)])]
    drawing = read_xml(asap(tmp_path / "a.xml", *drawn, *rest, groups="x"))
    assert drawing.classes == ("gland & duct", "foreground")
    assert drawing.left_out == {"Dot": 1, "Polygon of fewer than 3 points": 1, "area that encloses nothing": 1}
    np.testing.assert_array_equal(drawing.rings(0)[0], square(0, 0, 4))


def test_coordinates_count_from_level_0_whatever_the_bounds(tmp_path):
    asap(tmp_path / "a.xml", ("x", "Polygon", square(10, 20, 5)))
    mask, _ = painted(tmp_path, 40, Bounds(3, 4, 300, 200))
    assert np.argwhere(mask)[[0, -1]].tolist() == [[20, 10], [24, 14]]


def test_negative_regions_are_cut_out_of_their_layer_only(tmp_path):
    holes = (6, 6, 3), (8, 1, 3), (7, 7, 3)  # one inside, one that reaches beyond its area, two that overlap
    first, *others = (region(square(*hole), negative=1) for hole in holes)
    layers = layer("stroma", region(square(0, 0, 12))), layer("tumor", first, region(square(2, 2, 8)), *others)
    imagescope(tmp_path / "a.xml", *layers)
    mask, classes = painted(tmp_path, 13)
    expected = np.zeros((13, 13), np.uint8)
    expected[:12, :12] = classes.index("stroma")
    expected[2:10, 2:10] = classes.index("tumor")
    for left, top, side in holes:
        expected[top : top + side, left : left + side] = classes.index("stroma")
    np.testing.assert_array_equal(mask, expected)


def test_rectangles_and_ellipses_by_their_corners(tmp_path):
    """The ellipse's box and area are those of a file of ImageScope: Area="1517.4" for 46 x 42 px."""
    corners = region([(0, 0), (30, 20)], kind=1), region([(6595, 24009), (6641, 24051)], kind=2)
    layers = layer("x", *corners), layer("", region([(0, 0), (9, 9)], kind=3), described="")
    drawing = read_xml(imagescope(tmp_path / "a.xml", *layers, layer("", region(square(0, 0, 2)), described="gland")))
    assert drawing.classes == ("x", "gland")
    assert drawing.left_out == {"region of type 3": 1}
    np.testing.assert_array_equal(drawing.box[:2], [[0, 0, 30, 20], [6595, 24009, 6641, 24051]])
    assert shoelace(drawing, 1) == pytest.approx(1517.4, rel=3e-4)


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><ASAP_Annotations>&b;</ASAP_Annotations>'
FOREIGN = '<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/hostname">]><Annotations>&f;</Annotations>'
STAR = [(1000.0 * (k % 2) + k / 100, float(k)) for k in range(10_000)]
STAR += [(y, x) for x, y in STAR]
"""The areas of a ring with 25 million crossings would take gigabytes."""


def in_asap(body):
    return f"<ASAP_Annotations>\n{body}</ASAP_Annotations>"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "declares a document type"),
        (FOREIGN, "declares a document type"),
        ("<Annotations>&x;</Annotations>", "not XML"),
        ("", "not XML"),
        ("<ASAP_Annotations><Annotations>", "not XML"),
        ("<html></html>", "root element is 'html'"),
        (in_asap('<Annotation Type="Blob"/>'), "line 2: unknown annotation type 'Blob'"),
        (in_asap('<Coordinate X="1"/>'), "KeyError: 'Y'"),
        (in_asap('<Coordinate X="1" Y="b"/>'), "could not convert"),
        (f"<Annotations>{layer('x', region(square(0, 0, float('nan'))))}</Annotations>", "not a finite number"),
        (f"<Annotations>{layer('x', region(square(0, 0, 9), kind=2))}</Annotations>", "two corners of its box"),
        ("ring", "crosses itself more than"),
        ("hole", "crosses itself more than"),
    ],
    ids=range(13),
)
def test_what_is_refused_says_why(tmp_path, text, words):
    path = tmp_path / "a.xml"
    if text == "ring":
        asap(path, ("x", "Polygon", STAR))
    elif text == "hole":
        imagescope(path, layer("x", region(square(0, 0, 900)), region(STAR, negative=1)))
    else:
        path.write_text(text)
    with pytest.raises(SlideError, match=r"a\.xml") as caught:
        read_xml(path)
    assert words in str(caught.value)


@pytest.fixture
def short_tokens(monkeypatch):
    monkeypatch.setattr(annotation_xml, "TOKEN_BYTES", 1 << 10)
    monkeypatch.setattr(annotation_xml, "CHUNK_BYTES", 1 << 8)


@pytest.mark.usefixtures("short_tokens")
@pytest.mark.parametrize("token", ['<Annotation Name="{}"', "<!--{}", "<{}", "<?p {}"])
def test_a_long_token_is_refused(tmp_path, token):
    """The parser reads an unfinished token again and again: 100 MB of it took hours."""
    (tmp_path / "a.xml").write_text("<ASAP_Annotations>" + token.format("a" * 10_000))
    with pytest.raises(SlideError, match="a tag, comment or value of more than"):
        read_xml(tmp_path / "a.xml")


@pytest.mark.usefixtures("short_tokens")
def test_long_text_and_many_elements_are_no_long_token(tmp_path):
    path = asap(tmp_path / "a.xml", *[("x", "Polygon", square(k, 0, 5)) for k in range(50)])
    path.write_text(path.read_text().replace("<Annotations>", "<Annotations>" + "text \n" * 5000))
    assert len(read_xml(path).polygon_class) == 50
