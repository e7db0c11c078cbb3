"""Damaged slides, pictures, masks and tables, thousands of them: is any of them wrong without a word, or fatal?

Takes nothing (whole files are made, or are those in ``data/``); gives one line per format in the README next to this
file. Every variant is opened, indexed and read in a process of its own with 3 GiB of address space and 30 s of
processor time.

    python -m benchmarks.fuzz.run [--variants 200] [--formats svs,png] [--seed 0] [--only N] [--write]
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz.judge import ALIKE, others_agree, strict_accepts
from benchmarks.fuzz.mutations import Layout, layout_of, write_variant
from benchmarks.fuzz.seeds import FORMATS, write_seeds
from benchmarks.fuzz.subject import UNRECORDED, Report, take

README = Path(__file__).with_name("README.md")
LIMIT_BYTES, LIMIT_S, CLOCK_S = 3 << 30, 30, 120.0
"""Address space, processor time, and time by the clock, which a busy machine stretches."""
HIGH_BYTES = 1_500_000_000
"""More than this a variant must not take."""

OUTCOMES = ("refused", "partly read", "unchanged", "payload", "as others read it", "SILENT")
FAULTS = ("SILENT", "foreign exception", "crash", "hang", "over 1.5 GB")
"""Outcomes that are to be none; ``SILENT``: other pixels or um/px than the whole file's, and no other reader agrees."""


@dataclass(frozen=True)
class Variant:
    """One damaged file and what became of it."""

    format: str
    number: int
    mutation: str
    outcome: str
    detail: str = ""
    peak_bytes: int = 0
    seconds: float = 0.0


def _limited(connection: Connection, work: Any, *arguments: Any) -> None:
    """The life of a process: ``work``, within the limits, its result sent back."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # what libraries say before they die
    try:
        connection.send(work(*arguments))
    except BaseException as error:
        connection.send(error if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}")
    connection.close()


def apart(work: Any, *arguments: Any) -> Any:
    """The result of ``work`` in a process within the limits; the name of what ended it: ``hang``, or a signal."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.fuzz.preload"])  # before the first process, which starts the server
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_limited, args=(theirs, work, *arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(CLOCK_S):
            return "hang"
        return ours.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        if code in (-signal.SIGXCPU, -signal.SIGKILL):  # nothing else here kills
            return "hang"
        return f"crash: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def try_variant(
    format_name: str, number: int, seed: int, whole: Path, layout: Layout | None, reference: Report, folder: Path
) -> Variant:
    """Make variant ``number`` of a format in ``folder`` and take it through a command."""
    chance = random.Random(f"{seed}/{format_name}/{number}")
    folder.mkdir()
    path = folder / whole.name
    try:
        mutation, payload = write_variant(whole, layout, path, chance)
        started_s = time.perf_counter()
        report = apart(take, format_name, path)
        seconds = time.perf_counter() - started_s
        if isinstance(report, str):
            return Variant(format_name, number, mutation, report.split(":")[0], report, 0, seconds)
        outcome, detail = judged(format_name, report, reference, payload, path)
        return Variant(format_name, number, mutation, outcome, detail, report.peak_bytes, seconds)
    finally:
        if not os.environ.get("FUZZ_KEEP"):
            shutil.rmtree(folder, ignore_errors=True)


def judged(format_name: str, report: Report, reference: Report, payload: bool, path: Path) -> tuple[str, str]:
    """Outcome and its detail."""
    if report.peak_bytes > HIGH_BYTES:
        return "over 1.5 GB", f"{report.peak_bytes / 1e9:.1f} GB; {report.fault}"
    if report.foreign:
        return "foreign exception", report.foreign
    if report.is_refused:
        return "refused", report.fault
    read = [name for name, pixels in report.reads.items() if pixels is not None]
    differing = [name for name in read if _differs(name, report, reference)]
    other_facts = report.facts[1:] != reference.facts[1:]  # another backend may have read it, and as well
    if not differing and not other_facts:
        return ("partly read", report.fault) if len(read) < len(report.reads) else ("unchanged", "")
    said = f"facts {report.facts} for {reference.facts}" if other_facts else f"pixels of {', '.join(differing[:3])}"
    if format_name == "jpeg" and apart(strict_accepts, path) is not True:
        return "SILENT", f"{said}, which a strict decoder refuses"
    if payload:
        return "payload", said
    if apart(others_agree, path, report, format_name not in UNRECORDED) is True:
        return "as others read it", said
    return "SILENT", said


def _differs(name: str, report: Report, reference: Report) -> bool:
    """Return whether pixels are not those of the whole file; two backends may round coarser levels apart."""
    pixels, whole = report.reads[name], reference.reads.get(name)
    if pixels is None or whole is None or whole.shape != pixels.shape:
        return True
    difference = np.abs(whole.astype(int) - pixels)
    return bool(difference.any() if report.backend == reference.backend else difference.mean() > ALIKE)


def run(formats: list[str], numbers: list[int], seed: int, workers: int) -> list[Variant]:
    """Every variant of every format, in order."""
    with tempfile.TemporaryDirectory(prefix="megatile-fuzz-") as name, ThreadPoolExecutor(workers) as pool:
        scratch = Path(os.environ.get("FUZZ_KEEP") or name)
        wholes = apart(write_seeds, scratch / "whole", formats)
        assert isinstance(wholes, dict), f"the whole files cannot be written: {wholes}"
        jobs = []
        for format_name in formats:
            whole = wholes[format_name]
            layout = layout_of(whole) if whole.is_file() else None
            reference = apart(take, format_name, whole)
            assert isinstance(reference, Report), f"{format_name}: the whole file: {reference}"
            assert not reference.fault, f"{format_name}: the whole file: {reference.fault}"
            jobs += [
                pool.submit(try_variant, format_name, k, seed, whole, layout, reference, scratch / f"{format_name}-{k}")
                for k in numbers
            ]
        found = []
        for job in jobs:
            found.append(job.result())
            if found[-1].outcome in FAULTS:
                told = found[-1]
                print(f"{told.outcome}: {told.format} {told.number} {told.mutation}: {told.detail}", flush=True)
        return found


def rows(found: list[Variant]) -> list[list[str]]:
    """One line per format, and their sum."""
    table = []
    for name in [*dict.fromkeys(v.format for v in found), ""]:
        of_format = [v for v in found if name in ("", v.format)]
        counts = collections.Counter(v.outcome for v in of_format)
        peak = max(v.peak_bytes for v in of_format) / 1e6
        columns = [str(counts[outcome]) for outcome in dict.fromkeys((*OUTCOMES, *FAULTS))]
        seconds = max(v.seconds for v in of_format)
        table.append([name or "all", str(len(of_format)), *columns, f"{peak:.0f}", f"{seconds:.1f}"])
    return table


HEADER = ["format", "variants", *dict.fromkeys((*OUTCOMES, *FAULTS)), "peak MB", "longest s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=200, help="of each format (200)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="separated by commas; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this variant alone, by its number, and all about it")
    parser.add_argument("--workers", type=int, default=2, help="processes at once (2)")
    parser.add_argument("--json", type=Path, help="file for every variant")
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    arguments = parser.parse_args()
    formats = arguments.formats.split(",")
    if unknown := set(formats) - set(FORMATS):
        parser.error(f"--formats takes {', '.join(FORMATS)}; got {', '.join(sorted(unknown))}")
    numbers = list(range(arguments.variants)) if arguments.only is None else [arguments.only]
    found = run(formats, numbers, arguments.seed, arguments.workers)
    if arguments.only is not None:
        print(*found, sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(v) for v in found], indent=1))
    from benchmarks.results import markdown_table, results, write_results  # imports torch

    table = markdown_table(HEADER, rows(found))
    faults = sum(v.outcome in FAULTS for v in found)
    summary = f"**{len(found)} variants, {faults} of them faults.**\n"
    print(table + "\n" + summary)
    if arguments.write:
        write_results(README, results(table, summary))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
