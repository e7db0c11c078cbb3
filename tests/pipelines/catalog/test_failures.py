import csv
import fcntl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines.catalog.failures import FailedSlides

MANY = """
import sys
import threading
from pathlib import Path
from pipelines.catalog.failures import FailedSlides
failed = FailedSlides(Path(sys.argv[1]))
for i in range(100):
    failed.add(f"{sys.argv[2]}-{i}", "read", "x" * 500)
"""


def test_a_file_appears_with_the_first_failure(tmp_path):
    failed = FailedSlides(tmp_path / "failed_slides.csv")
    assert failed.rows() == []
    assert not failed.path.exists()
    failed.add("a,b", "open", ValueError('two\nlines, "quoted"'))
    failed.add("c", "tiles", MemoryError())
    with failed.path.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["slide", "step", "error"],
            ["a,b", "open", 'two lines, "quoted"'],
            ["c", "tiles", "MemoryError"],
        ]
    assert failed.rows()[1] == ("c", "tiles", "MemoryError")


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


def test_forgotten_slides_are_gone_and_others_stay(tmp_path):
    failed = FailedSlides(tmp_path / "failed_slides.csv")
    failed.forget(["a"])
    assert not failed.path.exists()
    for slide in "abca":
        failed.add(slide, "open", "bad")
    failed.forget(["a", "x"])
    assert [slide for slide, _, _ in failed.rows()] == ["b", "c"]
    failed.forget(["b", "c"])
    assert not failed.path.exists()


def test_a_row_is_not_written_to_a_file_that_was_taken_away_meanwhile(tmp_path):
    path = tmp_path / "failed_slides.csv"
    failed = FailedSlides(path)
    failed.add("a", "open", "bad")
    with path.open("rb+") as file, ThreadPoolExecutor(1) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = pool.submit(failed.add, "b", "open", "bad")
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        path.unlink()  # as forget does, which holds the lock
        fcntl.flock(file, fcntl.LOCK_UN)
        waiting.result(20)
    assert [slide for slide, _, _ in failed.rows()] == ["b"]


def test_threads_that_meet_the_same_failure_write_it_once(tmp_path):
    """Training and a validation beside it read the same slides."""
    failed, other = FailedSlides(tmp_path / "failed_slides.csv"), threading.Event()
    add = failed.add

    def slow(*row):
        other.wait(0.2)
        add(*row)

    failed.add = slow
    with ThreadPoolExecutor(2) as pool:
        new = list(pool.map(lambda _: failed.add_once("a", "read", "damaged"), range(2)))
    assert sorted(new) == [False, True]
    assert failed.rows() == [("a", "read", "damaged")]
