"""Whole indexes over real and damaged slides, in processes of their own."""

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
from pipelines.catalog.failures import FailedSlides
from pipelines.catalog.processes import Limits, WorkerCrashed
from pipelines.slides.slide import SlideError
from pipelines.tiles.index import TileTable, build_index, pinned
from pipelines.tiles.index_parts import IndexPart
from pipelines.tiles.index_settings import IndexSettings
from tests.helpers.real import DICOM, NDPI, PYRAMID_TIFF, SVS

SETTINGS = IndexSettings(tile=512)


def specs_of(**paths):
    return [SlideSpec(slide_id, path) for slide_id, path in paths.items()]


def blank(path):
    cv2.imwrite(str(path), np.full((1500, 1500, 3), 240, np.uint8))
    return SlideSpec(path.stem, path, mpp=0.5)


def contents(table):
    return [(table.slide_id(i), table.region(i), float(table.tissue[i])) for i in range(len(table))]


def test_real_slides_are_indexed(tmp_path, in_processes):
    lines = []
    table = build_index(
        specs_of(dapi=NDPI, svs=SVS), SETTINGS, tmp_path, workers=2, progress=lambda told: lines.append(str(told))
    )
    assert table.slides == ("dapi", "svs")
    assert sorted(lines)[0].startswith("1/2  ")
    assert any("svs: " in line and "37% tissue, 2220 x 2967 px at 0.499 um/px, " in line for line in lines)
    assert (table.tissue >= SETTINGS.min_tissue).all()
    for spec in specs_of(dapi=NDPI, svs=SVS):
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
    specs = [
        *specs_of(cut=tmp_path / "cut.svs", empty=tmp_path / "empty.svs", gone=tmp_path / "gone.svs", small=DICOM),
        *specs_of(svs=SVS, text=tmp_path / "text.svs"),
        blank(tmp_path / "blank.png"),
    ]
    table = build_index(specs, SETTINGS, tmp_path / "out", workers=2)
    assert table.slides == ("svs",)
    failed = {slide: (step, error) for slide, step, error in FailedSlides(tmp_path / "out/failed_slides.csv").rows()}
    assert {slide: step for slide, (step, _) in failed.items()} == {
        "blank": "tiles", "cut": "open", "empty": "open", "gone": "open", "small": "tiles", "text": "open",
    }  # fmt: skip
    assert "no tissue" in failed["blank"][1]
    assert "larger than the slide (50 x 50 px" in failed["small"][1]
    assert (tmp_path / "out/tissue/blank.png").exists(), "the picture shows why"


def test_a_slide_that_kills_its_process_is_named(tmp_path, monkeypatch):
    # A library that aborts cannot be had on purpose; processes that die for good are in test_processes.py.
    from pipelines.tiles import index as module

    def each(task, specs, workers, limits):
        for spec in specs:
            yield spec, WorkerCrashed("SIGABRT") if spec.slide_id == "killer" else task(spec)

    monkeypatch.setattr(module, "map_isolated", each)
    table = build_index(specs_of(killer=NDPI, svs=SVS), SETTINGS, tmp_path)
    assert table.slides == ("svs",)
    assert FailedSlides(tmp_path / "failed_slides.csv").rows() == [
        ("killer", "process", "the process working on it died (SIGABRT)")
    ]


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
    assert build_index(specs, SETTINGS, tmp_path, workers=2).slides == ("svs",)
    failed = {slide: (step, error) for slide, step, error in FailedSlides(tmp_path / "failed_slides.csv").rows()}
    assert failed["slow"] == ("process", "it was given up after 8 s, the time that one may take")
    assert failed["greedy"][0] == "open"
    assert "it needs more memory than a slide may take, 900 s and 4." in failed["greedy"][1]


def write_sparse(path, side, tile=4096):
    """A BigTIFF of ``side`` x ``side`` px whose tiles were never written: offsets and byte counts are 0."""
    tiles = (-(-side // tile)) ** 2
    table = 16 + 8 + 14 * 20 + 8
    entries = [
        (256, 4, 1, side), (257, 4, 1, side), (258, 3, 3, 8 | 8 << 16 | 8 << 32), (259, 3, 1, 8), (262, 3, 1, 2),
        (277, 3, 1, 3), (282, 5, 1, 20000 | 1 << 32), (283, 5, 1, 20000 | 1 << 32), (284, 3, 1, 1), (296, 3, 1, 3),
        (322, 4, 1, tile), (323, 4, 1, tile), (324, 16, tiles, table), (325, 16, tiles, table + 8 * tiles),
    ]  # fmt: skip
    page = struct.pack("<Q", len(entries)) + b"".join(struct.pack("<HHQQ", *entry) for entry in entries) + bytes(8)
    path.write_bytes(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 16) + page + bytes(16 * tiles))


def test_a_sparse_slide_of_a_million_px_is_refused_at_once(tmp_path):
    write_sparse(tmp_path / "sparse.tif", 1 << 20)
    begun_s = time.monotonic()
    assert build_index(specs_of(sparse=tmp_path / "sparse.tif", svs=SVS), SETTINGS, tmp_path, workers=1).slides == (
        "svs",
    )
    assert time.monotonic() - begun_s < 60
    ((slide, step, error),) = FailedSlides(tmp_path / "failed_slides.csv").rows()
    assert slide == "sparse"
    assert step in ("open", "tissue")
    assert "1,048,576" in error or "1048576" in error


def test_a_name_too_long_for_its_picture_costs_its_slide_only(tmp_path):
    name = "d" * 255  # a DICOM slide is called by its folder, which may be as long
    table = build_index(specs_of(**{name: SVS}, svs=SVS), SETTINGS, tmp_path, workers=1)
    assert table.slides == ("svs",)
    ((slide, step, error),) = FailedSlides(tmp_path / "failed_slides.csv").rows()
    assert (slide, step) == (name, "overlay")
    assert "too long a name: rename the slide or its folder" in error


def test_all_bad_is_an_error_that_lists_them(tmp_path):
    (tmp_path / "text.svs").write_text("not a slide")
    specs = [*specs_of(text=tmp_path / "text.svs"), blank(tmp_path / "blank.png")]
    for _ in range(2):  # from the index that remembers it as well
        with pytest.raises(
            SlideError, match=r"none of 2 slides can be used:\n  text: open: .*content is text.*\n  blank: tiles"
        ):
            build_index(specs, SETTINGS, tmp_path / "out", workers=1)


def test_no_slides_and_bad_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got none"):
        build_index([], SETTINGS, tmp_path)
    with pytest.raises(ValueError, match="--tile is at least 1 px, or slide; got 0; --min-tissue"):
        build_index(specs_of(svs=SVS), replace(SETTINGS, tile=0, min_tissue=2), tmp_path)


def test_an_index_is_reused_and_other_settings_are_refused(tmp_path):
    specs = specs_of(svs=SVS)
    first = build_index(specs, SETTINGS, tmp_path, workers=1)
    written = (tmp_path / "tiles.parquet").stat().st_mtime_ns
    lines = []
    again = build_index(specs, SETTINGS, tmp_path, progress=lambda told: lines.append(str(told)))
    assert contents(again) == contents(first)
    assert (tmp_path / "tiles.parquet").stat().st_mtime_ns == written
    assert lines == [f"in {tmp_path / 'tiles.parquet'} already: 1 slide"]
    with pytest.raises(ValueError, match=r"tiles.parquet .* tile is 512 there, 1024 was asked for"):
        build_index(specs, IndexSettings(), tmp_path)
    with pytest.raises(ValueError, match=r"slide-mpp of svs is that of the file there, 0.25 was asked for"):
        build_index([replace(specs[0], mpp=0.25)], SETTINGS, tmp_path)


def test_an_index_in_which_every_slide_failed_takes_other_settings(tmp_path):
    specs = specs_of(svs=SVS)
    with pytest.raises(SlideError, match="larger than the slide"):
        build_index(specs, replace(SETTINGS, mpp=40.0), tmp_path, workers=1)
    assert len(build_index(specs, SETTINGS, tmp_path, workers=1))
    with pytest.raises(ValueError, match=r"mpp is 0.5 there, 40.0 was asked for"):
        build_index(specs, replace(SETTINGS, mpp=40.0), tmp_path)


def test_new_slides_are_added_as_if_indexed_in_one_go(tmp_path):
    specs = specs_of(b=SVS, a=NDPI, c=SVS)
    build_index(specs[:1], SETTINGS, tmp_path / "grown", workers=1)
    grown = build_index(specs, SETTINGS, tmp_path / "grown", workers=1)
    whole = build_index(specs, SETTINGS, tmp_path / "whole", workers=2)
    assert contents(grown) == contents(whole)
    assert grown.slides == ("b", "a", "c"), "the order asked for"
    saved = [TileTable.load(tmp_path / name / "tiles.parquet") for name in ("grown", "whole")]
    assert contents(saved[0]) == contents(saved[1])
    assert saved[0].slides == ("a", "b", "c")


def test_a_slide_that_is_not_asked_for_stays_in_the_file_only(tmp_path, caplog):
    specs = specs_of(a=SVS, b=NDPI)
    build_index(specs, SETTINGS, tmp_path, workers=1)
    with caplog.at_level(logging.INFO):
        assert build_index(specs[1:], SETTINGS, tmp_path).slides == ("b",)
    assert "also holds 1 slide not asked for, e.g. a" in caplog.text
    assert TileTable.load(tmp_path / "tiles.parquet").slides == ("a", "b")


def test_a_changed_slide_is_indexed_anew(tmp_path):
    path = tmp_path / "s.svs"
    os.link(SVS, path)
    first = build_index(specs_of(s=path), SETTINGS, tmp_path / "out", workers=1)
    path.unlink()
    os.link(NDPI, path)
    assert contents(build_index(specs_of(s=path), SETTINGS, tmp_path / "out", workers=1)) != contents(first)


def replaced(path, by=SVS, at=700_000):
    """Another slide of the same size and time in the place of ``path``."""
    before = path.stat()
    whole = bytearray(by.read_bytes())
    whole[at : at + 200_000] = whole[at + 200_000 : at + 400_000]
    path.unlink()
    path.write_bytes(whole)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_slide_replaced_by_one_of_the_same_size_is_indexed_anew_or_refused(tmp_path):
    path = tmp_path / "s.svs"
    path.write_bytes(SVS.read_bytes())
    specs = specs_of(s=path)
    table = build_index(specs, SETTINGS, tmp_path / "out", workers=1)
    (spec,) = pinned(specs, table)
    spec.verify_unchanged()
    os.utime(path)
    spec.verify_unchanged()  # touched, not replaced
    lines = []
    build_index(
        specs, SETTINGS, tmp_path / "out", workers=1, progress=lambda told: lines.append(str(told)), resumed=True
    )
    replaced(path)
    with pytest.raises(ValueError, match=r"replaced or changed since: s\. Put the files back"):
        build_index(specs, SETTINGS, tmp_path / "out", workers=1, resumed=True)
    os.utime(path, ns=(0, 0))
    with pytest.raises(SlideError, match="not the slide that was indexed"):
        spec.verify_unchanged()
    build_index(specs, SETTINGS, tmp_path / "out", workers=1, progress=lambda told: lines.append(str(told)))
    assert [line.split(":")[0] for line in lines] == [
        f"in {tmp_path / 'out/tiles.parquet'} already",
        "1/1  s",
    ]


@pytest.mark.parametrize("damage", ["table", "pixels"])
def test_damage_of_the_level_that_is_read_is_seen_though_the_overview_is_whole(tmp_path, damage):
    # 13 x 18 compressed tiles of 178 px... the overview comes from a coarser level, which stays whole.
    path = tmp_path / "s.tif"
    whole = bytearray(PYRAMID_TIFF.read_bytes())
    page = read_tiff(PYRAMID_TIFF).pages[0]
    offsets, counts = page.array(Tag.TILE_OFFSETS), page.array(Tag.TILE_BYTES)
    if damage == "table":
        entries = counts.astype("<u4").tobytes()
        at = whole.index(entries)
        whole[at : at + 4] = bytes(4)
    else:
        for offset, count in zip(offsets.tolist(), counts.tolist(), strict=True):
            whole[offset : offset + count] = bytes(count)
    path.write_bytes(whole)
    settings = replace(SETTINGS, min_tissue=0)
    if damage == "pixels":
        with pytest.raises(SlideError, match="most tiles cannot be read, though the slide's overview can"):
            build_index(specs_of(s=path), settings, tmp_path / "out", workers=1)
        return
    table = build_index(specs_of(s=path), settings, tmp_path / "out", workers=1)
    before = build_index(specs_of(s=PYRAMID_TIFF), settings, tmp_path / "whole", workers=1)
    assert len(table) == len(before) - 1
    assert (0, 0) not in zip(table.l0_x.tolist(), table.l0_y.tolist(), strict=True)
    ((slide, step, error),) = FailedSlides(tmp_path / "out" / "failed_slides.csv").rows()
    assert (slide, step) == ("s", "tiles")
    assert error.startswith("left out, as damaged: 1 tile with tissue: ")


def test_failed_slides_are_remembered_until_a_retry_or_a_change(tmp_path):
    path = tmp_path / "s.svs"
    path.write_text("not a slide")
    specs = specs_of(ok=SVS, s=path)
    out = tmp_path / "out"

    def lines_of(**options):
        lines = []
        table = build_index(specs, SETTINGS, out, workers=1, progress=lambda told: lines.append(str(told)), **options)
        return table.slides, lines

    assert lines_of()[0] == ("ok",)
    slides, lines = lines_of()
    assert (slides, len(lines)) == (("ok",), 1)
    slides, lines = lines_of(retry_failed=True)
    assert lines[1].startswith("1/1  s: failed at open")
    assert len(FailedSlides(out / "failed_slides.csv").rows()) == 1, "a retry replaces its row"
    path.unlink()
    os.link(NDPI, path)
    assert lines_of()[0] == ("ok", "s")
    assert not (out / "failed_slides.csv").exists()


def test_an_interrupted_index_keeps_what_was_found(tmp_path):
    def stop(line):
        raise KeyboardInterrupt

    specs = specs_of(a=SVS, b=NDPI)
    with pytest.raises(KeyboardInterrupt):
        build_index(specs, SETTINGS, tmp_path, workers=1, progress=stop)
    lines = []
    build_index(specs, SETTINGS, tmp_path, workers=1, progress=lambda told: lines.append(str(told)))
    assert [line.split(":")[0] for line in lines[1:]] == ["1/1  b"]


def test_no_minimum_keeps_every_tile_of_a_blank_slide(tmp_path):
    spec = blank(tmp_path / "blank.png")
    table = build_index([spec], replace(SETTINGS, min_tissue=0.0), tmp_path / "out", workers=1)
    assert len(table) == 9
    assert (table.tissue == 0).all()


def test_too_little_tissue_says_how_much_there_is(tmp_path):
    with pytest.raises(SlideError, match=r"no tile has 100% tissue: the fullest has \d\d.\d+%, the slide 37.\d+%"):
        build_index(specs_of(svs=SVS), IndexSettings(tile=2048, min_tissue=1.0), tmp_path, workers=1)


def test_an_mpp_that_no_level_has_is_a_fault_of_the_slide(tmp_path):
    table = build_index(specs_of(dapi=NDPI, svs=SVS), replace(SETTINGS, mpp=0.25), tmp_path, workers=1)
    assert table.slides == ("dapi",)
    ((slide, step, error),) = FailedSlides(tmp_path / "failed_slides.csv").rows()
    assert (slide, step) == ("svs", "tiles")
    assert "mpp 0.25 cannot be had: the finest level of this slide has 0.499" in error


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        build_index(specs_of(svs=SVS), SETTINGS, tmp_path / "file" / "out")


def test_every_shipped_slide_is_indexed_or_named(tmp_path):
    specs = find_slides(SVS.parent)
    table = build_index(specs, SETTINGS, tmp_path, workers=2)
    named = {slide for slide, _, _ in FailedSlides(tmp_path / "failed_slides.csv").rows()}
    assert named == {"highdicom_sm_image"}
    assert set(table.slides) | named == {spec.slide_id for spec in specs}


def test_parts_are_taken_over_by_the_whole(tmp_path, monkeypatch):
    settings = replace(SETTINGS, min_tissue=0)
    specs = [blank(tmp_path / f"{name}.png") for name in "abc"]
    (tmp_path / "text.svs").write_text("not a slide")
    specs += specs_of(text=tmp_path / "text.svs")
    out = tmp_path / "out"
    expected = contents(build_index(specs, settings, tmp_path / "at_once", workers=1))
    first, second = (build_index(specs, settings, out, workers=1, part=IndexPart(k, 2)) for k in (1, 2))
    assert (first.slides, second.slides) == (("a", "c"), ("b",))
    assert {path.name for path in out.glob("*.parquet")} == {"tiles.part-1-of-2.parquet", "tiles.part-2-of-2.parquet"}
    from pipelines.tiles import index as module

    each = module.map_isolated
    monkeypatch.setattr(module, "map_isolated", None)  # nothing is left to be found
    lines = []
    whole = build_index(specs, settings, out, workers=1, progress=lambda told: lines.append(str(told)))
    assert contents(whole) == expected
    assert contents(TileTable.load(out / "tiles.parquet")) == expected
    assert [fault.slide_id for fault in whole.faults] == ["text"]
    assert lines == [f"in {out / 'tiles.parquet'} already: 4 slides"]
    assert contents(build_index(specs, settings, out, part=IndexPart(1, 3))) == expected[:9], "other parts, the same"
    for name in ("tiles.parquet", "tiles.part-1-of-3.parquet"):
        (out / name).unlink()
    with pytest.raises(ValueError, match=r"part-1-of-2\.parquet was made with other settings: tile is 512 there"):
        build_index(specs, replace(settings, tile=256), out, part=IndexPart(1, 9))

    # A slide that failed is tried again by a user, one whose file has changed by everybody.
    tried = []
    monkeypatch.setattr(
        module, "map_isolated", lambda t, s, w, limits: (tried.extend(i.slide_id for i in s), each(t, s, w))[1]
    )
    cv2.imwrite(str(tmp_path / "b.png"), np.full((1700, 1700, 3), 200, np.uint8))
    build_index(specs, settings, out, workers=1, retry_failed=True)
    assert tried == ["b", "text"]


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/2/3", "-1/2"])
def test_parts_that_are_none(text):
    with pytest.raises(ValueError, match=r"--part is one of several parts, such as 2/8, from 1/8 to 8/8; got "):
        IndexPart.parse(text)
