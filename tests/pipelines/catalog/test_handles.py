"""The pool of open slides under many threads, forks and failures."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipelines.catalog import handles
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlidePool
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from tests.helpers.real import PYRAMID_TIFF, SVS


class CountedSlide:
    """Knows whether it is open; complains when it is read closed or closed twice."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self.closed = False

    def touch(self) -> None:
        assert not self.closed, "a leased slide was closed"

    def close(self) -> None:
        assert not self.closed, "a slide was closed twice"
        self.closed = True
        with self.counter.lock:
            self.counter.open -= 1


@dataclass
class Counter:
    """How many slides are open now, and ever were; and the most at once."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    open: int = 0
    opened: int = 0
    most: int = 0


@dataclass
class Spec:
    slide_id: str
    counter: Counter
    delay_s: float = 0.0
    failures: int = 0

    changed: bool = False
    checks: int = 0

    def verify_unchanged(self) -> None:
        self.checks += 1
        if self.changed:
            raise SlideError(f"{self.slide_id}: this is not the slide that was indexed")

    def open(self) -> CountedSlide:
        time.sleep(self.delay_s)
        if self.failures:
            self.failures -= 1
            raise SlideError(f"{self.slide_id}: cannot be opened")
        with self.counter.lock:
            self.counter.open += 1
            self.counter.opened += 1
            self.counter.most = max(self.counter.most, self.counter.open)
        return CountedSlide(self.counter)


def test_a_slide_that_changed_is_not_lent_even_when_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, counter, specs = make(1, 1)
    with pool.lease("s0"):
        pass
    specs[0].changed = True
    monkeypatch.setattr(handles, "CHECK_EVERY_S", 0.0)
    with pytest.raises(SlideError, match="not the slide that was indexed"), pool.lease("s0"):
        pass
    pool.close()
    assert counter.open == 0


def test_an_open_slide_is_compared_at_most_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _, (spec,) = make(1, 1)
    now = [100.0]
    monkeypatch.setattr(handles.time, "monotonic", lambda: now[0])
    for _ in range(50):
        with pool.lease("s0"):
            pass
    assert spec.checks == 1, "when it was opened"
    now[0] += handles.CHECK_EVERY_S
    for _ in range(50):
        with pool.lease("s0"):
            pass
    assert spec.checks == 2
    pool.discard("s0")  # a read failed
    spec.changed = True
    with pytest.raises(SlideError, match="not the slide that was indexed"), pool.lease("s0"):
        pass
    pool.close()


def make(n: int, capacity: int, delay_s: float = 0.0) -> tuple[SlidePool, Counter, Sequence[Spec]]:
    counter = Counter()
    specs = [Spec(f"s{i}", counter, delay_s) for i in range(n)]
    return SlidePool(specs, capacity), counter, specs  # type: ignore[arg-type]


def test_a_slide_is_opened_once_and_kept() -> None:
    pool, counter, _ = make(3, 2)
    assert counter.opened == 0
    for _ in range(5):
        with pool.lease("s0"):
            pass
    assert (counter.opened, counter.open) == (1, 1)


def test_the_least_recently_used_is_closed() -> None:
    pool, counter, _ = make(3, 2)
    for slide_id in ("s0", "s1", "s0", "s2"):
        with pool.lease(slide_id):
            pass
    assert pool.open_ids == ("s0", "s2")
    assert (counter.open, counter.most) == (2, 2)


def test_leased_slides_are_not_closed_and_the_excess_goes_when_they_come_back() -> None:
    pool, counter, _ = make(4, 1)
    with pool.lease("s0") as a, pool.lease("s1") as b, pool.lease("s2") as c:
        for slide in (a, b, c):
            slide.touch()  # type: ignore[attr-defined]
        assert counter.open == 3
    assert counter.open == 1


def test_an_unknown_slide() -> None:
    pool, _, _ = make(1, 1)
    with pytest.raises(KeyError), pool.lease("other"):
        pass


def test_bad_settings_are_refused() -> None:
    spec = Spec("s", Counter())
    with pytest.raises(ValueError, match="at least 1 slide open; got capacity 0"):
        SlidePool([spec], 0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="must differ"):
        SlidePool([spec, spec], 1)  # type: ignore[list-item]


def test_a_slide_that_cannot_be_opened_is_tried_again() -> None:
    pool, counter, specs = make(2, 1)
    specs[0].failures = 2
    for _ in range(2):
        with pytest.raises(SlideError, match="cannot be opened"), pool.lease("s0"):
            pass
        assert pool.open_ids == ()
    with pool.lease("s0"):
        assert counter.open == 1


def test_a_discarded_slide_is_closed_by_its_last_holder_and_opened_anew() -> None:
    pool, counter, _ = make(1, 1)
    with pool.lease("s0") as first:
        with pool.lease("s0") as again:
            assert again is first
            pool.discard("s0")
            with pool.lease("s0") as fresh:
                assert fresh is not first
            first.touch()  # type: ignore[attr-defined]
        first.touch()  # type: ignore[attr-defined]
    assert first.closed  # type: ignore[attr-defined]
    assert not fresh.closed  # type: ignore[attr-defined]
    pool.discard("s0")
    pool.discard("s0")
    assert counter.open == 0


def test_an_error_inside_a_lease_gives_the_slide_back() -> None:
    pool, counter, _ = make(2, 1)
    with pytest.raises(RuntimeError), pool.lease("s0"):
        raise RuntimeError
    with pool.lease("s1"):
        pass
    assert (pool.open_ids, counter.open) == (("s1",), 1)


def test_close_waits_for_no_one_and_leaks_nothing() -> None:
    pool, counter, _ = make(3, 2)
    with pool.lease("s1"):
        pass
    with pool.lease("s0") as slide:
        pool.close()
        slide.touch()  # type: ignore[attr-defined]
        assert counter.open == 1
    assert counter.open == 0
    with pytest.raises(SlideError, match="closed pool"), pool.lease("s0"):
        pass
    pool.close()


def test_two_threads_open_a_slide_once_and_different_slides_at_the_same_time() -> None:
    pool, counter, _ = make(8, 8, delay_s=0.2)

    def lease(slide_id: str) -> None:
        with pool.lease(slide_id) as slide:
            slide.touch()  # type: ignore[attr-defined]

    start = time.perf_counter()
    with ThreadPoolExecutor(24) as threads:
        list(threads.map(lease, [f"s{i % 8}" for i in range(24)]))
    assert counter.opened == 8
    assert time.perf_counter() - start < 8 * 0.2  # one after another would take this long


def test_many_threads_with_overlapping_leases_and_discards() -> None:
    pool, counter, _ = make(10, 2)
    leases_per_thread, threads = 400, 16

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(leases_per_thread):
            first, second = rng.sample(range(10), 2)
            with pool.lease(f"s{first}") as a:
                if rng.random() < 0.5:
                    with pool.lease(f"s{second}") as b:
                        b.touch()  # type: ignore[attr-defined]
                        if rng.random() < 0.1:
                            time.sleep(0.0005)
                if rng.random() < 0.05:
                    pool.discard(f"s{first}")
                a.touch()  # type: ignore[attr-defined]

    with ThreadPoolExecutor(threads) as executor:
        for done in [executor.submit(work, seed) for seed in range(threads)]:
            done.result()
    assert len(pool.open_ids) == counter.open <= 2
    assert counter.most <= 2 * threads + 2
    assert counter.opened > 10
    pool.close()
    assert counter.open == 0


def real_pool() -> SlidePool:
    return SlidePool([SlideSpec("svs", SVS), SlideSpec("tiff", PYRAMID_TIFF, backend="openslide")], 2)


def read_sum(pool: SlidePool) -> int:
    total = 0
    for slide_id in ("svs", "tiff"):
        with pool.lease(slide_id) as slide:
            total += int(slide.read(Region(500, 700, 200, 200, 0.499)).sum())
    return total


def test_a_pickled_pool_is_empty_and_works() -> None:
    pool = real_pool()
    expected = read_sum(pool)
    copy = pickle.loads(pickle.dumps(pool))
    assert (len(pool.open_ids), copy.open_ids, copy.capacity) == (2, (), 2)
    assert read_sum(copy) == expected
    copy.close()
    assert read_sum(pool) == expected
    pool.close()


def _in_child(pool: SlidePool, results: multiprocessing.SimpleQueue[tuple[tuple[str, ...], int]]) -> None:
    before = pool.open_ids
    results.put((before, read_sum(pool)))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_starts_empty_and_leaves_the_parents_slides_alone(method: str) -> None:
    """Forked while another thread of the parent holds the pool's lock and a lease."""
    context = multiprocessing.get_context(method)
    pool = real_pool()
    expected = read_sum(pool)
    results = context.SimpleQueue()
    with pool.lease("svs"), pool._lock if method == "fork" else threading.Lock():
        child = context.Process(target=_in_child, args=(pool, results))
        child.start()
        child.join(60)
    assert child.exitcode == 0
    assert results.get() == ((), expected)
    assert read_sum(pool) == expected
    pool.close()


def test_a_real_slide_that_fails_does_not_stay_failed(tmp_path: Path) -> None:
    path = tmp_path / "slide.svs"
    pool = SlidePool([SlideSpec("slide", path)], 1)
    with pytest.raises(SlideError, match="no such file"), pool.lease("slide"):
        pass
    path.write_bytes(SVS.read_bytes())
    with pool.lease("slide") as slide:
        assert slide.mpp == 0.499
    pool.close()
