"""Run every feature on this machine and compare it with the plain step, before anything is timed.

Takes nothing; gives a row per engine, the same rows under torch's CUDA sanitizer, counts of host synchronisations, and
rows of commands.
A row has passed, has not (NO), or was not run: a package is missing, there are too few GPUs, or its time was used up.
"""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.gpu.setting import Row, Setting, fault_line
from benchmarks.gpu.smoke_commands import Commands, run_process
from benchmarks.ranks import run_on_ranks

NET = "benchmarks.gpu.smoke_engines:net"
DROPPING = "benchmarks.gpu.smoke_engines:dropping"
USUAL = "--batch 4 --microbatches 2"
ALONE: tuple[tuple[str, str, str, str], ...] = (
    ("plain step against the CPU", "cpu", "resnet", "--parallel single"),
    ("stream", "plain", "resnet", "--parallel single --stream BOX"),
    ("bf16", "bf16", NET, "--parallel single"),
    ("stream, bf16", "bf16", NET, "--parallel single --stream BOX"),
    ("offload, one copy at a time", "plain", NET, "--parallel single --offload overlap --offload-ahead=1KiB"),
    ("offload, overlap", "plain", NET, "--parallel single --offload overlap --offload-ahead=256MiB"),
    ("recompute", "plain", NET, "--parallel single --recompute block"),
    ("checkpoint in two phases", "checkpoint", NET, "--parallel single"),
    ("syncs, single", "syncs", "resnet", "--parallel single"),
    ("syncs, stream", "syncs", "resnet", "--parallel single --stream BOX"),
)
"""Name, kind of run, model and strategy of the cases of one rank."""
TOGETHER: tuple[tuple[str, str, str, str], ...] = (
    ("spatial", "plain", "resnet", "--parallel spatial --grid 2x1"),
    ("spatial, bf16", "bf16", NET, "--parallel spatial --grid 2x1"),
    ("1f1b, stream, bf16", "bf16", NET, "--parallel 1f1b --stream BOX"),
    ("1f1b, dropout in two stages", "plain", DROPPING, "--parallel 1f1b"),
    ("gpipe, offload", "plain", NET, "--parallel gpipe --offload overlap"),
    ("master, offload", "plain", NET, "--parallel master --offload overlap"),
    ("ddp, parameters on the host", "plain", NET, "--parallel ddp --offload-state=parameters"),
    ("syncs, ddp", "syncs", "resnet", "--parallel ddp"),
    ("syncs, 1f1b", "syncs", "resnet", "--parallel 1f1b"),
)
"""The same of two ranks; over NCCL where there are two GPUs, else over Gloo."""
PX, TINY_PX = 128, 64
COMMANDS: tuple[tuple[str, int, int, Callable[[Commands, str], Row]], ...] = (
    ("app.train --resume", 1, 1, Commands.resume),
    ("app.train --resume, a GPU less", 2, 2, Commands.resume_on_fewer),
    ("app.predict --stages 2", 2, 1, functools.partial(Commands.predict, ranks=2)),
    ("app.predict --stages 2, two groups", 4, 1, functools.partial(Commands.predict, ranks=4)),
)
"""Name, ranks, GPUs that are needed, and what runs, of the cases that are commands."""
SANITIZER = {"TORCH_CUDA_SANITIZER": "1"}
WAIT_S, LEAST_S = 30.0, 15.0
"""Seconds that a rank waits for another, and those without which nothing is begun."""
USED_UP = "the time of this part was used up"
MOST_LETTERS = 240
"""Of a failure, in the table; the rest is in gpu.json."""
HEADER = ("what", "CUDA sanitizer", "ranks", "over", "result", "passed", "s", "first line of the failure")


def rows(setting: Setting) -> Iterator[Row]:
    for sanitized in (False, True) if setting.full else (False,):
        for ranks, table in ((1, ALONE), (2, TOGETHER)):
            cases = [
                _case(setting, ranks, *each, small=sanitized)
                for each in table
                if not (sanitized and each[1] == "syncs")
            ]
            for row in _launched(setting, ranks, cases, SANITIZER if sanitized else {}):
                yield {"sanitized": sanitized, **row}
    with tempfile.TemporaryDirectory() as name:
        commands = Commands(setting, Path(name), run_process)
        for what, ranks, gpus, run in COMMANDS:
            case: Row = {"sanitized": False, "name": what, "ranks": ranks, "over": _over(setting, ranks)}
            yield _commanded(setting, case, gpus, functools.partial(run, commands, what))


def _case(setting: Setting, ranks: int, name: str, run: str, model: str, flags: str, *, small: bool = False) -> Row:
    """Return a case; ``small``: of the small model, as the sanitizer makes every step many times as long."""
    px, usual = setting.of(PX, TINY_PX), setting.of("resnet18", NET)
    return {
        "name": name,
        "run": run,
        "ranks": ranks,
        "over": _over(setting, ranks),
        "model": (NET if small else usual) if model == "resnet" else model,
        "px": px,
        "flags": f"{flags.replace('BOX', str(px // 2))} {USUAL}",
    }


def _over(setting: Setting, ranks: int) -> str:
    """Return what ranks talk over."""
    if ranks == 1:
        return "-"
    return "nccl" if setting.full and torch.cuda.device_count() >= ranks else "gloo"


def _launched(setting: Setting, ranks: int, cases: Sequence[Row], env: Mapping[str, str]) -> Iterator[Row]:
    """Run cases on ranks that are started once, and once more behind each case that fails."""
    left = list(cases)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        while left and setting.left_s > LEAST_S:
            file.write_text("")
            failure = ""
            try:
                run_on_ranks(
                    ranks,
                    "benchmarks.gpu.smoke_engines:run_all",
                    {"cases": left, "rows": str(file), "device": setting.device.type},
                    timeout_s=WAIT_S,
                    limit_s=setting.left_s,
                    device=setting.device.type if ranks > 1 else "cpu",
                    env=env,
                )
            except RuntimeError as fault:
                failure = str(fault).rpartition(" ranks ended with ")[2]
            done = [json.loads(line) for line in file.read_text().splitlines()]
            yield from done
            left = left[len(done) :]
            if failure:
                yield {**(left.pop(0) if left else {**cases[-1], "name": "end of the ranks"}), **_failed(failure)}
    yield from ({**case, **_failed(USED_UP)} for case in left)


def _commanded(setting: Setting, case: Row, gpus: int, run: Callable[[], Row]) -> Row:
    if setting.full and torch.cuda.device_count() < gpus:
        return {**case, **_failed(f"needs {gpus} GPUs")}
    if setting.left_s < LEAST_S:
        return {**case, **_failed(USED_UP)}
    began = time.perf_counter()
    try:
        return {**case, **run(), "seconds": time.perf_counter() - began}
    except subprocess.TimeoutExpired:
        return {**case, **_failed(USED_UP)}
    except Exception as fault:  # see ``setting.attempt``
        return {**case, **_failed(fault_line(fault)), "seconds": time.perf_counter() - began}


def _failed(failure: str) -> Row:
    """Return what a failure makes of a row. What was not tried has not failed."""
    tried = failure != USED_UP and "No module named" not in failure and not failure.startswith("needs ")
    return {"passed": False if tried else None, "failure": failure}


def line(row: Row) -> tuple[str, ...]:
    if "syncs" in row:
        result = "not counted on a CPU" if row["syncs"] is None else f"{row['syncs']:g} a microbatch"
    elif "error" in row:
        result = f"error {row['error']:.1e}, at most {row['allowed']:.0e}"
    else:
        result = "-"
    return (
        row["name"],
        "yes" if row["sanitized"] else "no",
        str(row["ranks"]),
        row["over"],
        result,
        {True: "yes", False: "NO", None: "not run"}[row["passed"]],
        f"{row['seconds']:.1f}" if "seconds" in row else "-",
        (row.get("failure") or "-").replace("|", "/")[:MOST_LETTERS],
    )
