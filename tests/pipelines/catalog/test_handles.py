"""The pool of open slides under many threads and failures; slides that were replaced."""

import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

from pipelines.catalog import handles
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlidePool, SlideState, digest
from pipelines.slides.slide import SlideError, url_path
from tests.helpers.dicom_file import write_dicom_slide
from tests.helpers.real import SVS


@dataclass
class Counter:
    """How many slides are open now, and ever were; and the most at once."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    open: int = 0
    opened: int = 0
    most: int = 0


@dataclass
class CountedSlide:
    """Knows whether it is open; complains when it is read closed or closed twice."""

    counter: Counter
    closed: bool = False

    def touch(self):
        assert not self.closed, "a leased slide was closed"

    def close(self):
        assert not self.closed, "a slide was closed twice"
        self.closed = True
        with self.counter.lock:
            self.counter.open -= 1


@dataclass
class Spec:
    slide_id: str
    counter: Counter
    delay_s: float = 0.0
    failures: int = 0
    changed: bool = False
    checks: int = 0

    def verify_unchanged(self):
        self.checks += 1
        if self.changed:
            raise SlideError(f"{self.slide_id}: this is not the slide that was indexed")

    def open(self):
        time.sleep(self.delay_s)
        if self.failures:
            self.failures -= 1
            raise SlideError(f"{self.slide_id}: cannot be opened")
        with self.counter.lock:
            self.counter.open += 1
            self.counter.opened += 1
            self.counter.most = max(self.counter.most, self.counter.open)
        return CountedSlide(self.counter)


def make(n, capacity, delay_s=0.0):
    counter = Counter()
    specs = [Spec(f"s{i}", counter, delay_s) for i in range(n)]
    return SlidePool(specs, capacity), counter, specs


def lease(pool, slide_id, times=1):
    for _ in range(times):
        with pool.lease(slide_id) as slide:
            slide.touch()


def test_an_open_slide_is_compared_at_most_so_often_and_not_lent_when_it_changed(monkeypatch):
    pool, counter, (spec,) = make(1, 1)
    now = [100.0]
    monkeypatch.setattr(handles.time, "monotonic", lambda: now[0])
    lease(pool, "s0", 50)
    assert spec.checks == 1, "when it was opened"
    now[0] += handles.CHECK_EVERY_S
    lease(pool, "s0", 50)
    assert spec.checks == 2
    spec.changed = True
    now[0] += handles.CHECK_EVERY_S
    with pytest.raises(SlideError, match="not the slide that was indexed"):
        lease(pool, "s0")
    pool.discard("s0")  # a read failed
    with pytest.raises(SlideError, match="not the slide that was indexed"):
        lease(pool, "s0")
    pool.close()
    assert counter.open == 0


def test_a_slide_is_opened_once_and_the_least_recently_used_is_closed():
    pool, counter, _ = make(3, 2)
    assert counter.opened == 0
    lease(pool, "s0", 5)
    assert (counter.opened, counter.open) == (1, 1)
    for slide_id in ("s1", "s0", "s2"):
        lease(pool, slide_id)
    assert [*pool._handles] == ["s0", "s2"]
    assert (counter.open, counter.most) == (2, 2)


def test_leased_slides_are_not_closed_and_the_excess_goes_when_they_come_back():
    pool, counter, _ = make(4, 1)
    with pool.lease("s0") as a, pool.lease("s1") as b, pool.lease("s2") as c:
        for slide in (a, b, c):
            slide.touch()
        assert counter.open == 3
    assert counter.open == 1
    with pytest.raises(RuntimeError), pool.lease("s0"):
        raise RuntimeError
    lease(pool, "s1")
    assert ([*pool._handles], counter.open) == (["s1"], 1), "an error inside a lease gives the slide back"


def test_a_slide_that_cannot_be_opened_is_tried_again():
    pool, counter, specs = make(2, 1)
    specs[0].failures = 2
    for _ in range(2):
        with pytest.raises(SlideError, match="cannot be opened"):
            lease(pool, "s0")
        assert not pool._handles
    with pool.lease("s0"):
        assert counter.open == 1


def test_a_discarded_slide_is_closed_by_its_last_holder_and_opened_anew():
    pool, counter, _ = make(1, 1)
    with pool.lease("s0") as first:
        with pool.lease("s0") as again:
            assert again is first
            pool.discard("s0")
            with pool.lease("s0") as fresh:
                assert fresh is not first
            first.touch()
        first.touch()
    assert first.closed
    assert not fresh.closed
    pool.discard("s0")
    pool.discard("s0")
    assert counter.open == 0


def test_close_waits_for_no_one_and_leaks_nothing():
    pool, counter, _ = make(3, 2)
    lease(pool, "s1")
    with pool.lease("s0") as slide:
        pool.close()
        slide.touch()
        assert counter.open == 1
    assert counter.open == 0
    with pytest.raises(SlideError, match="closed pool"):
        lease(pool, "s0")
    pool.close()


def test_two_threads_open_a_slide_once_and_different_slides_at_the_same_time():
    pool, counter, _ = make(8, 8, delay_s=0.2)
    start = time.perf_counter()
    with ThreadPoolExecutor(24) as threads:
        list(threads.map(lambda i: lease(pool, f"s{i % 8}"), range(24)))
    assert counter.opened == 8
    assert time.perf_counter() - start < 8 * 0.2  # one after another would take this long


def test_many_threads_with_overlapping_leases_and_discards():
    pool, counter, _ = make(10, 2)
    leases_per_thread, threads = 400, 16

    def work(seed):
        rng = random.Random(seed)
        for _ in range(leases_per_thread):
            first, second = rng.sample(range(10), 2)
            with pool.lease(f"s{first}") as a:
                if rng.random() < 0.5:
                    with pool.lease(f"s{second}") as b:
                        b.touch()
                        if rng.random() < 0.1:
                            time.sleep(0.0005)
                if rng.random() < 0.05:
                    pool.discard(f"s{first}")
                a.touch()

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(work, range(threads)))
    assert len(pool._handles) == counter.open <= 2
    assert counter.most <= 2 * threads + 2
    assert counter.opened > 10
    pool.close()
    assert counter.open == 0


def test_a_real_slide_that_fails_does_not_stay_failed(tmp_path):
    path = tmp_path / "slide.svs"
    pool = SlidePool([SlideSpec("slide", path)], 1)
    with pytest.raises(SlideError, match="no such file"), pool.lease("slide"):
        pass
    path.write_bytes(SVS.read_bytes())
    with pool.lease("slide") as slide:
        assert slide.mpp == 0.499
    pool.close()


def test_a_file_that_was_replaced_is_told_from_one_that_was_touched(tmp_path):
    path = shutil.copyfile(SVS, tmp_path / "s.svs")
    state = SlideState.of(path)
    os.utime(path)
    assert state.is_of(path), "touched"
    whole = bytearray(path.read_bytes())
    whole[100] ^= 1  # of the header
    path.write_bytes(whole)
    assert not state.is_of(path)
    os.utime(path, ns=(state.modified_ns, state.modified_ns))
    assert state.is_of(path), "size and time come first"
    assert not state.is_of(path, thorough=True)
    path.write_bytes(whole[:-1])
    assert not state.is_of(path)
    path.unlink()
    assert not state.is_of(path)


def test_slides_at_two_urls_are_two_slides(monkeypatch):
    monkeypatch.setattr("pipelines.backends.zarr.remote_metadata", lambda path: b"levels and chunks")
    assert digest(url_path("https://host/a.zarr")) != digest(url_path("https://host/b.zarr"))


def test_of_folders_all_files_count_and_of_large_files_little_is_read(tmp_path):
    path = tmp_path / "s.zarr"
    chunk = path / "0" / "0.1.1"
    chunk.parent.mkdir(parents=True)
    chunk.write_bytes(bytes(8))
    (path / ".zattrs").write_text("{}")
    state = SlideState.of(path)
    os.utime(path / ".zattrs")
    assert state.is_of(path), "touched"
    chunk.write_bytes(bytes(7) + b"\x01")
    assert not state.is_of(path, thorough=True)
    chunk.unlink()
    assert not state.is_of(path, thorough=True)
    with (tmp_path / "large.svs").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    assert len(digest(tmp_path / "large.svs")) == 32


def test_the_other_files_of_a_slide_count(tmp_path):
    pixels = np.zeros((64, 64, 3), np.uint8)
    finest, coarser = write_dicom_slide(tmp_path / "dicom", [pixels, pixels[::2, ::2]], encoding="raw", tile=32)
    (tmp_path / "s").mkdir()
    (tmp_path / "s.mrxs").write_bytes(b"slide")
    (tmp_path / "v.vms").write_text("[Virtual Microscope Specimen]\nImageFile=v.jpg\nMacroImage=none.jpg\n")
    others = (coarser, tmp_path / "s" / "Data0001.dat", tmp_path / "v.jpg")
    for path, other in zip((finest, tmp_path / "s.mrxs", tmp_path / "v.vms"), others, strict=True):
        data = other.read_bytes() if other.exists() else b"pixels"
        digests = set()
        for last in (0, 1):
            other.write_bytes(data[:-1] + bytes([last]))
            digests.add(digest(path))
        assert len(digests) == 2, path
    before = digest(finest)
    write_dicom_slide(tmp_path / "dicom", [pixels], encoding="raw", tile=32)
    assert digest(finest) == before, "another series in its folder"
