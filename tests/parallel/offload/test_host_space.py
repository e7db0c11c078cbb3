"""Arrays of the host: in memory up to a budget, in files without a name beyond it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.offload.host_space import HostSpace

MIB = 1 << 20


def on_disk(folder: Path) -> int:
    """Bytes that this process has mapped of files in ``folder``."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            start, stop = (int(address, 16) for address in line.split()[0].split("-"))
            total += stop - start
    return total


def test_what_does_not_fit_lies_in_files_that_go_with_their_tensors(tmp_path: Path) -> None:
    host = HostSpace(3 * MIB, tmp_path)
    kept = [host.zeros((2, 1024, 256), torch.float32)]
    assert on_disk(tmp_path) == 0
    view = host.zeros((2, 1024, 1024), torch.uint8)[1]
    assert on_disk(tmp_path) == 2 * MIB
    assert not list(tmp_path.iterdir()), "a file with a name would outlive a killed process"
    view[5, 7] = 3
    assert int(view.sum()) == 3
    kept.append(host.zeros((MIB,), torch.uint8))
    assert on_disk(tmp_path) == 2 * MIB
    assert (host.peak_memory_bytes, host.peak_file_bytes) == (3 * MIB, 2 * MIB)
    kept.clear()
    del view
    assert on_disk(tmp_path) == 0
    kept.append(host.zeros((3 * MIB,), torch.uint8))
    assert on_disk(tmp_path) == 0, "what was let go of is there again"
    assert host.zeros((0, 4), torch.int64).shape == (0, 4)


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"no space left for 2 GiB, which do not fit in 3 MiB of the host") as told:
        HostSpace(3 * MIB, tmp_path).zeros((1 << 31,), torch.uint8)
    assert (told.value.errno, told.value.filename) == (errno.ENOSPC, str(tmp_path))
