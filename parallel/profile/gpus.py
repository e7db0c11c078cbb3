"""Describe the GPUs of this machine, and measure them, without a CUDA context in the calling process.

A context takes up to 600 MB of its GPU for as long as the process lives, and a GPU in compute mode EXCLUSIVE_PROCESS
admits one process with a context. A process that starts ranks or makes plans therefore asks another process, which has
ended when the next one starts. ``torch.cuda.is_available`` and ``torch.cuda.device_count`` open no context.
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

from parallel.profile.gpu import has_bf16, missing_kernels

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
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
    """Return ``function(*arguments)``, called in a process that ends with it; in this one if it has a context already.

    Args:
        function: of a module's top level; returns what JSON can hold.
        arguments: numbers and strings.

    Raises:
        OSError: the process failed; says why.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return function(*arguments)
    module, name = function.__module__, function.__qualname__
    code = f"import json; from {module} import {name}; print(json.dumps({name}(*{arguments!r})))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as fault:
        reason = last_error(fault.stderr) or f"nothing; exit code {fault.returncode}"
        raise OSError(f"a process that asked for this machine's GPUs said: {reason}; {ADVICE}") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"this machine's GPUs did not answer within {TIMEOUT_S:g} s; {ADVICE}") from None
    return json.loads(done.stdout.splitlines()[-1])


def last_error(printed: str) -> str:
    """Return the line of ``printed``, by a process that failed, that names its last exception, else the last line.
    Exceptions of CUDA have several lines."""
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
