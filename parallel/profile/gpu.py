"""Support of this machine's GPUs: whether this torch has kernels for them, how they multiply, and how they fail.

Takes the index of a GPU, and asks only for its properties; or an exception.
"""

from __future__ import annotations

import re

import torch


def missing_kernels(index: int) -> str:
    """Return why this torch cannot compute on GPU ``index``, and what to install; "" if it can."""
    built = torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability(index)
    # A build for ROCm checks its devices itself.
    if torch.version.cuda is None or not built or any(_runs_on(arch, *capability) for arch in built):
        return ""
    major, minor = capability
    return (
        f"GPU {index} ({torch.cuda.get_device_name(index)}, compute capability {major}.{minor}) needs kernels for "
        f"sm_{major}{minor}, and torch {torch.__version__} has those for {' '.join(built)}: install another build of "
        "torch (GPUs before sm_75 need the one for CUDA 12.6, cu126; new GPUs need a later release)"
    )


def _runs_on(arch: str, major: int, minor: int) -> bool:
    """Return whether code for ``arch``, as "sm_80" or "compute_90", runs on a GPU of this compute capability.

    Machine code runs on GPUs of its generation that are not older; PTX (compute) on all that are not older. Suffix a:
    on this capability alone; f: on its generation. Source: CUDA C++ Programming Guide, section Compute Capability.
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if parts is None:
        return True  # unknown to us: torch finds out
    kind, suffix = parts[1], parts[4]
    code = int(parts[2]), int(parts[3])
    if suffix == "a":
        return code == (major, minor)
    if kind == "compute" and not suffix:
        return code <= (major, minor)
    return code[0] == major and code[1] <= minor


def has_bf16(device: torch.device | int) -> bool:
    """Return whether a device multiplies in bf16 and in TF32: GPUs since Ampere do. Others only emulate bf16."""
    if isinstance(device, torch.device) and device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 8


def set_tf32(allowed: bool) -> None:
    """Let this process compute products and convolutions of float32 on GPUs in TF32, with mantissas of 10 bits, or
    not. By default torch does so in convolutions alone."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def is_device_fault(fault: BaseException) -> bool:
    """Return whether ``fault`` is of the device, which ran out of memory or failed, and not of what it computed."""
    if isinstance(fault, torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(fault, RuntimeError) and re.search("cuda|cudnn|cublas", str(fault), re.IGNORECASE) is not None


def lacks_memory(fault: BaseException) -> bool:
    """Return whether a device fault is one of memory, as the allocator, the driver or a library reports it."""
    text = re.search("out of memory|ALLOC_FAILED", str(fault), re.IGNORECASE)
    return isinstance(fault, torch.OutOfMemoryError) or text is not None
