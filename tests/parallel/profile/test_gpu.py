"""Which GPUs a build of torch supports, by faked lists of what it was built for."""

from __future__ import annotations

import pytest
import torch

from parallel.profile.gpu import has_bf16, is_device_fault, lacks_memory, missing_kernels, set_tf32

CU130 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
CU126 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"


def be_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: str = CU130) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", built.split)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (CU130, (7, 0), False),  # V100
        (CU130, (6, 0), False),  # P100
        (CU126, (7, 0), True),
        (CU126, (12, 0), False),
        (CU130, (7, 5), True),
        (CU130, (8, 9), True),  # code for 8.6
        ("sm_80 sm_90", (8, 6), True),
        ("sm_86 sm_90", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_80 compute_80", (9, 0), True),  # PTX is compiled for it when it is loaded
        ("sm_50 compute_90", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("compute_100f", (12, 0), False),
        ("compute_90a", (10, 0), False),
        ("gfx90a", (9, 0), True),  # not to be judged
        ("", (7, 0), True),
    ],
)
def test_kernels_for_a_gpu(
    built: str, capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_gpu(monkeypatch, capability, built)
    assert (missing_kernels(0) == "") == runs


def test_the_gpu_and_what_to_install_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    be_gpu(monkeypatch, (7, 0))
    for word in ("GPU 1", "Tesla V100-SXM2-16GB", "7.0", "sm_70", CU130, "cu126"):
        assert word in missing_kernels(1)
    monkeypatch.setattr(torch.version, "cuda", None)  # of ROCm
    assert missing_kernels(1) == ""


@pytest.mark.parametrize(("capability", "native"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_bf16_that_a_gpu_only_emulates_does_not_count(
    capability: tuple[int, int], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_gpu(monkeypatch, capability)
    assert has_bf16(torch.device("cuda", 0)) == has_bf16(1) == native
    assert not has_bf16(torch.device("cpu"))


def test_tf32_is_switched_for_products_and_convolutions() -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        for allowed in (True, False):
            set_tf32(allowed)
            assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    ("fault", "of_device", "of_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True, True),
        (torch.AcceleratorError("CUDA error: out of memory"), True, True),  # of page-locked memory
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True, False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True, True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False, False),
        (ValueError("cuda"), False, False),
    ],
    ids=str,
)
def test_faults_of_a_device(fault: Exception, of_device: bool, of_memory: bool) -> None:
    assert (is_device_fault(fault), lacks_memory(fault)) == (of_device, of_memory)
