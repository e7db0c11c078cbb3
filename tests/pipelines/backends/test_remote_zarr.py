"""Slides behind a URL, from a real server on this machine: the pixels of the folder, and every way a server fails."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from pipelines.backends import remote_zarr
from pipelines.backends.registry import open_slide
from pipelines.catalog.catalog import SlideSpec, find_slides
from pipelines.catalog.handles import SlidePool, SlideState
from pipelines.labels.slide_labels import SlideLabels, find_labels
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Slide, SlideError, TileReadError, url_path
from pipelines.tiles.index_settings import IndexSettings
from pipelines.tiles.slide_index import SlideTiles, index_slide
from pipelines.tiles.tile_table import SlideFault
from tests.helpers.slide_server import SlideServer, serving
from tests.pipelines.backends.test_slides import pyramid, write_ome_zarr

ALWAYS = 1 << 30


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlideServer]:
    """A server of a folder ``served``."""
    monkeypatch.setattr(remote_zarr, "_silent_until", {})
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    (tmp_path / "served").mkdir()
    (tmp_path / "slides").mkdir()
    with serving(tmp_path / "served") as running:
        yield running


@functools.cache
def _written(version: str) -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return write_ome_zarr(folder / "a.ome.zarr", version=version, axes="cyx")


def pointed(server: SlideServer, version: str = "0.4", name: str = "a") -> Path:
    """A slide of the server, as a path that stands for its URL."""
    shutil.copytree(_written(version), server.folder / f"{name}.ome.zarr")
    return url_path(f"{server.url}/{name}.ome.zarr")


def whole(slide: Slide) -> Region:
    return Region(0, 0, slide.levels[0].width, slide.levels[0].height, slide.mpp)


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_the_pixels_are_those_of_the_folder(server: SlideServer, version: str) -> None:
    path = pointed(server, version)
    with open_slide(path) as slide, open_slide(server.folder / "a.ome.zarr") as folder:
        assert (slide.backend, slide.mpp, slide.levels) == ("zarr", folder.mpp, folder.levels)
        np.testing.assert_array_equal(slide.read(whole(slide)), pyramid()[0])
        for region in (Region(31, 200, 300, 150, 0.25), Region(5, 7, 90, 80, 0.9)):
            np.testing.assert_array_equal(slide.read(region), folder.read(region))


def test_shards_are_read_in_ranges_or_not_at_all(server: SlideServer) -> None:
    pixels = pyramid()[0][:256, :256]
    zarr.create_array(server.folder / "a.zarr", data=pixels, chunks=(64, 64, 3), shards=(128, 128, 3))
    with open_slide(url_path(f"{server.url}/a.zarr"), mpp=0.5) as slide:
        np.testing.assert_array_equal(slide.read(Region(30, 30, 70, 200, 0.5)), pixels[30:230, 30:100])
        server.ranges = False
        with pytest.raises(SlideError, match="it ignores ranges"):
            slide.read(Region(0, 0, 64, 64, 0.5))


def test_s3(server: SlideServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pointed(server)
    (server.folder / "bucket").mkdir()
    (server.folder / "a.ome.zarr").rename(server.folder / "bucket" / "a.ome.zarr")
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "reader",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    with open_slide(url_path("s3://bucket/a.ome.zarr")) as slide:
        np.testing.assert_array_equal(slide.read(whole(slide)), pyramid()[0])
        (server.folder / "bucket" / "a.ome.zarr" / "0" / "0.1.1").unlink()
        with pytest.raises(TileReadError, match=r"chunk 0\.1\.1 is not in the store"):
            slide.read(whole(slide))
    with pytest.raises(SlideError, match=r"none of zarr\.json.*check the URL"):
        open_slide(url_path("s3://bucket/b.ome.zarr"))


@pytest.mark.parametrize("file", ["0.zarray", ".zattrs", "0/0.0.0"])
def test_what_a_server_sends_has_an_end(server: SlideServer, file: str) -> None:
    """The server says the true size and sends 64 MiB."""
    path = pointed(server)
    server.faults[file.replace("0.zarray", "0/.zarray")] = ("swell", ALWAYS)
    with pytest.raises(SlideError, match="sends more than"), open_slide(path) as slide:
        slide.read(whole(slide))


@pytest.mark.parametrize("file", [".zattrs", "0/0.0.0"])
def test_answers_that_are_packed_are_refused(server: SlideServer, file: str) -> None:
    path = pointed(server)
    server.faults[file] = ("pack", ALWAYS)
    with pytest.raises(SlideError, match="packs it"), open_slide(path) as slide:
        slide.read(whole(slide))


@pytest.mark.parametrize("file", [".zattrs", "0/0.0.0"])
@pytest.mark.parametrize("place", ["to http://localhost:{port}/copy", "to file://", "to http://127.0.0.1:1"])
def test_a_redirect_to_another_host_is_refused(server: SlideServer, place: str, file: str) -> None:
    path = pointed(server)
    shutil.copytree(server.folder / "a.ome.zarr", server.folder / "copy" / "a.ome.zarr")
    server.faults[f"/a.ome.zarr/{file}"] = (place, ALWAYS)
    with pytest.raises(SlideError, match="redirects to another"), open_slide(path) as slide:
        slide.read(whole(slide))
    assert not any("/copy" in asked for asked in server.asked)


def test_redirects_within_the_host_are_followed_and_have_an_end(server: SlideServer) -> None:
    path = pointed(server)
    shutil.copytree(server.folder / "a.ome.zarr", server.folder / "copy" / "a.ome.zarr")
    server.faults["0/0.0.0"] = ("to /copy", 1)
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read(whole(slide)), pyramid()[0])
        server.faults["0/0.0.0"] = ("to ", ALWAYS)
        with pytest.raises(SlideError, match="redirects more than 5 times"):
            slide.read(whole(slide))


@pytest.mark.parametrize("status", [404, 403])
def test_a_url_without_a_slide(server: SlideServer, status: int) -> None:
    if status == 403:
        server.faults[""] = ("refuse", ALWAYS)
    with pytest.raises(SlideError, match=r"http.*/b\.ome\.zarr: none of zarr\.json.*404 or 403"):
        open_slide(url_path(f"{server.url}/b.ome.zarr"))


def test_a_missing_chunk_is_damage_and_fails_alone(server: SlideServer) -> None:
    path = pointed(server)
    (server.folder / "a.ome.zarr" / "0" / "0.1.1").unlink()
    with open_slide(path) as slide:
        with pytest.raises(TileReadError, match=r"chunk 0\.1\.1 is not in the store"):
            slide.read(Region(113, 97, 10, 10, slide.mpp))
        np.testing.assert_array_equal(slide.read(Region(0, 0, 110, 90, slide.mpp)), pyramid()[0][:90, :110])


@pytest.mark.parametrize("fault", ["drop", "cut", "hang"])
def test_a_fault_that_passes_is_not_seen(server: SlideServer, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pointed(server)
    with open_slide(path) as slide:
        monkeypatch.setattr(remote_zarr, "ANSWER_S", 0.5)
        server.faults["/0/0.1.1"] = (fault, 1)
        np.testing.assert_array_equal(slide.read(Region(120, 100, 90, 80, 0.25)), pyramid()[0][100:180, 120:210])
        assert server.faults["/0/0.1.1"] == (fault, 0)


@pytest.mark.parametrize("fault", ["drop", "hang"])
def test_a_fault_that_stays_is_the_slides(server: SlideServer, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the tile's: a server that is gone must not make a slide look damaged. Tiles do not each wait for it."""
    path = pointed(server)
    what = r"no answer within 0\.4 s" if fault == "hang" else "Disconnected"
    with open_slide(path) as slide:
        monkeypatch.setattr(remote_zarr, "ANSWER_S", 0.4)
        server.faults["/0/0.1.1"] = (fault, ALWAYS)
        for most_s in (3.0, 0.3):
            started_s = time.monotonic()
            with pytest.raises(SlideError, match=f"0/0.1.1 cannot be fetched, tried 2 times: .*{what}") as fault_info:
                slide.read(Region(113, 97, 10, 10, slide.mpp))
            assert not isinstance(fault_info.value, TileReadError)
            assert time.monotonic() - started_s < most_s
            if fault == "drop":
                break


def test_a_server_that_hangs_or_is_gone_at_opening(server: SlideServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pointed(server)
    monkeypatch.setattr(remote_zarr, "ANSWER_S", 0.4)
    server.faults[""] = ("hang", ALWAYS)
    with pytest.raises(SlideError, match=r"zarr\.json cannot be fetched, tried 2 times: no answer within"):
        open_slide(path)
    monkeypatch.setattr(remote_zarr, "ANSWER_S", 20.0)  # nobody waits for it: a refusal comes at once
    with pytest.raises(SlideError, match=r"cannot be fetched, tried 2 times: Client"):
        open_slide(url_path("http://127.0.0.1:9/a.ome.zarr"))  # nobody listens there


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://host/a.zarr", "begins with http://"),
        ("http://", "begins with http://"),
        ("http://a.zarr/x y", "begins with http://"),
        ("https://reader:secret@host/a.zarr", "holds a user name or password"),
        ("https://host/a.zarr?token=1", "no `\\?`"),
    ],
)
def test_a_table_that_holds_no_url(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "labels.csv").write_text(f"slide,label\na,1\n{text},2\n")
    with pytest.raises(ValueError, match=f"line 3: .*{message}") as fault:
        find_slides(tmp_path)
    assert "secret" not in str(fault.value)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    registered = sys.modules["fsspec.registry"]._registry  # what was imported before
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    for scheme in ("http", "https"):
        monkeypatch.delitem(registered, scheme, raising=False)
    with pytest.raises(SlideError, match=r'not installed .*pip install "megatile\[remote\]"'):
        open_slide(url_path("https://host/a.zarr"))


def _with_another_class(folder: Path) -> Path:
    table = folder / "both.csv"
    (folder / "b.svs").touch()
    table.write_text((folder / "labels.csv").read_text() + "b,2\n")
    return table


def test_the_catalog_the_state_and_the_pool(server: SlideServer) -> None:
    path = pointed(server)
    folder = server.folder.parent / "slides"
    (folder / "labels.csv").write_text(f"slide,label\n{server.url}/a.ome.zarr/,1\n{server.url}/a.ome.zarr,1\n")
    (spec,) = find_slides(folder)
    assert (spec.slide_id, spec.path) == ("a", path)
    table = _with_another_class(folder)
    labels = find_labels(folder, find_slides(folder), labels=table)
    assert isinstance(labels, SlideLabels)
    assert labels.label["a"] == labels.classes.index("1")
    spec = SlideSpec("a", path, state=SlideState.of(path))
    with contextlib.closing(SlidePool([spec], 1)) as pool, pool.lease("a") as slide:
        np.testing.assert_array_equal(slide.read(Region(0, 0, 90, 80, 0.25)), pyramid()[0][:80, :90])
    state = SlideState.of(path)
    assert state.is_of(path, thorough=True)
    server.faults[""] = ("drop", ALWAYS)
    assert state.is_of(path, thorough=True), "not known to be another"
    server.faults.clear()
    other = server.folder / "a.ome.zarr"
    (other / ".zattrs").write_text((other / ".zattrs").read_text().replace("0.25", "0.26"))
    assert not state.is_of(path, thorough=True)


def test_a_server_that_goes_is_a_fault_of_its_slide(server: SlideServer) -> None:
    """Found while the slide is indexed: not taken for damage, and the tiles are those of the folder before it goes."""
    spec = SlideSpec("a", pointed(server))
    settings = IndexSettings(tile=128, mpp=0.25, min_tissue=0.0)
    folder = index_slide(SlideSpec("a", server.folder / "a.ome.zarr"), settings, 1).found
    remote = index_slide(spec, settings, 1).found
    assert isinstance(folder, SlideTiles)
    assert isinstance(remote, SlideTiles)
    np.testing.assert_array_equal(remote.l0_x, folder.l0_x)
    np.testing.assert_array_equal(remote.tissue, folder.tissue)
    server.faults["/0.0.0"] = ("drop", ALWAYS)
    fault = index_slide(spec, settings, 1).found
    assert isinstance(fault, SlideFault)
    assert re.search(r"0\.0\.0 cannot be fetched, tried 2 times", fault.error)


def _sum_in_child(path: Path, results: multiprocessing.SimpleQueue[int]) -> None:
    with open_slide(path) as slide:
        results.put(int(slide.read(Region(0, 0, 200, 200, 0.25)).sum()))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_read_while_its_parent_does(server: SlideServer) -> None:
    path = pointed(server)
    with open_slide(path) as slide:
        expected = int(pyramid()[0][:200, :200].sum())
        assert int(slide.read(Region(0, 0, 200, 200, 0.25)).sum()) == expected
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        child = context.Process(target=_sum_in_child, args=(path, results))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert results.get() == expected
        assert int(slide.read(Region(0, 0, 200, 200, 0.25)).sum()) == expected
