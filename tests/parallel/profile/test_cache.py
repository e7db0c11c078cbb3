"""What cannot be kept is used all the same; which GPUs a build of torch supports, by faked lists."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from parallel.profile import cache, link_speed
from parallel.profile import calibrate as calibration
from parallel.profile.cache import keep, kept_at, kept_text
from parallel.profile.calibrate import DeviceUse, load_or_calibrate
from parallel.profile.gpu import has_bf16, is_device_fault, lacks_memory, missing_kernels, set_tf32
from parallel.profile.link_speed import CopySpeed, load_or_measure_copies

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
SAID = "used now and not kept; XDG_CACHE_HOME names another folder"


class Measured:
    seconds_taken = 45.0
    others = 0.0

    def to_json(self) -> str:
        return "{}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    cache._tell.cache_clear()
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: Measured())
    monkeypatch.setattr(link_speed, "measure_copies", lambda *_, **__: CopySpeed(1e9, 1e9))


def measure(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert isinstance(load_or_calibrate(DeviceUse(CPU)), Measured)
    assert load_or_measure_copies(CPU) == CopySpeed(1e9, 1e9)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("home", [None, "/proc/none", "/dev/null"])
def test_a_home_that_is_not_there_or_cannot_be_written(
    home: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is None:
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as for the number of a user that no list knows
        assert kept_at({}) is None
    else:
        monkeypatch.setenv("HOME", home)
    (said,) = measure(caplog)
    assert said.startswith("this user has no home" if home is None else f"{home}/.cache/megatile cannot be written (No")
    assert said.endswith(SAID)


def test_a_cache_whose_disk_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "replace", full)
    (said,) = measure(caplog)
    assert said.startswith(f"{tmp_path}/megatile cannot be written (No space left on device)")
    assert list((tmp_path / "megatile").iterdir()) == []
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    keep(kept_at({}), "text")


COMPILES = """
import os, stat, sys
from dataclasses import dataclass
from app.settings.cli import run_command

@dataclass(frozen=True)
class Command:
    pass

def body(_):
    import torch
    torch.optim.SGD([torch.ones(1, requires_grad=True)])
    import torch._dynamo
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    print(cache_dir(), oct(stat.S_IMODE(os.stat(cache_dir()).st_mode)))

sys.exit(run_command(Command, body, [], "command"))
"""


@pytest.mark.process
@pytest.mark.parametrize("home", ["cache", "none"])
def test_torch_compiles_where_nobody_else_writes(home: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    cache_home = {"cache": str(tmp_path / "cache"), "none": "/proc/none"}[home]
    environment = {k: v for k, v in os.environ.items() if k != cache.INDUCTOR}
    environment |= {"XDG_CACHE_HOME": cache_home, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    folder, mode = done.stdout.split()
    assert mode == "0o700"
    expected = tmp_path / "cache" / "megatile" / "torchinductor" if home == "cache" else tmp_path / "tmp"
    assert Path(folder).is_relative_to(expected)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: data.replace(b"4.5", b"9.5"),
        lambda data: data.partition(b"\n")[0],
        lambda data: b"[" * 100_000,
        lambda data: b"\xff\x00" * 50,
        lambda data: b'{"key": {}, "others": "many"}',
    ],
)
def test_what_is_damaged_is_named_and_measured_anew(
    harm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = kept_at({"device": "abacus"})
    assert kept_text(path) is None
    keep(path, '{"seconds": 4.5}')
    assert kept_text(path) == '{"seconds": 4.5}'
    assert not caplog.records
    path.write_bytes(harm(path.read_bytes()))
    assert kept_text(path) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage()


CU130 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
CU126 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"


def be_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: str = CU130) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", built.split)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)


KERNELS = [
    (CU130, (7, 0), False),  # V100
    (CU130, (6, 0), False),  # P100
    *((CU126, (7, 0), True), (CU126, (12, 0), False), (CU130, (7, 5), True)),
    (CU130, (8, 9), True),  # code for 8.6
    *(("sm_80 sm_90", (8, 6), True), ("sm_86 sm_90", (8, 0), False), ("sm_80", (9, 0), False)),
    ("sm_80 compute_80", (9, 0), True),  # PTX is compiled for it when it is loaded
    *(("sm_50 compute_90", (8, 0), False), ("sm_90a", (9, 0), True), ("sm_100a", (10, 3), False)),
    *(("sm_100f", (10, 3), True), ("compute_100f", (12, 0), False), ("compute_90a", (10, 0), False)),
    *(("gfx90a", (9, 0), True), ("", (7, 0), True)),  # not to be judged
]


@pytest.mark.parametrize(("built", "capability", "runs"), KERNELS)
def test_kernels_for_a_gpu(built: str, capability: tuple[int, int], runs: bool, monkeypatch) -> None:
    be_gpu(monkeypatch, capability, built)
    assert (missing_kernels(0) == "") == runs


def test_the_gpu_and_what_to_install_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    be_gpu(monkeypatch, (7, 0))
    for word in ("GPU 1", "Tesla V100-SXM2-16GB", "7.0", "sm_70", CU130, "cu126"):
        assert word in missing_kernels(1)
    monkeypatch.setattr(torch.version, "cuda", None)  # of ROCm
    assert missing_kernels(1) == ""


@pytest.mark.parametrize(("capability", "native"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_bf16_that_a_gpu_only_emulates_does_not_count(capability: tuple[int, int], native: bool, monkeypatch) -> None:
    be_gpu(monkeypatch, capability)
    assert has_bf16(torch.device("cuda", 0)) == has_bf16(1) == native
    assert not has_bf16(torch.device("cpu"))


@pytest.mark.parametrize(
    ("fault", "of_device", "of_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True, True),
        (torch.AcceleratorError("CUDA error: out of memory"), True, True),  # of page-locked memory
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True, False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True, True),
        (RuntimeError("CUDA error: out of memory"), True, True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True, True),
        (RuntimeError("No CUDA GPUs are available"), True, False),
        (RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu!"), False, False),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False, False),
        (ValueError("cuda"), False, False),
        (RuntimeError("this slide is out of memory"), False, False),
    ],
    ids=str,
)
def test_faults_of_a_device(fault: Exception, of_device: bool, of_memory: bool) -> None:
    assert (is_device_fault(fault), lacks_memory(fault)) == (of_device, of_memory)


def test_tf32_is_switched_for_products_and_convolutions() -> None:
    places = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    try:
        for allowed in (True, False):
            set_tf32(allowed)
            assert [place.allow_tf32 for place in places] == [allowed] * 2
    finally:
        for place, allowed in zip(places, before, strict=True):
            place.allow_tf32 = allowed
