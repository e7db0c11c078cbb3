import cv2
import numpy as np

from pipelines.tiles.overlay import CAPTION_PX, LONGER_SIDE_PX, draw_overlay, read_thumbnail
from pipelines.tiles.tissue import Overview, TissueMask


def draw(width, height, tiles, fractions, l0_tile, background=255):
    pixels = np.full((height, width, 3), background, np.uint8)
    mask = np.zeros((height // 4, width // 4), bool)
    origins = np.array(tiles, np.int64).reshape(-1, 2)
    thumbnail = Overview(pixels, 100, 200, 10.0, 5.0, np.zeros(pixels.shape[:2], np.bool_))
    if width > LONGER_SIDE_PX:
        thumbnail = read_thumbnail(None, thumbnail, 1)  # large enough, so that the slide is not read
    png = draw_overlay(
        thumbnail,
        TissueMask(mask, 100, 200, 40.0, 20.0),
        origins[:, 0],
        origins[:, 1],
        np.array(fractions, np.float32),
        (l0_tile, l0_tile),
        "a caption",
    )
    picture = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    return cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)


def test_fuller_tiles_are_tinted_more_and_the_rest_not_at_all():
    picture = draw(400, 300, [(100, 200), (2100, 1200)], [1.0, 0.5], 1000)
    full, half, none = picture[50, 50], picture[150, 250], picture[250, 50]
    assert none.tolist() == [255, 255, 255]
    np.testing.assert_allclose(full, [178, 211, 255], atol=1)
    np.testing.assert_allclose(half, [217, 233, 255], atol=1)
    assert picture[100, 250].tolist() == picture[199, 250].tolist() == [0, 110, 255], "outlines lie on the border px"


def test_large_slides_are_drawn_small():
    picture = draw(4000, 1000, [], [], 100)
    assert picture.shape == (LONGER_SIDE_PX // 4 + CAPTION_PX, LONGER_SIDE_PX, 3)


def test_tiles_smaller_than_an_outline_are_only_tinted():
    tiles = [(100 + 30 * x, 200 + 30 * y) for x in range(20) for y in range(20)]
    picture = draw(400, 300, tiles, [1.0] * 400, 30)
    assert (picture[:60, :60] == picture[0, 0]).all()
    np.testing.assert_allclose(picture[0, 0], [178, 211, 255], atol=1)


def test_tiles_show_on_black():
    picture = draw(400, 300, [(100, 200)], [1.0], 1000, background=0)
    assert picture[0, 50].tolist() == [255, 190, 0]


def test_a_thumbnail_of_a_few_px_can_be_drawn():
    assert draw(8, 8, [(100, 200)], [0.5], 40).shape == (8 + CAPTION_PX, 8, 3)


def test_caption_and_scale_bar_are_there():
    strip = draw(800, 300, [], [], 10)[-CAPTION_PX:]
    dark = strip.max(axis=2) < 80
    assert dark[27:30, 12:200].all(), "1 mm at 5 um/px are 200 px"
    assert not dark[27:30, 215:225].any()
    assert dark[:, 230:400].any()
