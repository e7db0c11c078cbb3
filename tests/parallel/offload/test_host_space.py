"""Arrays of the host: in memory up to a budget, in files without a name beyond it."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

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


def test_what_the_disk_refuses_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """Here a limit of the system; a full disk is refused at the same place."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, hard))
    try:
        with pytest.raises(OSError, match=r"no place for a file of 5 MiB, beside 3 MiB of memory .*File too") as told:
            HostSpace(3 * MIB, tmp_path).zeros((5 * MIB,), torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (told.value.errno, told.value.filename) == (errno.EFBIG, str(tmp_path))
