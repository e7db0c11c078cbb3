"""Maps of a prediction: windows blended, areas drawn, and batch norms in the convolutions before them."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import shapely
import torch
from hypothesis import given
from hypothesis import strategies as st
from shapely.geometry import shape
from torch import nn

from app.prediction import blending, share
from app.prediction.blending import Blender, chunks, gaussian_window
from app.prediction.command import PredictCommand
from app.prediction.computation import with_folded_norms
from app.prediction.slide_files import area_of, feature, largest_areas, peaks, polygons_of, without_saddles
from models.registry import build_model


def blended(blender, windows, height):
    rows, row = [], 0
    for x, y, values in windows:
        if y > row:
            rows += blender.rows_above(y)
            row = y
        blender.add(x, y, values)
    return np.concatenate([*rows, *blender.rows_above(height)], axis=1)


@pytest.mark.parametrize(("side", "cell", "stride"), [(256, 32, 6), (252, 36, 5), (250, 50, 4), (251, 251, 1)])
def test_windows_of_a_classifier_overlap_by_cells(side, cell, stride, monkeypatch):
    index = SimpleNamespace(whole_pictures=False, tile=side, mpp=0.5, min_tissue=0.25, tissue_mpp=8.0)
    model = SimpleNamespace(config=SimpleNamespace(index=index), task="classify", tile=side, stain_target=None)
    monkeypatch.setattr(share, "predict_slide", lambda spec, model, windows, *_: windows)
    predict, what = share._predictor(model, PredictCommand(Path("slides"), Path("best.pt")))
    windows = predict(None, None)
    assert (windows.cell, windows.stride) == (cell, stride)
    assert ("--overlap 0.25 has no effect" in what) == (side == 251)


def test_two_windows_that_overlap_by_one_column(tmp_path):
    weights = np.array([[1.0, 3.0], [1.0, 3.0]], np.float32)
    windows = [(0, 0, np.full((1, 2, 2), 0.2, np.float32)), (1, 0, np.full((1, 2, 2), 0.6, np.float32))]
    with closing(Blender(1, 4, 3, weights, tmp_path)) as blender:
        done = blended(blender, windows, 3)
    middle = (3 * 0.2 + 1 * 0.6) / (3 + 1)
    expected = [[0.2, middle, 0.6, 0.0], [0.2, middle, 0.6, 0.0], [0.0, 0.0, 0.0, 0.0]]
    np.testing.assert_allclose(done[0], expected, rtol=1e-6)


@pytest.mark.parametrize("spilled", [False, True])
def test_any_windows_equal_sums_over_the_whole_canvas(spilled, tmp_path, monkeypatch):
    if spilled:
        monkeypatch.setattr(blending, "SPILL_BYTES", 64)  # a file, let go of again and again
    random = np.random.default_rng(3)
    height, width, side = 41, 23, 7
    weights = gaussian_window(side)
    origins = [(x, y) for y in (0, 3, 6, 20, 34) for x in (0, 5, 9, 16) if random.random() < 0.8]
    windows = [(x, y, random.random((2, side, side)).astype(np.float32)) for x, y in origins]
    sums, total = np.zeros((2, height, width)), np.zeros((height, width))
    for x, y, values in windows:
        sums[:, y : y + side, x : x + side] += values * weights
        total[y : y + side, x : x + side] += weights
    expected = np.divide(sums, total, out=np.zeros_like(sums), where=total > 0)
    with closing(Blender(2, width, height, weights, tmp_path)) as blender:
        done = blended(blender, windows, height)
    np.testing.assert_allclose(done, expected, atol=1e-6)
    assert not list(tmp_path.iterdir())


def test_a_window_that_reaches_beyond_the_canvas_is_cut_off(tmp_path):
    with closing(Blender(1, 2, 2, gaussian_window(4), tmp_path)) as blender:
        done = blended(blender, [(0, 0, np.full((1, 4, 4), 0.5, np.float32))], 2)
    np.testing.assert_allclose(done, np.full((1, 2, 2), 0.5), rtol=1e-6)


def test_the_gaussian_has_an_eighth_of_the_side_as_its_deviation():
    weights = gaussian_window(9)
    assert weights[4, 4] == 1
    assert weights[4, 5] == weights[5, 4] == pytest.approx(np.exp(-0.5 * (1 / (9 / 8)) ** 2))
    assert weights[0, 0] == pytest.approx(1e-3)  # never 0: a corner may be all that there is


def test_bands_are_cut_anew():
    bands = [np.arange(k * 2).reshape(1, k, 2) + 100 * k for k in (3, 1, 7, 2)]
    cut = list(chunks(iter(bands), 4))
    assert [chunk.shape[1] for chunk in cut] == [4, 4, 4, 1]
    np.testing.assert_array_equal(np.concatenate(cut, 1), np.concatenate(bands, 1))


def test_a_square_with_a_hole():
    mask = np.zeros((6, 7), bool)
    mask[1:5, 2:6] = True
    mask[2, 3] = False
    (polygon,) = polygons_of(mask)
    assert [sorted(map(tuple, ring.tolist())) for ring in polygon] == [
        [(2, 1), (2, 5), (6, 1), (6, 5)],
        [(3, 2), (3, 3), (4, 2), (4, 3)],
    ]
    assert area_of(polygon) == 15
    assert polygons_of(np.zeros((3, 3), bool)) == []


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=5, max_size=5))
def test_any_mask_is_valid_polygons_of_its_area(rows):
    mask = without_saddles(np.array(rows))
    assert not (np.array(rows) & ~mask).any()
    polygons = polygons_of(mask)
    shapes = [shape(feature(polygon, "a", (1, 2, 3), {})["geometry"]) for polygon in polygons]
    assert all(geometry.is_valid for geometry in shapes)
    assert sum(map(area_of, polygons)) == mask.sum() == sum(geometry.area for geometry in shapes)
    y, x = np.nonzero(mask)
    points = shapely.points(x + 0.5, y + 0.5)
    assert sum(np.count_nonzero(shapely.contains(geometry, points)) for geometry in shapes) == mask.sum()


def test_the_peak_of_each_area():
    mask = np.array([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1]], bool)
    values = np.array([[9, 50, 200, 0], [0, 30, 0, 80], [0, 0, 0, 90]], np.uint8)
    assert sorted(peaks(mask, polygons_of(mask), values)) == [(1, 0, 50), (3, 2, 90)]
    assert peaks(mask & False, [], values) == []


def test_geojson_is_what_qupath_writes():
    (polygon,) = polygons_of(np.ones((2, 3), bool))
    placed = [np.minimum(10.0 * ring, (25.0, 100.0)) for ring in polygon]
    written = feature(placed, "tumour", (1, 2, 3), {"Area µm^2": 125.0})
    assert written["geometry"]["type"] == "Polygon"
    (ring,) = written["geometry"]["coordinates"]
    assert ring[0] == ring[-1]
    assert shape(written["geometry"]).exterior.is_ccw
    assert shape(written["geometry"]).bounds == (0, 0, 25, 20)  # cut off at the slide's edge
    assert written["properties"]["classification"]["name"] == "tumour"
    assert written["properties"]["measurements"] == {"Area µm^2": 125.0}


def test_the_largest_areas_are_kept():
    mask = np.zeros((5, 9), bool)
    mask[0, 0] = mask[2:5, 0:2] = mask[0, 4:7] = True
    kept, left_out = largest_areas(mask, 2)
    mask[0, 0] = False
    np.testing.assert_array_equal(kept, mask)
    assert left_out == 1


def settled(module):
    """``module`` in evaluation mode, its norms with statistics that change what goes through them."""
    generator = torch.Generator().manual_seed(1)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(generator=generator)
            layer.running_var.uniform_(0.5, 2, generator=generator)
    return module.eval()


def norms(module):
    return sum(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())


def test_a_model_without_its_norms_gives_the_same():
    module = settled(build_model("unet_w4", classes=2))
    images = torch.rand(2, 3, 64, 64)
    folded = with_folded_norms(module, images[:1])
    assert (norms(module), norms(folded)) == (18, 0)
    with torch.inference_mode():
        torch.testing.assert_close(folded(images), module(images), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(folded(images[:, :, :32]), module(images[:, :, :32]), rtol=1e-4, atol=1e-5)


class SharedConvolution(nn.Module):
    """One convolution before two norms: its weights cannot take over both."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(2))

    def forward(self, x):
        return self.norms[0](self.convolution(x)) + self.norms[1](self.convolution(x + 1))


class Branching(nn.Sequential):
    """A model whose operations depend on the values that it sees."""

    def forward(self, x):
        return super().forward(x) if x.mean() > 0 else x


@pytest.mark.parametrize("module", [SharedConvolution(), Branching(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))])
def test_what_cannot_be_folded_stays_as_it_is(module):
    assert with_folded_norms(settled(module), torch.rand(1, 3, 16, 16)) is module
