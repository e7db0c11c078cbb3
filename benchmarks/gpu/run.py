"""Everything that needs a GPU, tried and measured by one command in a few minutes; on a CPU at tiny sizes.

Takes seconds; gives ``gpu.json`` and ``gpu.md``, written anew after every row. Each part is a process of its own with a
share of the time, so that one that crashes, hangs or spoils the device takes no other with it. Exit code 1: a row did
not pass.

    python -m benchmarks.gpu.run [--out DIR] [--seconds 220] [--quick] [--parts smoke ...] [--from gpu.json] [--write]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from app.training.run_info import output_of
from benchmarks.gpu import report
from benchmarks.gpu.copies import link_peak
from benchmarks.gpu.setting import GIB, Row, Setting, fault_line
from benchmarks.results import OUT, ROOT, measured_on, parser_of, publish
from parallel.profile.gpu import set_tf32

SHARES = {"copies": 0.04, "offload_time": 0.34, "study": 0.28, "precision": 0.09, "largest": 0.25}
"""Part -> of the time, in the order in which they run. What a part leaves goes to those after it."""
PARTS = ("smoke", *SHARES)
SMOKE_S, SEVERAL_S, SMOKE_CPU_S = 200.0, 240.0, 400.0
"""That the smoke part may take: on one GPU, on several, which have more rows, and on a CPU, which may be busy."""
ALL_S, QUICK_S = 420.0, 15.0
"""Of all parts on GPUs; of those that are timed at tiny sizes, where most of it is spent starting processes."""
MOST_LOG = 20_000
"""Characters of a part's output that are kept."""
GRACE_S, BUSY_GRACE_S = 45.0, 150.0
"""That a part may take beyond its share to end what it is at, and on a CPU, which may be busy, to start."""


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.part:
        _run_part(arguments)
        return 0
    parts = {name: importlib.import_module(f"benchmarks.gpu.{name}") for name in arguments.parts}
    if arguments.published is not None:
        result = json.loads(arguments.published.read_text())
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        result = _measure(arguments, parts)
    if arguments.write:
        folder = Path(__file__).with_name("results")
        folder.mkdir(exist_ok=True)
        name = "".join(letter if letter.isalnum() else "-" for letter in f"{result['device']}-{result['date']}".lower())
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    publish(__file__, report.text_of(result, parts), arguments.write)
    return 1 if report.failures(result) else 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=OUT / "gpu", help="folder for gpu.json and gpu.md")
    parser.add_argument(
        "--seconds", type=float, help="of the timed parts together; default: 220, or 15 where sizes are tiny"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes on the CPU, though there is a GPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--from", dest="published", type=Path, help="measure nothing: show a gpu.json made elsewhere")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser


def _measure(arguments: argparse.Namespace, parts: dict[str, ModuleType]) -> dict[str, Any]:
    device = _device(arguments)
    smoke_s, seconds = SMOKE_CPU_S, arguments.seconds or QUICK_S
    about = {"device": "cpu", "driver": "none", "link": "No link."}
    if device.type == "cuda":
        smoke_s = SMOKE_S if torch.cuda.device_count() == 1 else SEVERAL_S
        seconds = arguments.seconds or ALL_S - smoke_s
        about = _about_gpu(device)
    result: dict[str, Any] = {
        **about,
        "gpu": device.type == "cuda",
        "date": date.today().isoformat(),
        "environment": measured_on(),
        "command": f"python -m benchmarks.gpu.run --seconds {seconds:g}",
        "parts": {},
    }
    timed = [name for name in parts if name in SHARES]
    if "smoke" in parts:
        _one_part(arguments, "smoke", smoke_s, result, parts)
    until_s = time.perf_counter() + seconds
    for number, name in enumerate(timed):
        rest = sum(SHARES[other] for other in timed[number:])
        share = max(1.0, (until_s - time.perf_counter()) * SHARES[name] / rest)
        _one_part(arguments, name, share, result, parts)
    return result


def _one_part(
    arguments: argparse.Namespace, name: str, seconds: float, result: dict[str, Any], parts: dict[str, ModuleType]
) -> None:
    """Run a part in a process of its own, and write what there is whenever it has another row."""
    print(f"{name}: {seconds:.0f} s", flush=True)
    found: dict[str, Any] = {"rows": [], "seconds": seconds}
    result["parts"][name] = found
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        rows.touch()
        command = [sys.executable, "-m", "benchmarks.gpu.run", "--part", name, "--rows", str(rows)]
        began = time.perf_counter()
        command += ["--until", str(began + seconds), *(["--quick"] if arguments.quick else [])]
        with log.open("w") as output:
            child = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        limit_s = seconds + (GRACE_S if result["gpu"] else BUSY_GRACE_S)
        while child.poll() is None and time.perf_counter() - began < limit_s:
            time.sleep(0.2)
            known, found["rows"] = len(found["rows"]), _rows(rows)
            if len(found["rows"]) > known:
                report.write(arguments.out, result, parts)
        if child.poll() is None:
            _end(child)
            found["fault"] = f"stopped after {limit_s:.0f} s"
        elif child.returncode:
            last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
            found["fault"] = f"exit code {child.returncode}: {last[:300]}"
        found["log"] = log.read_text(errors="replace")[-MOST_LOG:]
        found |= {"rows": _rows(rows), "taken_s": time.perf_counter() - began}
        report.write(arguments.out, result, parts)


def _rows(file: Path) -> list[Row]:
    """Return the rows that a part has written so far."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a part and the ranks it started."""
    for how, wait_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        os.killpg(child.pid, how)
        try:
            child.wait(wait_s)
            return
        except subprocess.TimeoutExpired:
            continue


def _run_part(arguments: argparse.Namespace) -> None:
    """Run a part in this process, which is its own."""
    device = _device(arguments)
    if device.type == "cpu":
        torch.set_num_threads(1)
    set_tf32(False)  # as with --precision fp32
    part = importlib.import_module(f"benchmarks.gpu.{arguments.part}")
    setting = Setting(device, arguments.until)  # a clock that all processes of a machine share
    with arguments.rows.open("a") as file:
        try:
            for row in part.rows(setting):
                print(json.dumps(row), file=file, flush=True)
        except Exception as fault:
            print(json.dumps({"part": arguments.part, "fault": fault_line(fault)}), file=file, flush=True)
            raise


def _device(arguments: argparse.Namespace) -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() and not arguments.quick else "cpu")


def _about_gpu(device: torch.device) -> dict[str, str]:
    memory = torch.cuda.get_device_properties(device).total_memory / GIB
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver, peak = (output_of(query) or "unknown").splitlines()[0], link_peak()
    unknown = "The driver does not describe its link."
    return {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}, {memory:.0f} GiB",
        "driver": f"{driver}, torch built for CUDA {torch.version.cuda}",
        "link": unknown if peak is None else f"Its link: {peak / 1e9:.1f} GB/s each way.",
    }


if __name__ == "__main__":
    sys.exit(main())
