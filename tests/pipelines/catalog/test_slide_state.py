"""A slide that was replaced is told from one that was touched, for files and for folders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from app.checks.slides import write_samples
from pipelines.catalog.handles import SlideState, digest
from tests.helpers.real import SVS


def same_time(path: Path, state: SlideState) -> None:
    os.utime(path, ns=(state.modified_ns, state.modified_ns))


def test_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.svs"
    shutil.copyfile(SVS, path)
    state = SlideState.of(path)
    os.utime(path)
    assert state.is_of(path), "touched"
    whole = bytearray(path.read_bytes())
    whole[100] ^= 1  # of the header
    path.write_bytes(whole)
    assert not state.is_of(path)
    same_time(path, state)
    assert state.is_of(path), "size and time come first"
    assert not state.is_of(path, thorough=True)
    path.write_bytes(whole[:-1])
    assert not state.is_of(path)
    path.unlink()
    assert not state.is_of(path)


def test_of_a_folder(tmp_path: Path) -> None:
    path = write_samples(tmp_path)["zarr"]
    state = SlideState.of(path)
    os.utime(path / ".zattrs")
    assert state.is_of(path), "touched"
    chunk = path / "0" / "0.1.1"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    assert not state.is_of(path, thorough=True)
    chunk.unlink()
    assert not state.is_of(path, thorough=True)


def test_of_an_mrxs_slide_the_folder_counts(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s.mrxs").write_bytes(b"slide")
    (tmp_path / "s" / "Data0001.dat").write_bytes(b"pixels")
    before = digest(tmp_path / "s.mrxs")
    (tmp_path / "s" / "Data0001.dat").write_bytes(b"others")
    assert digest(tmp_path / "s.mrxs") != before


def test_little_is_read_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "large.svs"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    assert len(digest(path)) == 32
