"""GPUs of this machine: whether this torch can compute on them, how they fail, and what they are.

A CUDA context takes up to 600 MB of its GPU until the process ends, and a GPU in compute mode EXCLUSIVE_PROCESS admits
one process with a context. A process that starts ranks or makes plans therefore asks another process, which has ended
when the next one starts.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
DEVICE_FAULTS = "cuda (unknown )?error|cuda out of memory|cuda driver|no cuda gpus|cudnn|cublas|triton error"
"""In messages of torch, its libraries and Triton, in any case."""
ADVICE = "see which programs nvidia-smi shows on them, or use --device cpu"


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use.

    Attributes:
        memory_bytes, free_bytes: all of its memory, and what no process has allocated.
        capability: compute capability, such as "8.0".
        bf16: it has bfloat16 arithmetic, and TF32; others emulate it.
        missing_kernels: why torch cannot compute on it; "" if it can.
    """

    name: str
    memory_bytes: int
    free_bytes: int
    capability: str
    bf16: bool
    missing_kernels: str


def in_cuda_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Return ``function(*arguments)``, as ``in_process``; called in this process if that has a CUDA context already.

    Raises:
        OSError: the process failed; says why.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return function(*arguments)
    try:
        return in_process(function.__module__, function.__qualname__, *arguments)
    except RuntimeError as fault:
        raise OSError(f"a process that asked for this machine's GPUs said: {fault}; {ADVICE}") from None


def in_process(module: str, function: str, *arguments: object, timeout_s: float = TIMEOUT_S) -> Any:
    """Return ``function(*arguments)``, called in a process that ends with it.

    Args:
        function: of the top level of ``module``; returns what JSON can hold.
        arguments: values that ``repr`` writes as Python.

    Raises:
        RuntimeError: the process failed, or did not end in time; what it said last.
    """
    code = f"import json; from {module} import {function}; print(json.dumps({function}(*{arguments!r})))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except subprocess.CalledProcessError as fault:
        raise RuntimeError(last_error(fault.stderr) or f"nothing; exit code {fault.returncode}") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nothing for {timeout_s:g} s") from None
    return json.loads(done.stdout.splitlines()[-1])


def last_error(printed: str) -> str:
    """Return the line of ``printed`` that names the last exception of a process that failed, else the last line."""
    lines = printed.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines or [""])[-1]


def describe_gpus() -> list[dict[str, Any]]:
    """Return name, memory_bytes, capability, bf16 and missing_kernels of each GPU that torch sees."""
    if not torch.cuda.is_available():
        return []
    gpus: list[dict[str, Any]] = in_cuda_process(read_gpus)
    return gpus


@functools.cache
def gpu_at(index: int) -> Gpu:
    """Return the GPU ``index``, as it was when it was first asked for."""
    return Gpu(**in_cuda_process(read_gpu, index))


def read_gpus() -> list[dict[str, Any]]:
    """Return what ``describe_gpus`` does; opens a CUDA context."""
    return [_properties(index) for index in range(torch.cuda.device_count())]


def read_gpu(index: int) -> dict[str, Any]:
    """Return the fields of a ``Gpu``; opens a CUDA context."""
    return asdict(Gpu(**_properties(index), free_bytes=torch.cuda.mem_get_info(index)[0]))


def _properties(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "bf16": has_bf16(index),
        "missing_kernels": missing_kernels(index),
    }


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
    """Return whether code for ``arch``, as "sm_80", runs on such a GPU (CUDA C++ Guide, Compute Capability)."""
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if parts is None:
        return True  # unknown to us: torch finds out
    kind, suffix = parts[1], parts[4]
    code = int(parts[2]), int(parts[3])
    if suffix == "a":  # this capability alone; f: its generation
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
    said = re.search(DEVICE_FAULTS, str(fault), re.IGNORECASE)
    return isinstance(fault, RuntimeError) and said is not None


def lacks_memory(fault: BaseException | None) -> bool:
    """Return whether ``fault`` is of the device's memory, as the allocator, the driver or a library reports it."""
    if fault is None or not is_device_fault(fault):
        return False
    text = re.search("out of memory|ALLOC_FAILED", str(fault), re.IGNORECASE)
    return isinstance(fault, torch.OutOfMemoryError) or text is not None
