"""Slides behind a URL, from a real server on this machine: the pixels of the folder, and every way a server fails."""

import contextlib
import shutil
import sys
import time

import numpy as np
import pytest
import zarr

from pipelines.backends import remote_zarr
from pipelines.backends.registry import open_slide
from pipelines.catalog.catalog import SlideSpec, find_slides
from pipelines.catalog.handles import SlidePool, SlideState
from pipelines.labels.slide_labels import find_labels
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError, TileReadError, url_path
from pipelines.tiles.slide_index import index_slide
from pipelines.tiles.tile_table import SlideFault
from pipelines.tiles.tiling import IndexSettings
from tests.helpers.format_files import write_ome_zarr
from tests.helpers.slide_server import serving
from tests.helpers.work import result_in_child
from tests.pipelines.backends.test_slides import pyramid, write_pyramid_zarr

ALWAYS = 1 << 30


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of a folder ``served``."""
    monkeypatch.setattr(remote_zarr, "_silent_until", {})
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    for name in ("served", "slides"):
        (tmp_path / name).mkdir()
    with serving(tmp_path / "served") as running:
        yield running


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    return {version: write_pyramid_zarr(folder / version, version=version) for version in ("0.4", "0.5")}


@pytest.fixture
def path(server, written):
    """A slide of the server, as a path that stands for its URL."""
    shutil.copytree(written["0.4"], server.folder / "a.ome.zarr")
    return url_path(f"{server.url}/a.ome.zarr")


def read_all(slide):
    return slide.read(Region(0, 0, slide.levels[0].width, slide.levels[0].height, slide.mpp))


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_the_pixels_are_those_of_the_folder(server, written, version):
    folder = shutil.copytree(written[version], server.folder / "b.ome.zarr")
    with open_slide(url_path(f"{server.url}/b.ome.zarr")) as slide, open_slide(folder) as there:
        assert (slide.backend, slide.mpp, slide.levels) == ("zarr", there.mpp, there.levels)
        np.testing.assert_array_equal(read_all(slide), pyramid()[0])
        for region in (Region(31, 200, 300, 150, 0.25), Region(5, 7, 90, 80, 0.9)):
            np.testing.assert_array_equal(slide.read(region), there.read(region))


def test_shards_are_read_in_ranges_or_not_at_all(server):
    pixels = pyramid()[0][:256, :256]
    zarr.create_array(server.folder / "a.zarr", data=pixels, chunks=(64, 64, 3), shards=(128, 128, 3))
    with open_slide(url_path(f"{server.url}/a.zarr"), mpp=0.5) as slide:
        np.testing.assert_array_equal(slide.read(Region(30, 30, 70, 200, 0.5)), pixels[30:230, 30:100])
        server.ranges = False
        with pytest.raises(SlideError, match="it ignores ranges"):
            slide.read(Region(0, 0, 64, 64, 0.5))


@pytest.fixture
def s3(server, monkeypatch):
    """The server as S3, its folders as buckets."""
    keys = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {"AWS_ENDPOINT_URL": server.url, **keys}.items():
        monkeypatch.setenv(name, value)
    return "s3:/"


def test_s3(server, s3, written):
    shutil.copytree(written["0.4"], server.folder / "bucket" / "a.ome.zarr")
    with open_slide(url_path(f"{s3}/bucket/a.ome.zarr")) as slide:
        np.testing.assert_array_equal(read_all(slide), pyramid()[0])
        (server.folder / "bucket" / "a.ome.zarr" / "0" / "0.1.1").unlink()
        with pytest.raises(TileReadError, match=r"chunk 0\.1\.1 is not in the store"):
            read_all(slide)
    with pytest.raises(SlideError, match=r"none of zarr\.json.*check the URL"):
        open_slide(url_path(f"{s3}/bucket/b.ome.zarr"))


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_absent_files_may_be_refused(server, s3, scheme):
    """Where a bucket may not be listed, the answer is 403: for attributes and chunks that were left out, too."""
    pixels = pyramid()[0].copy()
    pixels[:97, :113] = 0  # a chunk of the fill value
    path = write_ome_zarr(server.folder / "bucket" / "a.ome.zarr", [pixels[::step, ::step] for step in (1, 2, 4)])
    for key in ("0/.zattrs", "1/.zattrs", "2/.zattrs", "0/0.0.0"):
        (path / key).unlink(missing_ok=True)
        server.faults[f"/{key}"] = ("refuse", ALWAYS)
    with open_slide(url_path(f"{s3 if scheme == 's3' else server.url}/bucket/a.ome.zarr")) as slide:
        np.testing.assert_array_equal(read_all(slide), pixels)


ELSEWHERE = ("to http://localhost:{port}/copy", "to file://", "to http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("fault", "file", "words"),
    [
        *(("swell", file, "sends more than") for file in (".zattrs", "0/0.0.0")),  # 64 MiB, not its size
        *(("pack", file, "packs it") for file in (".zattrs", "0/0.0.0")),
        *((place, "0/0.0.0", "redirects to another") for place in ELSEWHERE),
        (ELSEWHERE[0], ".zattrs", "redirects to another"),
        ("to ", "0/0.0.0", "redirects more than 5 times"),
    ],
)
def test_answers_that_are_too_long_packed_or_lead_elsewhere_are_refused(server, path, fault, file, words):
    shutil.copytree(server.folder / "a.ome.zarr", server.folder / "copy" / "a.ome.zarr")
    server.faults[f"/a.ome.zarr/{file}"] = (fault, ALWAYS)
    with pytest.raises(SlideError, match=words), open_slide(path) as slide:
        read_all(slide)
    assert not any("/copy" in asked for asked in server.asked)


@pytest.mark.parametrize("fault", ["drop", "cut", "hang", "to /copy"])
def test_a_fault_that_passes_and_a_redirect_within_the_host_are_not_seen(server, path, fault, monkeypatch):
    shutil.copytree(server.folder / "a.ome.zarr", server.folder / "copy" / "a.ome.zarr")
    with open_slide(path) as slide:
        monkeypatch.setattr(remote_zarr, "ANSWER_S", 0.5)
        server.faults["/0/0.1.1"] = (fault, 1)
        np.testing.assert_array_equal(slide.read(Region(120, 100, 90, 80, 0.25)), pyramid()[0][100:180, 120:210])
        assert server.faults["/0/0.1.1"] == (fault, 0)


@pytest.mark.parametrize("status", [404, 403])
def test_a_url_without_a_slide(server, status):
    if status == 403:
        server.faults[""] = ("refuse", ALWAYS)
    with pytest.raises(SlideError, match=r"http.*/b\.ome\.zarr: none of zarr\.json.*404 or 403"):
        open_slide(url_path(f"{server.url}/b.ome.zarr"))


def test_a_missing_chunk_is_damage_and_fails_alone(server, path):
    (server.folder / "a.ome.zarr" / "0" / "0.1.1").unlink()
    with open_slide(path) as slide:
        with pytest.raises(TileReadError, match=r"chunk 0\.1\.1 is not in the store"):
            slide.read(Region(113, 97, 10, 10, slide.mpp))
        np.testing.assert_array_equal(slide.read(Region(0, 0, 110, 90, slide.mpp)), pyramid()[0][:90, :110])


@pytest.mark.parametrize(("fault", "words"), [("drop", "Disconnected"), ("hang", r"no answer within 0\.4 s")])
def test_a_fault_that_stays_is_the_slides(server, path, fault, words, monkeypatch):
    """Not the tile's: a server that is gone must not make a slide look damaged. Tiles do not each wait for it."""
    with open_slide(path) as slide:
        monkeypatch.setattr(remote_zarr, "ANSWER_S", 0.4)
        server.faults["/0/0.1.1"] = (fault, ALWAYS)
        for most_s in (3.0,) if fault == "drop" else (3.0, 0.3):
            started_s = time.monotonic()
            with pytest.raises(SlideError, match=f"0/0.1.1 cannot be fetched, tried 2 times: .*{words}") as error:
                slide.read(Region(113, 97, 10, 10, slide.mpp))
            assert not isinstance(error.value, TileReadError)
            assert time.monotonic() - started_s < most_s


def test_a_server_that_hangs_or_is_gone_at_opening(server, path, monkeypatch):
    monkeypatch.setattr(remote_zarr, "ANSWER_S", 0.4)
    server.faults[""] = ("hang", ALWAYS)
    with pytest.raises(SlideError, match=r"zarr\.json cannot be fetched, tried 2 times: no answer within"):
        open_slide(path)
    monkeypatch.setattr(remote_zarr, "ANSWER_S", 20.0)  # nobody waits for it: a refusal comes at once
    with pytest.raises(SlideError, match=r"cannot be fetched, tried 2 times: Client"):
        open_slide(url_path("http://127.0.0.1:9/a.ome.zarr"))  # nobody listens there


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ftp://host/a.zarr", "begins with http://"),
        ("http://", "begins with http://"),
        ("http://a.zarr/x y", "begins with http://"),
        ("https://reader:secret@host/a.zarr", "holds a user name or password"),
        ("https://host/a.zarr?token=1", "no `\\?`"),
    ],
)
def test_a_table_that_holds_no_url(tmp_path, text, words):
    (tmp_path / "labels.csv").write_text(f"slide,label\na,1\n{text},2\n")
    with pytest.raises(ValueError, match=f"line 3: .*{words}") as error:
        find_slides(tmp_path)
    assert "secret" not in str(error.value)


def test_without_the_package(monkeypatch):
    registered = sys.modules["fsspec.registry"]._registry  # what was imported before
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    for scheme in ("http", "https"):
        monkeypatch.delitem(registered, scheme, raising=False)
    with pytest.raises(SlideError, match=r'not installed .*pip install "megatile\[remote\]"'):
        open_slide(url_path("https://host/a.zarr"))


def test_the_catalog_the_labels_the_pool_and_the_state(server, path):
    folder = server.folder.parent / "slides"
    (folder / "labels.csv").write_text(f"slide,label\n{server.url}/a.ome.zarr/,1\n{server.url}/a.ome.zarr,1\n")
    (spec,) = find_slides(folder)
    assert (spec.slide_id, spec.path) == ("a", path)
    (folder / "b.svs").touch()
    (folder / "both.csv").write_text((folder / "labels.csv").read_text() + "b,2\n")
    labels = find_labels(folder, find_slides(folder), labels=folder / "both.csv")
    assert labels.label["a"] == labels.classes.index("1")
    state = SlideState.of(path)
    with contextlib.closing(SlidePool([SlideSpec("a", path, state=state)], 1)) as pool, pool.lease("a") as slide:
        np.testing.assert_array_equal(slide.read(Region(0, 0, 90, 80, 0.25)), pyramid()[0][:80, :90])
    assert state.is_of(path, thorough=True)
    server.faults[""] = ("drop", ALWAYS)
    assert state.is_of(path, thorough=True), "not known to be another"
    server.faults.clear()
    other = server.folder / "a.ome.zarr" / ".zattrs"
    other.write_text(other.read_text().replace("0.25", "0.26"))
    assert not state.is_of(path, thorough=True)


def test_a_server_that_goes_is_a_fault_of_its_slide(server, path):
    """Found while the slide is indexed: not taken for damage, and the tiles are those of the folder before it goes."""
    settings = IndexSettings(tile=128, mpp=0.25, min_tissue=0.0)
    specs = SlideSpec("a", server.folder / "a.ome.zarr"), SlideSpec("a", path)
    folder, remote = (index_slide(spec, settings, 1).found for spec in specs)
    np.testing.assert_array_equal(remote.l0_x, folder.l0_x)
    np.testing.assert_array_equal(remote.tissue, folder.tissue)
    server.faults["/0.0.0"] = ("drop", ALWAYS)
    fault = index_slide(specs[1], settings, 1).found
    assert isinstance(fault, SlideFault)
    assert "0.0.0 cannot be fetched, tried 2 times" in fault.error


def read_part(path):
    with open_slide(path) as slide:
        return slide.read(Region(0, 0, 200, 200, 0.25))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_read_while_its_parent_does(path):
    with open_slide(path) as slide:
        for found in (read_all(slide)[:200, :200], result_in_child(read_part, path), read_all(slide)[:200, :200]):
            np.testing.assert_array_equal(found, pyramid()[0][:200, :200])
