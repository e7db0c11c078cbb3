"""Work in processes that may die, and failed slides in a file that threads and processes append to."""

import csv
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from pipelines.catalog.processes import Limits, WorkerCrashed, WorkerTimeout, map_isolated
from pipelines.catalog.table import FailedSlides
from tests.helpers.work import hold, main_module, process_of, sleep_if_odd, square


def children():
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("workers", [1, 3])
def test_every_item_comes_back_with_its_result(workers):
    before = children()
    assert dict(map_isolated(square, range(12), workers)) == {i: i * i for i in range(12)}
    assert list(map_isolated(square, [], workers)) == []
    assert children() == before


def test_a_worker_serves_many_items_and_does_not_import_the_callers_main():
    assert len({pid for _, pid in map_isolated(process_of, range(6), 2)}) == 2
    assert next(map_isolated(main_module, [0], 1))[1].endswith("pipelines/catalog/processes.py")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_that_dies_costs_its_item_only(workers):
    items = [1, -signal.SIGABRT, 2, -signal.SIGKILL, 13, 3, -signal.SIGSEGV]
    results = dict(map_isolated(square, items, workers))
    assert {i: results[i] for i in (1, 2, 3)} == {1: 1, 2: 4, 3: 9}
    for item, reason in ((-signal.SIGABRT, "SIGABRT"), (13, "exit code 13"), (-signal.SIGSEGV, "SIGSEGV")):
        assert results[item] == WorkerCrashed(reason)
    assert "SIGKILL; the kernel does so when memory runs out" in str(results[-signal.SIGKILL])


def test_signals_that_ask_a_run_to_end_cost_no_item():
    """Launchers send them to all its processes, while the run itself saves and ends in its own time."""
    items = [-number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
    assert dict(map_isolated(square, items, 1)) == {item: item * item for item in items}


def test_an_item_that_takes_too_long_is_given_up_and_the_others_go_on():
    before = children()
    results = dict(map_isolated(sleep_if_odd, [1, 0, 2, 4], 2, Limits(3, 4 << 30)))
    assert isinstance(results[1], WorkerTimeout)
    assert str(results[1]) == "it was given up after 3 s, the time that one may take"
    assert {i: results[i] for i in (0, 2, 4)} == {0: 0, 2: 2, 4: 4}
    assert children() == before


def test_memory_beyond_the_limit_is_refused_and_the_others_go_on():
    results = dict(map_isolated(hold, [1, 3000, 2], 1, Limits(60, 1 << 30)))
    assert (results[1], results[2]) == (1 << 20, 2 << 20)
    assert str(results[3000]) == (
        "the process working on it died (out of memory); it may take 60 s and 1 GiB of memory"
    )


def test_leaving_early_ends_the_processes():
    before = children()
    running = map_isolated(sleep_if_odd, [0, 1], 2)
    assert next(running) == (0, 0)
    assert len(children() - before) == 1
    running.close()
    assert children() == before


@pytest.mark.process
def test_a_killed_parent_leaves_no_worker():
    code = (
        "from pipelines.catalog.processes import map_isolated; from tests.helpers.work import sleep_if_odd;"
        "running = map_isolated(sleep_if_odd, [0, 1], 2); print(next(running), flush=True); next(running)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent.stdout:
        assert parent.stdout.readline() == "(0, 0)\n"
        (worker,) = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
    deadline_s = time.monotonic() + 20
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the worker sleeps on"
        time.sleep(0.1)


MANY = """
import sys
import threading
from pathlib import Path
from pipelines.catalog.table import FailedSlides
failed = FailedSlides(Path(sys.argv[1]))
for i in range(100):
    failed.add(f"{sys.argv[2]}-{i}", "read", "x" * 500)
"""


@pytest.mark.process
def test_threads_and_processes_append_whole_rows(tmp_path):
    path = tmp_path / "failed_slides.csv"
    started = [subprocess.Popen([sys.executable, "-c", MANY, str(path), f"p{k}"]) for k in range(2)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: FailedSlides(path).add(f"t-{i}", "read", "y" * 500), range(200)))
    assert [process.wait() for process in started] == [0, 0]
    assert path.read_text().count("slide,step,error") == 1
    expected = {f"t-{i}" for i in range(200)} | {f"p{k}-{i}" for k in range(2) for i in range(100)}
    rows = FailedSlides(path).rows()
    assert len(rows) == len(expected)
    assert {slide for slide, _, _ in rows} == expected


def test_rows_are_read_while_the_first_is_written(tmp_path):
    """Once, the first failure was taken for the header of a file that had been empty a moment before."""
    with ThreadPoolExecutor(1) as pool:
        for k in range(300):
            failed = FailedSlides(tmp_path / f"{k}.csv")
            adding = pool.submit(failed.add, "a", "open", "bad")
            while not adding.done():
                assert failed.rows() in ([], [("a", "open", "bad")])


@pytest.fixture
def failed(tmp_path):
    return FailedSlides(tmp_path / "failed_slides.csv")


def test_a_file_appears_with_the_first_failure_and_keeps_its_header(failed):
    assert failed.rows() == []
    failed.remove(["a"])
    assert not failed.path.exists()
    failed.add("a,b", "open", ValueError('two\nlines, "quoted"'))
    failed.add("c", "tiles", MemoryError())
    failed.add("a,b", "tiles", "bad")
    with failed.path.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["slide", "step", "error"],
            ["a,b", "open", 'two lines, "quoted"'],
            ["c", "tiles", "MemoryError"],
            ["a,b", "tiles", "bad"],
        ]
    failed.remove(["a,b", "x"])
    failed.remove(["c"], "stain")
    assert failed.rows() == [("c", "tiles", "MemoryError")]
    failed.remove(["c"])
    assert (failed.path.read_text(), failed.rows()) == ("slide,step,error\n", [])
    failed.add("d", "open", "bad")
    assert failed.rows() == [("d", "open", "bad")]


def test_threads_that_meet_the_same_failure_write_it_once(failed, monkeypatch):
    """Training and a validation beside it read the same slides."""
    add = failed.add
    monkeypatch.setattr(failed, "add", lambda *row: (time.sleep(0.2), add(*row)))
    with ThreadPoolExecutor(2) as pool:
        new = list(pool.map(lambda _: failed.add_once("a", "read", "damaged"), range(2)))
    assert sorted(new) == [False, True]
    assert failed.rows() == [("a", "read", "damaged")]


@pytest.mark.usefixtures("without_locks")
def test_failures_are_recorded_on_a_disk_without_locks(failed):
    for slide in "abc":
        failed.add(slide, "open", "bad")
    failed.remove(["b"])
    assert failed.rows() == [("a", "open", "bad"), ("c", "open", "bad")]
