"""Whole indexes over real and damaged slides."""

import logging
import os
import struct
import time
from dataclasses import replace

import cv2
import numpy as np
import pytest

from pipelines.backends.tiff_page import Tag
from pipelines.backends.tiff_tags import read_tiff
from pipelines.catalog.catalog import SlideSpec, find_slides
from pipelines.catalog.processes import Limits, WorkerCrashed
from pipelines.catalog.table import FailedSlides
from pipelines.slides.slide import SlideError
from pipelines.tiles import index
from pipelines.tiles.index import build_index, with_index_state
from pipelines.tiles.tile_table import IndexPart, TileTable
from pipelines.tiles.tiling import IndexSettings
from pipelines.tiles.windows import WindowSettings, find_windows
from tests.helpers.real import DICOM, NDPI, PYRAMID_TIFF, SVS

SETTINGS = IndexSettings(tile=512)


def specs_of(**paths):
    return [SlideSpec(slide_id, path) for slide_id, path in paths.items()]


def failed_in(out):
    """Step and error of each failed slide."""
    return {slide: (step, error) for slide, step, error in FailedSlides(out / "failed_slides.csv").rows()}


def build(specs, out, settings=SETTINGS, workers=1, **options):
    """The table, and the lines of progress."""
    lines = []
    table = build_index(specs, settings, out, workers=workers, progress=lambda each: lines.append(str(each)), **options)
    return table, lines


def blank(path):
    cv2.imwrite(str(path), np.full((1500, 1500, 3), 240, np.uint8))
    return SlideSpec(path.stem, path, mpp=0.5)


def stop(line):
    raise KeyboardInterrupt


def contents(table):
    return [(table.slide_id(i), table.region(i), float(table.tissue[i])) for i in range(len(table))]


def test_real_slides_are_indexed(tmp_path, in_processes):
    specs = specs_of(dapi=NDPI, svs=SVS)
    table, lines = build(specs, tmp_path, workers=2)
    assert table.slides == ("dapi", "svs")
    assert sorted(lines)[0].startswith("1/2  ")
    assert any("svs: " in line and "37% tissue, 2220 x 2967 px at 0.499 um/px, " in line for line in lines)
    assert (table.tissue >= SETTINGS.min_tissue).all()
    for spec in specs:
        with spec.open() as slide:
            for i in np.flatnonzero([table.slide_id(i) == spec.slide_id for i in range(len(table))]):
                mean = slide.read(table.region(i)).mean()
                assert mean > 5 if spec.slide_id == "dapi" else mean < 240
    assert contents(TileTable.load(tmp_path / "tiles.parquet")) == contents(table)
    assert {p.name for p in tmp_path.rglob("*.*")} == {"tiles.parquet", "dapi.png", "svs.png"}
    assert cv2.imread(str(tmp_path / "tissue" / "svs.png")).shape[1] > 900


def test_a_bad_slide_is_named_and_the_others_go_on(tmp_path):
    (tmp_path / "text.svs").write_text("not a slide")
    (tmp_path / "cut.svs").write_bytes(SVS.read_bytes()[:900_000])
    (tmp_path / "empty.svs").write_bytes(b"")
    write_sparse(tmp_path / "sparse.tif", 1 << 20)
    paths = {name: tmp_path / f"{name}.svs" for name in ("cut", "empty", "gone", "text")}
    long_name = "d" * 255  # a DICOM slide is called by its folder, which may be as long
    paths |= {"small": DICOM, "svs": SVS, "sparse": tmp_path / "sparse.tif", long_name: SVS}
    begun_s = time.monotonic()
    table, _ = build([*specs_of(**paths), blank(tmp_path / "blank.png")], tmp_path / "out")
    assert time.monotonic() - begun_s < 60
    assert table.slides == ("svs",)
    failed = failed_in(tmp_path / "out")
    steps = dict.fromkeys(("cut", "empty", "gone", "text"), "open") | {"blank": "tiles", "small": "tiles"}
    assert {slide: step for slide, (step, _) in failed.items()} == steps | {
        long_name: "overlay",
        "sparse": failed["sparse"][0],
    }
    assert failed["sparse"][0] in ("open", "tissue")
    for slide, words in (
        ("blank", "no tissue"),
        ("small", "larger than the slide (50 x 50 px"),
        (long_name, "too long a name: rename the slide or its folder"),
    ):
        assert words in failed[slide][1]
    assert "1048576" in failed["sparse"][1].replace(",", "")
    assert (tmp_path / "out/tissue/blank.png").exists(), "the picture shows why"


def test_a_slide_that_kills_its_process_is_named(tmp_path, monkeypatch):
    """A library that aborts cannot be had on purpose; processes that die for good are in test_processes.py."""

    def each(task, specs, workers, limits):
        for spec in specs:
            yield spec, WorkerCrashed("SIGABRT") if spec.slide_id == "killer" else task(spec)

    monkeypatch.setattr(index, "map_isolated", each)
    assert build(specs_of(killer=NDPI, svs=SVS), tmp_path)[0].slides == ("svs",)
    assert failed_in(tmp_path) == {"killer": ("process", "the process working on it died (SIGABRT)")}


class Slow(SlideSpec):
    def open(self):
        time.sleep(600)


class Greedy(SlideSpec):
    def open(self):
        return np.ones(3 << 30, np.uint8)


@pytest.mark.long
def test_a_slide_that_takes_too_much_is_named_with_the_limit(tmp_path, monkeypatch, in_processes):
    monkeypatch.setattr("pipelines.tiles.index.slide_limits", lambda threads: Limits(8, 2 << 30))
    specs = [Slow("slow", SVS), Greedy("greedy", SVS), *specs_of(svs=SVS)]
    assert build(specs, tmp_path, workers=2)[0].slides == ("svs",)
    failed = failed_in(tmp_path)
    assert failed["slow"] == ("process", "it was given up after 8 s, the time that one may take")
    assert failed["greedy"][0] == "open"
    assert "it needs more memory than a slide may take, 900 s and 4." in failed["greedy"][1]


def write_sparse(path, side, tile=4096):
    """A BigTIFF of ``side`` x ``side`` px whose tiles were never written: offsets and byte counts are 0."""
    tiles = (-(-side // tile)) ** 2
    table = 16 + 8 + 14 * 20 + 8
    shorts = {258: 8 | 8 << 16 | 8 << 32, 259: 8, 262: 2, 277: 3, 284: 1, 296: 3}
    entries = [(tag, 3, 3 if tag == 258 else 1, value) for tag, value in shorts.items()]
    entries += [(tag, 4, 1, value) for tag, value in ((256, side), (257, side), (322, tile), (323, tile))]
    entries += [(tag, 5, 1, 20000 | 1 << 32) for tag in (282, 283)]
    entries += [(324, 16, tiles, table), (325, 16, tiles, table + 8 * tiles)]
    page = struct.pack("<Q", 14) + b"".join(struct.pack("<HHQQ", *entry) for entry in sorted(entries)) + bytes(8)
    path.write_bytes(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 16) + page + bytes(16 * tiles))


def test_all_bad_is_an_error_that_lists_them(tmp_path):
    (tmp_path / "text.svs").write_text("not a slide")
    specs = [*specs_of(text=tmp_path / "text.svs"), blank(tmp_path / "blank.png")]
    words = r"none of 2 slides can be used:\n  text: open: .*content is text.*\n  blank: tiles"
    for _ in range(2):  # from the index that remembers it as well
        with pytest.raises(SlideError, match=words):
            build(specs, tmp_path / "out")


@pytest.mark.parametrize(
    ("paths", "changes", "out", "error", "words"),
    [
        ({}, {}, "out", ValueError, "got none"),
        ({"svs": SVS}, {"tile": 0, "min_tissue": 2}, "out", ValueError, "--tile is at least 1 px, .*; --min-tissue"),
        (
            {"svs": SVS},
            {"tile": 2048, "min_tissue": 1.0},
            "out",
            SlideError,
            r"no tile has 100\.00% tissue: the fullest has \d\d.\d+%, the slide 37.\d+%",
        ),
        ({"svs": SVS}, {}, "file/out", NotADirectoryError, "Not a directory"),
    ],
)
def test_what_cannot_be_indexed_says_why(tmp_path, paths, changes, out, error, words):
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=words):
        build(specs_of(**paths), tmp_path / out, replace(SETTINGS, **changes))


@pytest.mark.parametrize(("least", "words"), [(1e-6, "any tissue .*not found$"), (0.25, "25.00% tissue .*--min-tis")])
def test_a_blank_slide_has_no_windows(tmp_path, least, words):
    with pytest.raises(SlideError, match="no window has " + words):
        find_windows(blank(tmp_path / "blank.png"), WindowSettings(512, 0.5, 1, 384, least, 8.0), 1)


def test_an_index_is_reused_and_other_settings_are_refused(tmp_path):
    specs = specs_of(svs=SVS)
    with pytest.raises(SlideError, match="larger than the slide"):
        build(specs, tmp_path, replace(SETTINGS, mpp=40.0))
    first, _ = build(specs, tmp_path)  # in which every slide failed takes other settings
    written = (tmp_path / "tiles.parquet").stat().st_mtime_ns
    again, lines = build(specs, tmp_path)
    assert contents(again) == contents(first)
    assert (tmp_path / "tiles.parquet").stat().st_mtime_ns == written
    assert lines == [f"in {tmp_path / 'tiles.parquet'} already: 1 slide"]
    for changed, settings, words in (
        (specs, IndexSettings(), r"tiles.parquet .* tile is 512 there, 1024 was asked for"),
        (specs, replace(SETTINGS, mpp=40.0), r"mpp is 0.5 there, 40.0 was asked for"),
        ([replace(specs[0], mpp=0.25)], SETTINGS, "slide-mpp of svs is that of the file there, 0.25 was asked for"),
    ):
        with pytest.raises(ValueError, match=words):
            build(changed, tmp_path, settings)


def test_new_slides_are_added_as_if_indexed_in_one_go_and_all_stay_in_the_file(tmp_path, caplog):
    specs = specs_of(b=SVS, a=NDPI, c=SVS)
    build(specs[:1], tmp_path / "grown")
    grown, _ = build(specs, tmp_path / "grown")
    whole, _ = build(specs, tmp_path / "whole", workers=2)
    assert contents(grown) == contents(whole)
    assert grown.slides == ("b", "a", "c"), "the order asked for"
    saved = [TileTable.load(tmp_path / name / "tiles.parquet") for name in ("grown", "whole")]
    assert contents(saved[0]) == contents(saved[1])
    with caplog.at_level(logging.INFO):
        assert build(specs[:2], tmp_path / "grown")[0].slides == ("b", "a")
    assert "also holds 1 slide not asked for, e.g. c" in caplog.text
    assert TileTable.load(tmp_path / "grown" / "tiles.parquet").slides == ("a", "b", "c")


def test_a_slide_replaced_by_one_of_the_same_size_is_indexed_anew_or_refused(tmp_path):
    path, out = tmp_path / "s.svs", tmp_path / "out"
    path.write_bytes(SVS.read_bytes())
    specs = specs_of(s=path)
    table, _ = build(specs, out)
    (spec,) = with_index_state(specs, table)
    spec.verify_unchanged()
    os.utime(path)
    spec.verify_unchanged()  # touched, not replaced
    assert build(specs, out, resumed=True)[1][0].startswith(f"in {out / 'tiles.parquet'} already")
    before, whole = path.stat(), bytearray(SVS.read_bytes())
    whole[700_000:900_000] = whole[900_000:1_100_000]
    path.unlink()
    path.write_bytes(whole)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match=r"replaced or changed since: s\. Put the files back"):
        build(specs, out, resumed=True)
    os.utime(path, ns=(0, 0))
    with pytest.raises(SlideError, match="not the slide that was indexed"):
        spec.verify_unchanged()
    anew, lines = build(specs, out)
    assert lines[0].startswith("1/1  s")
    path.unlink()
    os.link(NDPI, path)
    assert contents(build(specs, out)[0]) != contents(anew)


@pytest.mark.parametrize("damage", ["table", "pixels"])
def test_damage_of_the_level_that_is_read_is_seen_though_the_overview_is_whole(tmp_path, damage):
    """13 x 18 compressed tiles of 178 px; the overview comes from a coarser level, which stays whole."""
    path, whole = tmp_path / "s.tif", bytearray(PYRAMID_TIFF.read_bytes())
    page = read_tiff(PYRAMID_TIFF).pages[0]
    offsets, counts = page.array(Tag.TILE_OFFSETS), page.array(Tag.TILE_BYTES)
    if damage == "table":
        at = whole.index(counts.astype("<u4").tobytes())
        whole[at : at + 4] = bytes(4)
    else:
        for offset, count in zip(offsets.tolist(), counts.tolist(), strict=True):
            whole[offset : offset + count] = bytes(count)
    path.write_bytes(whole)
    settings, out = replace(SETTINGS, min_tissue=0), tmp_path / "out"
    if damage == "pixels":
        with pytest.raises(SlideError, match="most tiles cannot be read, though the slide's overview can"):
            build(specs_of(s=path), out, settings)
        return
    table, _ = build(specs_of(s=path), out, settings)
    before, _ = build(specs_of(s=PYRAMID_TIFF), tmp_path / "whole", settings)
    assert len(table) == len(before) - 1
    assert (0, 0) not in zip(table.l0_x.tolist(), table.l0_y.tolist(), strict=True)
    step, error = failed_in(out)["s"]
    assert step == "tiles"
    assert error.startswith("left out, as damaged: 1 tile with tissue: ")


def test_failed_slides_are_remembered_until_a_retry_or_a_change(tmp_path):
    path, out = tmp_path / "s.svs", tmp_path / "out"
    path.write_text("not a slide")
    specs = specs_of(ok=SVS, s=path)
    assert build(specs, out)[0].slides == ("ok",)
    table, lines = build(specs, out)
    assert (table.slides, len(lines)) == (("ok",), 1)
    assert build(specs, out, retry_failed=True)[1][1].startswith("1/1  s: failed at open")
    assert len(FailedSlides(out / "failed_slides.csv").rows()) == 1, "a retry replaces its row"
    path.unlink()
    os.link(NDPI, path)
    assert build(specs, out, resumed=True)[0].slides == ("ok",), "the run has begun without it"
    assert build(specs, out)[0].slides == ("ok", "s")
    assert not FailedSlides(out / "failed_slides.csv").rows()


def test_an_interrupted_index_keeps_what_was_found(tmp_path):
    specs = specs_of(a=SVS, b=NDPI)
    with pytest.raises(KeyboardInterrupt):
        build_index(specs, SETTINGS, tmp_path, workers=1, progress=stop)
    assert [line.split(":")[0] for line in build(specs, tmp_path)[1][1:]] == ["1/1  b"]


def test_faults_that_an_interrupted_retry_did_not_come_to_are_listed_again(tmp_path):
    specs, out = [blank(tmp_path / f"{name}.png") for name in "abc"], tmp_path / "out"
    with pytest.raises(SlideError, match="none of 3 slides"):
        build(specs, out)
    with pytest.raises(KeyboardInterrupt):
        build_index(specs, SETTINGS, out, workers=1, progress=stop, retry_failed=True)
    with pytest.raises(SlideError, match="none of 3 slides"):
        build(specs, out)
    assert [slide for slide, _, _ in FailedSlides(out / "failed_slides.csv").rows()] == ["a", "b", "c"]


def test_no_minimum_keeps_every_tile_of_a_blank_slide(tmp_path):
    table, _ = build([blank(tmp_path / "blank.png")], tmp_path / "out", replace(SETTINGS, min_tissue=0.0))
    assert len(table) == 9
    assert (table.tissue == 0).all()


def test_every_shipped_slide_is_indexed_or_named_as_one_without_its_mpp(tmp_path):
    specs = find_slides(SVS.parent)
    table, _ = build(specs, tmp_path, workers=2)
    assert failed_in(tmp_path).keys() == {"highdicom_sm_image"}
    assert {*table.slides, "highdicom_sm_image"} == {spec.slide_id for spec in specs}
    finer, _ = build(specs_of(dapi=NDPI, svs=SVS), tmp_path / "finer", replace(SETTINGS, mpp=0.25))
    assert finer.slides == ("dapi",)
    step, error = failed_in(tmp_path / "finer")["svs"]
    assert step == "tiles"
    assert "mpp 0.25 cannot be had: the finest level of this slide has 0.499" in error


def test_a_part_in_which_every_slide_failed_is_no_hindrance_to_other_settings(tmp_path):
    settings, specs = replace(SETTINGS, min_tissue=0), [blank(tmp_path / f"{name}.png") for name in "ab"]
    with pytest.raises(SlideError):
        build(specs, tmp_path / "out", replace(settings, tile=1 << 14), part=IndexPart(1, 2))
    whole, _ = build(specs, tmp_path / "out", settings, part=IndexPart(2, 2))
    assert whole.slides == ("b",)


def test_tiles_of_a_part_replace_a_fault_of_the_whole_unless_a_run_is_resumed(tmp_path):
    settings, out = replace(SETTINGS, min_tissue=0), tmp_path / "out"
    specs = [blank(tmp_path / f"{name}.png") for name in "ab"]
    picture = specs[0].path.read_bytes()
    specs[0].path.write_bytes(bytes(len(picture)))
    assert build(specs, out, settings)[0].slides == ("b",)
    specs[0].path.write_bytes(picture)
    build(specs, out, settings, part=IndexPart(1, 1), retry_failed=True)
    for resumed, slides in ((True, ("b",)), (False, ("a", "b"))):
        assert build(specs, out, settings, resumed=resumed)[0].slides == slides


def test_parts_are_taken_over_by_the_whole(tmp_path, monkeypatch):
    settings, out = replace(SETTINGS, min_tissue=0), tmp_path / "out"
    specs = [blank(tmp_path / f"{name}.png") for name in "abc"]
    (tmp_path / "text.svs").write_text("not a slide")
    specs += specs_of(text=tmp_path / "text.svs")
    expected = contents(build(specs, tmp_path / "at_once", settings)[0])
    first, second = (build(specs, out, settings, part=IndexPart(k, 2))[0] for k in (1, 2))
    assert (first.slides, second.slides) == (("a", "c"), ("b",))
    assert {path.name for path in out.glob("*.parquet")} == {"tiles.part-1-of-2.parquet", "tiles.part-2-of-2.parquet"}
    each = index.map_isolated
    monkeypatch.setattr(index, "map_isolated", None)  # nothing is left to be found
    whole, lines = build(specs, out, settings)
    assert contents(whole) == contents(TileTable.load(out / "tiles.parquet")) == expected
    assert [fault.slide_id for fault in whole.faults] == ["text"]
    assert lines == [f"in {out / 'tiles.parquet'} already: 4 slides"]
    assert contents(build(specs, out, settings, part=IndexPart(1, 3))[0]) == expected[:9], "other parts, the same"
    for name in ("tiles.parquet", "tiles.part-1-of-3.parquet"):
        (out / name).unlink()
    with pytest.raises(ValueError, match=r"part-1-of-2\.parquet was made with other settings: tile is 512 there"):
        build(specs, out, replace(settings, tile=256), part=IndexPart(1, 9))

    # A slide that failed is tried again by a user, one whose file has changed by everybody.
    tried = []
    monkeypatch.setattr(
        index, "map_isolated", lambda t, s, w, limits: (tried.extend(i.slide_id for i in s), each(t, s, w))[1]
    )
    cv2.imwrite(str(tmp_path / "b.png"), np.full((1700, 1700, 3), 200, np.uint8))
    build(specs, out, settings, retry_failed=True)
    assert tried == ["b", "text"]
