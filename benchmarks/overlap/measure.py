"""Measure windows of training steps, interleaved, in one process for each rank.

Takes a case and its windows; the first rank appends a JSON row for each window and round to a file, as it is measured.
Ranks share one engine for each strategy and bucket size. Reading starts anew in every window.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from app.checkpoint import two_phase
from app.checkpoint.file import save_checkpoint
from app.checkpoint.two_phase import TwoPhaseCheckpoints
from app.launch.place import RankPlacement, take_cores
from app.launch.watchdog import Watchdog
from app.settings.optimization import ModelSettings
from app.settings.run import DataSettings, RunConfig, SplitSettings, StreamSettings
from app.settings.strategy import StrategySettings
from app.training.batches import microbatches_of
from app.training.dataset import Dataset, prepare
from app.training.run_folder import RunFolder
from app.training.session import Session
from benchmarks.overlap.delayed import Delayed
from benchmarks.overlap.settings import MACHINES, WARM_UP, Case, Setting, Window
from benchmarks.results import measured_on
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import LocalCommunicator
from pipelines.catalog.handles import SlidePool
from pipelines.catalog.table import FailedSlides
from pipelines.slides.slide import Slide
from pipelines.stream.device import DevicePrefetcher
from pipelines.stream.stream import TileStream
from pipelines.tiles.tiling import IndexSettings

CPU, LR, MICROBATCHES, LINK_S = torch.device("cpu"), 1e-5, 4, 2e-3


def measure(communicator: Communicator, argument: dict[str, Any]) -> int:
    """Measure every window once in each round, in an order of each round; return the number of rows written."""
    case = Case(*argument["case"])
    windows = [Window(machine, parallel, Setting(*levels)) for machine, parallel, levels in argument["windows"]]
    begun_s, written = time.monotonic(), 0
    with Ranks(communicator, case, Path(argument["folder"])) as ranks, Path(argument["rows"]).open("a") as file:
        for number in range(*argument["rounds"]):
            for window in random.Random(number).sample(windows, len(windows)):
                row = ranks.measure(window)
                if communicator.rank == 0:
                    row = {"case": case.name, "round": number, "machine": window.machine, **row}
                    row |= {"parallel": window.parallel, "setting": window.setting, "measured_on": measured_on()}
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    written += 1
            if communicator.rank == 0:
                print(f"{case.name}: round {number + 1} done after {(time.monotonic() - begun_s) / 60:.1f} min")
    return written


SHARE_BYTES_S, SHARE_WAIT_S = 100e6, 2e-3
"""Of a slow network: bytes a second, and seconds for each request."""


@contextlib.contextmanager
def reading_from_share() -> Iterator[None]:
    """Wait for what the calling thread reads within, as it would on a slow network."""

    def counters() -> tuple[int, int]:
        values = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
        return int(values["rchar"]), int(values["syscr"])

    bytes_before, calls_before = counters()
    yield
    bytes_after, calls_after = counters()
    time.sleep((bytes_after - bytes_before) / SHARE_BYTES_S + (calls_after - calls_before - 1) * SHARE_WAIT_S)


class SlowPool:
    """Slide pool whose files are read as over a slow network."""

    def __init__(self, pool: SlidePool) -> None:
        self._pool = pool
        self.discard = pool.discard

    @contextlib.contextmanager
    def lease(self, slide_id: str) -> Iterator[Slide]:
        with reading_from_share(), self._pool.lease(slide_id) as slide:
            yield slide


class Ranks(contextlib.ExitStack):
    """Everything that the windows of a case share on one rank."""

    def __init__(self, communicator: Communicator, case: Case, folder: Path) -> None:
        super().__init__()
        take_cores(CPU)
        self._communicator, self._case, self._folder = communicator, case, folder
        self._links = Delayed(communicator, 0.0)
        self._sessions: dict[tuple[str, int], Session] = {}
        self._watchdog = Watchdog(communicator.rank, stuck_s=1800.0)
        self._two_phase = TwoPhaseCheckpoints(CPU)
        self._persists_s: list[float] = []
        self._dataset = self._prepared()

    def _config(self, parallel: Any = "ddp") -> RunConfig:
        return RunConfig(
            DataSettings(self._folder / "pictures"),
            index=IndexSettings(tile=self._case.px, pictures="resize"),
            split=SplitSettings(validation=0.0),
            net=ModelSettings(model=self._case.model),
            stream=StreamSettings(read_threads=1),
            strategy=StrategySettings(parallel, batch=self._case.batch, microbatches=MICROBATCHES, device="cpu"),
        )

    def _prepared(self) -> Dataset:
        """The pictures, indexed by the first rank."""
        for rank in range(self._communicator.world):
            if rank == self._communicator.rank:
                dataset = prepare(self._config(), RunFolder(self._folder), lambda _: None)
            self._communicator.barrier()
        return dataset

    def _session(self, parallel: str, buckets: int) -> Session:
        """The model under a strategy, made when it is first asked for; other ranks have none of ``single``."""
        if (parallel, buckets) not in self._sessions:
            config, alone = self._config(parallel), parallel == "single"
            strategy = dataclasses.replace(config.strategy.to_strategy("cpu"), gradient_bytes=buckets << 20)
            session = Session(
                config,
                dataclasses.replace(strategy, ranks=1) if alone else strategy,
                self._dataset,
                RankPlacement(LocalCommunicator() if alone else self._links, CPU),
                FailedSlides(self._folder / "failed_slides.csv"),
                self._watchdog,
            )
            session.engine.before_update(self._two_phase.await_copy)
            self.callback(session.engine.close)
            self.callback(session.pool.close)
            self._sessions[parallel, buckets] = session
        return self._sessions[parallel, buckets]

    def measure(self, window: Window) -> dict[str, Any]:
        """Return the figures of a window, on the first rank; every rank calls it."""
        self._links.delay_s = LINK_S if window.machine == MACHINES[2] else 0.0
        self._communicator.barrier()
        row = {}
        if window.parallel != "single" or self._communicator.rank == 0:
            row = self._steps(window, self._session(window.parallel, window.setting.buckets))
        self._communicator.barrier()
        return row

    def _steps(self, window: Window, session: Session) -> dict[str, Any]:
        setting, slow = window.setting, window.machine == MACHINES[3]
        stream = _stream(session, setting.read_ahead, slow)
        wait_s = between_s = begun_s = cpu_s = 0.0
        self._persists_s, sums = [], 0
        with (
            iter(stream) as tiles,
            DevicePrefetcher(tiles, tiles.ready, session.pixels, prefetch=setting.prefetch) as feed,
            self._slow_writes() if slow else contextlib.nullcontext(),
        ):
            for step in range(-WARM_UP, window.steps):
                if step == 0:
                    session.placement.communicator.barrier()
                    cpu_s, sums, begun_s = _cpu_s(), self._links.sums, time.monotonic()
                moment_s = time.monotonic()
                if step >= 0 and step % setting.every == 0:
                    self._save(session, setting.write, slow)
                saved_s = time.monotonic()
                batch = next(feed)
                if step >= 0:
                    between_s += saved_s - moment_s
                    wait_s += time.monotonic() - saved_s
                session.engine.step(microbatches_of(feed, batch, session.reading.sizes), step, LR)
                batch.release()
            self._finish()
            session.placement.communicator.barrier()
            seconds = time.monotonic() - begun_s
            used_s = torch.tensor([_cpu_s() - cpu_s], dtype=torch.float64)
            summed = self._links.sums - sums
        session.placement.communicator.all_reduce(used_s)
        step_s = seconds / window.steps
        return {
            "images_s": self._case.batch / step_s,
            "lost_s": setting.every * step_s + statistics.median(self._persists_s or [0.0]),
            "wait": wait_s / seconds,
            "between": between_s / seconds,
            "cpu_s": float(used_s) / window.steps,
            "sums": summed / window.steps,
        }

    @property
    def _path(self) -> Path:
        return self._folder / "last.pt"

    def _save(self, session: Session, write: str, slow: bool) -> None:
        """Write a checkpoint, or begin to."""
        begun_s, state = time.monotonic(), session.engine.state_dict()
        if not state:
            return
        if write == "two-phase":
            self._finish()
            self._two_phase.begin(state, session.engine.parameter_names, self._path, None)
            return
        save_checkpoint(self._path, state)
        if slow:
            time.sleep(self._path.stat().st_size / SHARE_BYTES_S)
        self._persists_s.append(time.monotonic() - begun_s)

    def _finish(self) -> None:
        written = self._two_phase.finish()
        if written is not None:
            self._persists_s.append(written[1])

    def _slow_writes(self) -> contextlib.AbstractContextManager[object]:
        """Let the thread that writes checkpoints take as long as over a slow network."""

        def slowly(path: Path, state: dict[str, Any]) -> None:
            save_checkpoint(path, state)
            time.sleep(path.stat().st_size / SHARE_BYTES_S)

        return mock.patch.object(two_phase, "save_checkpoint", slowly)


def _stream(session: Session, read_ahead: int, slow: bool) -> TileStream:
    """Return the rank's tiles, so many batches of them in memory."""
    stream, side = session.stream, session.dataset.tiles.settings.side
    batch_bytes = len(stream.image_rows) * 3 * side**2 + len(stream.target_rows) * 8
    stream = stream.prefetch(read_ahead * batch_bytes, threads=1)
    if not slow:
        return stream
    assert stream.pool is not None
    pool: Any = SlowPool(stream.pool)
    return dataclasses.replace(stream, pool=pool)


def _cpu_s() -> float:
    """Return the processor seconds that this process and those it started have taken."""
    own = psutil.Process()
    return sum(times.user + times.system for times in (each.cpu_times() for each in (own, *own.children())))
