import signal
import subprocess
import sys
import time

import psutil
import pytest

from pipelines.catalog.processes import Limits, WorkerCrashed, WorkerTimeout, map_isolated
from tests.helpers.work import hold, main_module, process_of, sleep_if_odd, square


def children():
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("workers", [1, 3])
def test_every_item_comes_back_with_its_result(workers):
    before = children()
    assert dict(map_isolated(square, range(12), workers)) == {i: i * i for i in range(12)}
    assert children() == before


def test_no_items_start_no_process():
    assert list(map_isolated(square, [], 4)) == []


def test_a_worker_serves_many_items():
    used = {pid for _, pid in map_isolated(process_of, range(6), 2)}
    assert len(used) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_that_dies_costs_its_item_only(workers):
    items = [1, -signal.SIGABRT, 2, -signal.SIGKILL, 13, 3]
    results = dict(map_isolated(square, items, workers))
    assert {i: results[i] for i in (1, 2, 3)} == {1: 1, 2: 4, 3: 9}
    assert results[-signal.SIGABRT] == WorkerCrashed("SIGABRT")
    assert results[13] == WorkerCrashed("exit code 13")
    assert "SIGKILL; the kernel does so when memory runs out" in str(results[-signal.SIGKILL])


def test_all_may_die():
    results = list(map_isolated(square, [-signal.SIGKILL] * 3, 2))
    assert [result for _, result in results] == [WorkerCrashed("SIGKILL")] * 3


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


def test_the_callers_main_is_not_imported():
    assert next(map_isolated(main_module, [0], 1))[1].endswith("pipelines/catalog/processes.py")


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
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "(0, 0)\n"
        (worker,) = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
    deadline_s = time.monotonic() + 20
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the worker sleeps on"
        time.sleep(0.1)
