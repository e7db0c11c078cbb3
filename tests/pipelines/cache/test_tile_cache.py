"""The tile cache: the reader's pixels, whoever writes beside it, whatever is killed, full or damaged."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import zarr

from pipelines.backends.registry import open_slide
from pipelines.cache import shards as shards_module
from pipelines.cache import tile_cache
from pipelines.cache.shards import ABANDONED_S, LEDGER, CacheSpec, ShardFolder
from pipelines.cache.tile_cache import CacheCounts, CachedSlide, TileCache, open_cached
from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from pipelines.slides.whole_files import replacing
from tests.helpers.real import SVS

KIND = CacheSpec(40, 30, 0.5)
BOUND = 1 << 30


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Eight tiles in a shard, and no wait before the folder is looked at again."""
    monkeypatch.setattr(shards_module, "MOST_SLOTS", 8)
    monkeypatch.setattr(tile_cache, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(tile_cache, "LOOK_SHARE", 1e9)


def place(number):
    return 7, -8, number, 5


def pixels(number, kind=KIND):
    """Pixels that no other number has; half of them compress."""
    tile = np.random.default_rng(number).integers(0, 256, (kind.height, kind.width, 3)).astype(np.uint8)
    tile[kind.height // 2 :] = number % 251
    return tile


def holds(cache, number):
    """Whether the cache has tile ``number``; never other pixels than its own."""
    out = np.zeros((KIND.height, KIND.width, 3), np.uint8)
    there = cache.get(place(number), out)
    assert not there or (out == pixels(number)).all()
    return there


def bytes_in(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def add(cache, first, last):
    for number in range(first, last):
        cache.add(place(number), pixels(number))


def filled(folder, count):
    """A cache that a process has left with tiles 0, 1, ...; its folder of shards."""
    with TileCache(folder, BOUND, KIND) as cache:
        add(cache, 0, count)
    assert cache.counts.stored == count
    return ShardFolder(folder, KIND)


@pytest.mark.parametrize("mpp", [0.499, 1.3])
def test_tiles_are_those_of_the_reader_and_of_any_zarr_library(mpp, tmp_path):
    kind = CacheSpec(60, 50, mpp)
    regions = [Region(x, y, 60, 50, mpp) for x in (-20, 333, 2200) for y in (11, 1500, 2960)]
    with open_slide(SVS) as slide, TileCache(tmp_path, BOUND, kind) as cache:
        truth = [slide.read(region) for region in regions]
        cached = CachedSlide(slide, cache)
        for name in ("path", "backend", "mpp", "levels", "bounds"):
            assert getattr(cached, name) == getattr(slide, name)
        for _ in range(2):
            np.testing.assert_array_equal([cached.read(region) for region in regions], truth)
        assert (cache.counts.hits, cache.counts.misses) == (9, 9)
        overview = Region(0, 0, 30, 40, 30.0)  # no tile: as ever
        np.testing.assert_array_equal(cached.read(overview), slide.read(overview))
        with pytest.raises(ValueError, match="out must be uint8"):
            cached.read(regions[0], np.empty((1, 1, 3), np.uint8))
    again_cache = TileCache(tmp_path, BOUND, kind)
    with open_cached(SlideSpec("a", SVS), again_cache) as again:
        out = np.zeros((50, 60, 3), np.uint8)
        for region, tile in zip(regions, truth, strict=True):
            assert again.read(region, out) is out
            assert (out == tile).all()
        assert (again_cache.counts.hits, again_cache.counts.misses) == (9, 0)
    group = zarr.open_group(tmp_path / kind.name, mode="r")
    for tile, kept, (*_, l0_x, l0_y) in zip(truth, group["tiles"][:9], group["places"][:9].tolist(), strict=True):
        assert (kept == tile).all()
        assert Region(l0_x, l0_y, 60, 50, mpp) in regions
    assert dict(group.attrs)["megatile"]["mpp"] == mpp


def test_a_slide_that_is_another_now_is_read_and_one_that_was_moved_is_not(tmp_path):
    path = shutil.copy2(SVS, tmp_path / "slide.svs")
    cache = TileCache(tmp_path / "cache", BOUND, CacheSpec(60, 50, 0.499))

    def hits(path, mpp=None, backend="auto"):
        before = cache.counts.hits
        with open_cached(SlideSpec("a", path, mpp, backend), cache) as slide:
            slide.read(Region(300, 400, 60, 50, 0.499))
        return cache.counts.hits - before

    assert [hits(path), hits(path)] == [0, 1]
    assert [hits(path, mpp=0.4), hits(path, backend="openslide")] == [0, 0]
    path = path.rename(tmp_path / "moved.svs")
    assert hits(path) == 1
    status, data = path.stat(), path.read_bytes()
    path.write_bytes(
        data[:-9] + b"changed!" + data[-1:]
    )  # size and time of change as they were, other bytes at its end
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    assert hits(path) == 0
    with pytest.raises(SlideError, match="no such file"):
        open_cached(SlideSpec("a", tmp_path / "none.svs"), cache)


WRITER = """
import sys
from pathlib import Path
from pipelines.cache import shards as shards_module
shards_module.MOST_SLOTS = 8
from tests.pipelines.cache.test_tile_cache import KIND, TileCache, add
folder, bound, first, last = Path(sys.argv[1]), *map(int, sys.argv[2:5])
cache = TileCache(folder, bound, KIND)
print("ready", flush=True)
sys.stdin.readline()
add(cache, first, last)
cache.close()
print(cache.counts.stored, bool(cache.full), flush=True)
"""


def writer(folder, bound, first, last):
    """A process that has opened the cache, and adds tiles once it is told to."""
    arguments = [sys.executable, "-c", WRITER, str(folder), *map(str, (bound, first, last))]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def begin(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.process
def test_processes_write_into_one_folder_at_once_and_stay_within_its_size(tmp_path):
    reader = TileCache(tmp_path, BOUND, KIND)
    bound = 1_000_000
    writers = [writer(tmp_path, bound, 0, 700), writer(tmp_path, bound, 600, 1300)]  # each has too many by itself
    for process in writers:
        begin(process)
    told = [process.communicate()[0].split() for process in writers]
    assert [process.returncode for process in writers] == [0, 0]
    assert [full for _, full in told] == ["True", "True"]
    shard = 8 * 2000
    assert bound - 2 * shard - 10_000 < bytes_in(tmp_path) <= bound + 3 * 2000, "but for zarr.json"
    places = [p for s in ShardFolder(tmp_path, KIND).shards() for p in reader._shards.places_of(s).tolist()]
    listed = [row[2] for row in places if any(row)]
    assert len(listed) == sum(int(count) for count, _ in told)
    assert [number for number in range(1300) if holds(reader, number)] == sorted(set(listed))
    assert reader.counts.damaged == 0


@pytest.mark.process
def test_a_process_killed_at_any_moment_leaves_nothing_that_is_wrong(tmp_path):
    process = writer(tmp_path, BOUND, 0, 10**6)
    begin(process)
    while bytes_in(tmp_path) < 300_000:
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    cache = TileCache(tmp_path, BOUND, KIND)
    kept = sum(holds(cache, number) for number in range(2000))
    assert kept >= 8
    assert kept == 8 * len(ShardFolder(tmp_path, KIND).shards())
    assert cache.counts.damaged == 0


@pytest.mark.process
@pytest.mark.parametrize("moment", ["tiles half written", "tiles not renamed", "places not renamed"])
def test_what_a_killed_process_leaves_is_not_read_and_removed_later(moment, tmp_path, monkeypatch):
    shards = filled(tmp_path, 8)
    child = os.fork()
    if not child:
        _add_and_die(tmp_path, moment, monkeypatch)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = {file.name for file in tmp_path.rglob("*")} & {".1.writing", "c.1.0.0.0", "c.1.0"}
    assert left == ({"c.1.0.0.0", ".1.writing"} if moment == "places not renamed" else {".1.writing"})
    with TileCache(tmp_path, BOUND, KIND) as cache:
        assert [number for number in range(20) if holds(cache, number)] == list(range(8))
        add(cache, 8, 16)
    assert shards.shards() == [0, 2]
    for file in tmp_path.rglob("*"):
        os.utime(file, (time.time() - ABANDONED_S - 1,) * 2)
    cache = TileCache(tmp_path, BOUND, KIND)
    assert not {file.name for file in tmp_path.rglob("*")} & left
    assert all(holds(cache, number) for number in range(16))
    assert cache.counts.damaged == 0


def _add_and_die(folder, moment, monkeypatch):
    """In a forked process: add a shard, and be killed meanwhile."""

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    replace, calls = Path.replace, iter([lambda: None, die])
    if moment == "places not renamed":
        monkeypatch.setattr(Path, "replace", lambda *paths: (next(calls)(), replace(*paths)))
    elif moment == "tiles not renamed":
        monkeypatch.setattr(Path, "replace", die)
    else:
        monkeypatch.setattr(os, "ftruncate", lambda file, size: (os.pwrite(file, b"tile" * 99, 0), die()))
    try:
        add(TileCache(folder, BOUND, KIND), 8, 16)
    finally:
        os._exit(1)


def test_a_full_cache_serves_on_and_takes_no_more(tmp_path):
    shard = bytes_in(filled(tmp_path / "size", 8).path)
    with TileCache(tmp_path / "cache", 2 * shard, KIND) as cache:
        add(cache, 0, 40)
        assert cache.full == f"it has its {2 * shard} bytes"
        assert cache.counts.stored == 16
        assert [number for number in range(50) if holds(cache, number)] == list(range(16))
    with TileCache(tmp_path / "cache", 2 * shard, CacheSpec(40, 30, 1.0)) as cache:
        add(cache, 0, 8)
        assert cache.counts.stored == 0, "tiles of another kind are counted"
    assert not list((tmp_path / "cache").rglob("*.writing"))
    assert bytes_in(tmp_path / "cache" / KIND.name / "tiles") <= 2 * shard


def test_two_hosts_whose_process_ids_are_the_same_write_one_file(tmp_path):
    path = tmp_path / "zarr.json"
    with replacing(path) as first, replacing(path) as second:
        first.write_text("{}")
        second.write_text("{}")
    assert [file.name for file in tmp_path.iterdir()] == ["zarr.json"]


def test_shards_are_written_and_bounded_without_listing_the_others(tmp_path, monkeypatch):
    """Each shard once listed all shards before it, to count bytes and to find its number."""
    listed, counts = [], []
    for name in ("listdir", "scandir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *path, real=real: (listed.append(str(path)), real(*path))[1])
    for shards in (4, 32):
        listed.clear()
        with TileCache(tmp_path / str(shards), BOUND, KIND) as cache:
            add(cache, 0, 8 * shards)
        assert cache.counts.stored == 8 * shards
        counts.append(sum(str(tmp_path) in path for path in listed))
    assert counts[0] == counts[1] < 12
    metadata = (tmp_path / "32" / KIND.name / "zarr.json").stat().st_size
    written = int((tmp_path / "32" / LEDGER).read_bytes())
    assert written == bytes_in(tmp_path / "32" / KIND.name) - metadata, "what is written down is what is there"


@pytest.mark.parametrize("name", ["zarr.json", "tiles/zarr.json", "places/zarr.json"])
def test_rotten_metadata_is_written_anew(name, tmp_path):
    file = filled(tmp_path, 8).path / name
    expected = file.read_bytes()
    for text in (b"", b"{", b"\xff\x00"):
        file.write_bytes(text)
        assert holds(TileCache(tmp_path, BOUND, KIND), 3)
        assert file.read_bytes() == expected
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=rf"--cache .*{name}"):
        TileCache(tmp_path, BOUND, KIND)


@pytest.mark.parametrize("text", [b"", b"many", b"9" * 20, b"\xff" * 30])
def test_a_rotten_ledger_is_counted_anew(text, tmp_path):
    with TileCache(tmp_path, BOUND, KIND) as cache:
        (tmp_path / LEDGER).write_bytes(text)
        add(cache, 0, 8)
        assert (cache.counts.stored, cache.full) == (8, "")


@pytest.mark.usefixtures("without_locks")
def test_a_disk_without_locks_holds_a_cache(tmp_path):
    filled(tmp_path, 8)


def test_other_threads_read_while_the_folder_is_listed(tmp_path, monkeypatch):
    filled(tmp_path, 8)
    cache, listing, go_on = TileCache(tmp_path, BOUND, KIND), threading.Event(), threading.Event()
    monkeypatch.setattr(cache._shards, "shards", lambda: (listing.set(), go_on.wait(10), [])[2])
    missing = threading.Thread(target=holds, args=(cache, 99))
    missing.start()
    assert listing.wait(10)
    assert holds(cache, 3)
    assert not holds(cache, 98), "a second one does not list it as well"
    go_on.set()
    missing.join()


def test_of_a_folder_that_was_taken_away_tiles_are_read_anew(tmp_path, caplog):
    filled(tmp_path, 8)
    with TileCache(tmp_path, BOUND, KIND) as cache:
        shutil.rmtree(cache._shards.path)
        assert not any(holds(cache, number) for number in (3, 4, 98, 99))
        assert cache.counts.damaged == 2
    first, second = caplog.messages
    assert "others are only counted" in first
    assert "its tiles cannot be listed: " in second


@pytest.mark.parametrize("is_read", [False, True])
def test_a_shard_whose_number_was_given_again_is_not_taken_for_the_first(is_read, tmp_path):
    """Tiles that do not compress have the same size, so those of one shard are found by the index of another."""
    shards = filled(tmp_path, 8)
    cache = TileCache(tmp_path, BOUND, KIND)
    os.utime(shards.tiles_of(0), (1, 1))
    assert not is_read or holds(cache, 3)
    shutil.rmtree(shards.path)
    with TileCache(tmp_path, BOUND, KIND) as other:
        add(other, 8, 16)
    assert shards.shards() == [0]
    assert not any(holds(cache, number) for number in range(8))


def test_a_number_whose_tiles_were_deleted_is_not_given_again(tmp_path):
    filled(tmp_path, 8)
    with TileCache(tmp_path, BOUND, KIND) as running:
        shards = filled(tmp_path, 16)
        for shard in range(3):
            shards.tiles_of(shard).unlink()
        with TileCache(tmp_path, BOUND, KIND) as new:
            add(new, 16, 24)
        add(running, 24, 32)
    assert shards.shards() == list(range(5))
    reader = TileCache(tmp_path, BOUND, KIND)
    assert [number for number in range(32) if holds(reader, number)] == list(range(16, 32))


def test_a_disk_that_is_full_ends_nothing(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with TileCache(tmp_path, BOUND, KIND) as cache:
        monkeypatch.setattr(os, "ftruncate", no_space)
        add(cache, 0, 20)
        assert "No space left on device" in cache.full
        assert not any(holds(cache, number) for number in range(20))
    assert not list(tmp_path.rglob("*.writing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        TileCache(tmp_path / "file", BOUND, KIND)


@pytest.mark.parametrize("harm", ["tile", "index", "cut", "places", "gone"])
def test_damage_is_counted_and_what_is_damaged_read_anew(harm, tmp_path):
    shards = filled(tmp_path, 16)
    file = shards.tiles_of(0) if harm != "places" else shards.path / "places" / "c.0.0"
    data = bytearray(file.read_bytes())
    if harm == "gone":
        file.unlink()
    elif harm == "cut":
        file.write_bytes(data[:-1])
    else:
        data[{"tile": 1900, "index": len(data) - 100, "places": 40}[harm]] ^= 4
        file.write_bytes(data)
    for expected in (range(1, 2) if harm == "tile" else range(8), range(0)):  # of the first tile 1,816 bytes
        with TileCache(tmp_path, BOUND, KIND) as cache:
            missing = [number for number in range(16) if not holds(cache, number)]
            for number in missing:
                cache.add(place(number), pixels(number))
        assert missing == list(expected)
        assert cache.counts.damaged == (1 if harm == "places" else len(expected))


def test_counts_of_ranks_add_up_and_too_large_a_tile_is_refused():
    doubled = CacheCounts.of([2.0 * value for value in (1, 2, 3, 4, 0.5, 0.25, 2.0)])
    assert doubled == CacheCounts(2, 4, 6, 8, 1.0, 0.5, 4.0)
    assert isinstance(doubled.hits, int)
    with pytest.raises(ValueError, match=r"tiles of up to 2147418112 bytes; 32768 x 32768 px are 3221225472"):
        CacheSpec(32768, 32768, 0.5)
