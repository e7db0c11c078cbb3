"""Simulated GPUs: ``with simulated(2) as gpus:`` makes torch.cuda say that there are two, and computes on the CPU.

Each *process* of a simulation is a thread with what a process would have of its own: generators, streams' order, host
waits, findings. ``run`` starts one for each rank; threads that those start belong to them. What was found is in
``gpus.found`` at the end.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.sim_gpu.dispatch import HOST_GENERATOR, Dispatch
from tests.helpers.sim_gpu.hazards import Hazards
from tests.helpers.sim_gpu.memory import Memories, poison
from tests.helpers.sim_gpu.timeline import Stream, Timeline

POOL = 32
"""Streams that torch hands out in turn on one device."""


class Process:
    """What one process of a simulation has.

    Attributes:
        rank: its number.
        generators: of each GPU; ``generator`` is that of the CPU.
        launches: kernels so far.
        error: of the last call of the runtime that failed, until a kernel raises it.
        device: the GPU that it chose first.
        contexts: GPUs that it has opened.
    """

    def __init__(self, rank: int, gpus: int) -> None:
        self.rank = rank
        self.generators = [torch.Generator() for _ in range(gpus)]
        self.generator = HOST_GENERATOR.clone_state()
        self.random = random.Random(rank)
        self.hazards = Hazards()
        self.launches = self.error = 0
        self.device: int | None = None
        self.contexts: set[int] = set()

    def __str__(self) -> str:
        return f"rank {self.rank}"


class Gpus:
    """All GPUs of a simulation, and the thread-local view of them.

    Args:
        count: GPUs.
        late: as for ``Timeline``.
        limit: bytes of each.
        sync_every: as for ``simulated``.

    Attributes:
        refuses_locking: the runtime page-locks no memory of the host.
    """

    def __init__(self, count: int, late: int | None, limit: int, sync_every: int | None = None) -> None:
        self.count = count
        self.refuses_locking = False
        self.sync_every = sync_every
        self.timeline = Timeline(late)
        self.memories = Memories(limit)
        self.processes: list[Process] = [Process(0, count)]
        self.defaults = [self.timeline.stream(device) for device in range(count)]
        self._pools: dict[tuple[Any, int], tuple[list[Stream], int]] = {}
        self._local = threading.local()

    @property
    def found(self) -> list[str]:
        """What all processes found, and contexts that they opened on GPUs other than the one they chose first."""
        self.give_out_freed()
        found = [f"{process}: {line}" for process in self.processes for line in process.hazards.found]
        chosen = [process for process in self.processes if process.device is not None]
        return found + [f"{p}, on GPU {p.device}, opens {p.contexts}" for p in chosen if p.contexts - {p.device}]

    @property
    def process(self) -> Process:
        """That of this thread."""
        return getattr(self._local, "process", self.processes[0])

    @property
    def current_device(self) -> int:
        """Of this thread; 0 in a thread that has not said."""
        return getattr(self._local, "device", 0)

    @current_device.setter
    def current_device(self, device: int) -> None:
        if not 0 <= device < self.count:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        self._local.device = device
        if self.process.device is None:
            self.process.device = device

    def open_context(self) -> None:
        """A call of the runtime opens the current device, if that has not been."""
        self.process.contexts.add(self.current_device)

    def current_stream(self, device: int) -> Stream:
        """Of this thread and ``device``."""
        self.process.contexts.add(device)
        return self._streams().get(device, self.defaults[device])

    def set_stream(self, stream: Stream) -> None:
        self._streams()[stream.device] = stream

    def pool_stream(self, device: int) -> Stream:
        """Return the next of 32 streams, as torch does."""
        with self.timeline.lock:
            streams, turn = self._pools.setdefault((self.process, device), ([], 0))
            if len(streams) < POOL:
                streams.append(self.timeline.stream(device))
            self._pools[self.process, device] = streams, turn + 1
            return streams[turn % POOL]

    @contextlib.contextmanager
    def from_python(self) -> Iterator[None]:
        """Within it, a factory means the device that it names."""
        self._local.from_python = True
        try:
            yield
        finally:
            self._local.from_python = False

    @property
    def is_from_python(self) -> bool:
        """Python has called the factory or copy that is under way."""
        return getattr(self._local, "from_python", False)

    @contextlib.contextmanager
    def going_back(self, device: torch.device | None) -> Iterator[None]:
        """Within it, a backward pass whose gradients came in on ``device`` runs in this thread."""
        outer = getattr(self._local, "back", None)
        self._local.back = None if device is None else self.index(device)
        try:
            yield
        finally:
            self._local.back = outer

    def meant(self, asked: torch.device) -> torch.device:
        """Return the device that a factory means. In C++, which knows of no simulation, all tensors are on the CPU:
        then it is the device of the backward pass under way, as formulas of autograd call factories for what they
        compute, whatever Python did on the host before; outside of one it is that of the operation before."""
        before = getattr(self._local, "back", None)
        before = getattr(self._local, "before", None) if before is None else before
        if asked.type != "cpu" or self.is_from_python or before is None:
            return asked
        return torch.device("cuda", before)

    def note_device(self, device: int | None) -> None:
        """An operation of this thread runs on ``device``, None on the host."""
        self._local.before = device

    def launched(self, device: int) -> None:
        """A kernel is going to be launched; see ``sync_every``."""
        process = self.process
        process.launches += 1
        if process.error:
            process.error = 0
            raise torch.AcceleratorError("CUDA error")
        if self.sync_every and process.random.randrange(self.sync_every) == 0:
            works = [work for line in self.timeline.streams_of(device) for work in line.last]
            self.timeline.force(works, f"{process} waits for its device before kernel {process.launches}")

    def index(self, device: torch.device) -> int | None:
        """Return the number of a device, None of the CPU."""
        if device.type != "cuda":
            return None
        return self.current_device if device.index is None else device.index

    def device_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's device, None on the host."""
        memory = self.memories.of(tensor)
        return memory.device if memory else None

    def empty(self, form: Tensor, device: int) -> Tensor:
        """Return new memory of a device, in the form of a tensor."""
        return self._over(form, device, None)

    def adopt(self, made: Tensor, stream: Stream) -> Tensor:
        """Return what a kernel made as a tensor of the device."""
        return self._over(made, stream.device, made.untyped_storage())

    def give_out_freed(self) -> None:
        """Give out again what was freed: whoever still uses it finds NaNs."""
        with self.timeline.lock:
            while self.memories.freed:
                memory = self.memories.freed.popleft()
                process, streams = memory.owner, sorted(memory.recorded, key=lambda stream: stream.number)
                process.hazards.free(memory.number, memory.stream.number, [stream.number for stream in streams])
                before = [work for stream in (memory.stream, *streams) for work in stream.last]
                self.timeline.soon("reuse", lambda truth=memory.truth: poison(truth), before)  # type: ignore[misc]

    def run(self, world: int, function: Callable[[int], Any]) -> list[Any]:
        """Call ``function`` with each rank in a process of its own; return what they give. The first fault is raised;
        ranks that wait for one that has failed are told of a hang."""
        results: list[Any] = [None] * world
        faults: list[BaseException] = []
        first = len(self.processes)
        self.processes += [Process(rank, self.count) for rank in range(world)]

        def rank_of(rank: int) -> None:
            self._local.process = self.processes[first + rank]
            try:
                results[rank] = function(rank)
            except BaseException as fault:
                faults.append(fault)
            finally:
                self.timeline.leave()

        threads = [
            threading.Thread(target=rank_of, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)
        ]
        self.timeline.ranks.update(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]
        return results

    def inherit(self) -> Callable[[], None]:
        """Return what makes another thread one of this process."""
        process = self.process

        def take() -> None:
            self._local.process = getattr(self._local, "process", process)

        return take

    def _streams(self) -> dict[int, Stream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        return self._local.streams  # type: ignore[no-any-return]

    def _over(self, form: Tensor, device: int, truth: torch.UntypedStorage | None) -> Tensor:
        shell = self.memories.shell_of(truth) if truth is not None else None
        if shell is None:
            extent = sum((size - 1) * stride for size, stride in zip(form.size(), form.stride(), strict=True))
            size = (form.storage_offset() + 1 + extent) * form.element_size() if form.numel() else 0
            size = size if truth is None else truth.nbytes()
            stream = self.current_stream(device)
            shell = self.memories.allocate(size, device, self.process, stream, truth)
        place = form.storage_offset(), form.size(), form.stride()
        return torch.empty(0, dtype=form.dtype).set_(shell, *place)


@contextlib.contextmanager
def simulated(
    count: int = 1, late: int | None = None, limit: int = 1 << 40, sync_every: int | None = None
) -> Iterator[Gpus]:
    """Let torch have ``count`` GPUs.

    Args:
        late: None runs kernels and copies at once; 0 as late as the order allows; another number is a seed.
        limit: bytes of each GPU.
        sync_every: the host waits for its device before one kernel of so many, drawn at random, as it does where memory
            has to be freed before more can be had. The waits order nothing: races are found all the same.
    """
    from tests.helpers.sim_gpu.cuda import patches

    gpus = Gpus(count, late, limit, sync_every)
    gc.collect(1)
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patches(gpus, patch)
            with Dispatch(gpus):
                yield gpus
                # Free page-locked memory in cycles on these GPUs, not on those of a later test. All of it is young.
                gc.collect(0)
    finally:
        gc.enable()
