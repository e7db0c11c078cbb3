"""torch.cuda as it is with simulated GPUs."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import threading
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.autograd import _engine_run_backward  # type: ignore[attr-defined]

from tests.helpers.sim_gpu.dispatch import Dispatch
from tests.helpers.sim_gpu.hazards import NO_TRACES
from tests.helpers.sim_gpu.tensors import AS_TENSOR, FACTORIES, NEW, made_on_host, saying_its_device, tensor_methods
from tests.helpers.sim_gpu.timeline import Work

if TYPE_CHECKING:
    from tests.helpers.sim_gpu.gpus import Gpus


def patches(gpus: Gpus, patch: pytest.MonkeyPatch) -> None:
    """Put all in place until ``patch`` ends."""
    Stream, Event = stream_class(gpus), event_class(gpus)
    functions = {**_devices(gpus), **_streams(gpus, Stream), **_memory(gpus), **_random(gpus)}
    for name, value in {**functions, "Stream": Stream, "Event": Event}.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr("torch.cuda._sanitizer.traceback", NO_TRACES)
    patch.setattr(torch.accelerator, "is_available", lambda: False)  # optimizers ask it whether a graph is captured
    for module in (torch, torch.random):
        patch.setattr(module, "default_generator", HostGenerator(gpus))
    for name, value in tensor_methods(gpus).items():
        patch.setattr(Tensor, name, value)
    for name, plain in AS_TENSOR.items():
        patch.setattr(torch, name, functools.partial(made_on_host, plain))
    for name, plain in FACTORIES.items():
        patch.setattr(torch, name, saying_its_device(gpus, plain))
    for name, plain in NEW.items():
        patch.setattr(Tensor, name, saying_its_device(gpus, plain))
    patch.setattr("torch.autograd._engine_run_backward", functools.partial(_back, gpus, _engine_run_backward))
    for name in ("parallel.offload.copies.copy_streams", "pipelines.stream.device_batch.feed_stream"):
        patch.setattr(name, _once_a_process(gpus, pkgutil.resolve_name(name)))
    run = threading.Thread.run
    start = threading.Thread.start

    def start_within(thread: threading.Thread) -> None:
        thread._take_process = gpus.inherit()  # type: ignore[attr-defined]
        start(thread)

    def run_within(thread: threading.Thread) -> None:
        thread._take_process()  # type: ignore[attr-defined]
        with Dispatch(gpus):
            run(thread)

    patch.setattr(threading.Thread, "start", start_within)
    patch.setattr(threading.Thread, "run", run_within)


def stream_class(gpus: Gpus) -> type:
    """``torch.cuda.Stream``."""

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, of: Any = None) -> None:
            gpus.open_context()
            index = gpus.current_device if device is None else _index(gpus, device)
            self.line = of or gpus.pool_stream(index)
            self.device = torch.device("cuda", self.line.device)
            self.device_index, self.stream_id, self.cuda_stream = self.line.device, self.line.number, self.line.number

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

        def record_event(self, event: Any = None) -> Any:
            event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self)
            return event

        def query(self) -> bool:
            return not self.line.pending

        def synchronize(self) -> None:
            gpus.timeline.force(self.line.last, f"{gpus.process} waits for a stream")
            gpus.process.hazards.host_waits("stream.synchronize", stream=self.line.number)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.line is self.line

        def __hash__(self) -> int:
            return hash(self.line)

    return Stream


def event_class(gpus: Gpus) -> type:
    """``torch.cuda.Event``; times are those at which the host recorded it."""

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
            gpus.open_context()
            self._timed, self._work, self._number, self._ran = enable_timing, None, None, 0.0

        def record(self, stream: Any = None) -> None:
            stream = stream or torch.cuda.current_stream()
            self._number = gpus.process.hazards.record(stream.line.number)
            self._work: Work | None = gpus.timeline.launch(stream.line, "event")

        def wait(self, stream: Any = None) -> None:
            stream = stream or torch.cuda.current_stream()
            if self._work is not None:
                gpus.process.hazards.wait(stream.line.number, self._number)
                gpus.timeline.launch(stream.line, "wait", after=[self._work])

        def query(self) -> bool:
            return self._work is None or self._work.done

        def synchronize(self) -> None:
            if self._work is not None:
                gpus.timeline.force([self._work], f"{gpus.process} waits for an event")
                gpus.process.hazards.host_waits("event.synchronize", event=self._number)

        def elapsed_time(self, end: Any) -> float:
            """In ms: one for each kernel between them."""
            if not (self._timed and end._timed and self.query() and end.query()):
                raise RuntimeError("events without timing, or not done")
            return float(end._number - self._number)

    return Event


def _devices(gpus: Gpus) -> dict[str, Any]:
    @contextlib.contextmanager
    def device(index: Any) -> Iterator[None]:
        before = gpus.current_device
        gpus.current_device = _index(gpus, index)
        try:
            yield
        finally:
            gpus.current_device = before

    def set_device(index: Any) -> None:
        gpus.current_device = _index(gpus, index)
        gpus.open_context()

    def properties(index: Any = None) -> Any:
        number = gpus.current_device if index is None else _index(gpus, index)
        return types.SimpleNamespace(
            name=f"Simulated GPU {number}",
            total_memory=gpus.memories.limit,
            major=9,
            minor=0,
            multi_processor_count=1,
            uuid=f"simulated-{number}",
        )

    return {
        "is_available": lambda: gpus.count > 0,
        "device_count": lambda: gpus.count,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "current_device": lambda: gpus.current_device,
        "set_device": set_device,
        "device": device,
        "get_device_properties": properties,
        "get_device_name": lambda index=None: properties(index).name,
        "get_device_capability": lambda index=None: (9, 0),
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda including_emulation=True: True,
    }  # fmt: skip


def _streams(gpus: Gpus, Stream: type) -> dict[str, Any]:
    def current_stream(device: Any = None) -> Any:
        index = gpus.current_device if device is None else _index(gpus, device)
        return Stream(of=gpus.current_stream(index))

    @contextlib.contextmanager
    def stream(new: Any) -> Iterator[None]:
        if new is None:
            yield
            return
        before, of_its_device = gpus.current_device, gpus.current_stream(new.line.device)
        gpus.current_device = new.line.device
        gpus.set_stream(new.line)
        try:
            yield
        finally:
            gpus.set_stream(of_its_device)
            gpus.current_device = before

    def synchronize(device: Any = None) -> None:
        index = gpus.current_device if device is None else _index(gpus, device)
        works = [work for line in gpus.timeline.streams_of(index) for work in line.last]
        gpus.timeline.force(works, f"{gpus.process} waits for its device")
        gpus.process.hazards.host_waits("torch.cuda.synchronize")

    def default_stream(device: Any = None) -> Any:
        return Stream(of=gpus.defaults[gpus.current_device if device is None else _index(gpus, device)])

    return {
        "current_stream": current_stream,
        "default_stream": default_stream,
        "stream": stream,
        "set_stream": lambda new: gpus.set_stream(new.line),
        "synchronize": synchronize,
    }


def _memory(gpus: Gpus) -> dict[str, Any]:
    def of(counter: dict[int, int]) -> Any:
        return lambda device=None: counter[gpus.current_device if device is None else _index(gpus, device)]

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        gpus.open_context()
        return gpus.memories.limit - of(gpus.memories.used)(device), gpus.memories.limit

    def reset_peak(device: Any = None) -> None:
        index = gpus.current_device if device is None else _index(gpus, device)
        gpus.memories.peak[index] = gpus.memories.used[index]

    def set_fraction(fraction: float, device: Any = None) -> None:
        gpus.memories.limit = int(gpus.memories.limit * fraction)

    def register(address: int, bytes_: int, flags: int = 0) -> int:
        gpus.open_context()
        if gpus.refuses_locking:
            gpus.process.error = 2
        else:
            gpus.memories.register(address, bytes_, gpus.process)
        return gpus.process.error

    def unregister(address: int) -> int:
        gpus.process.error = 0 if gpus.memories.unregister(address) else 713
        return gpus.process.error

    runtime = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    return {
        "memory_allocated": of(gpus.memories.used),
        "memory_reserved": of(gpus.memories.used),
        "max_memory_allocated": of(gpus.memories.peak),
        "reset_peak_memory_stats": reset_peak,
        "set_per_process_memory_fraction": set_fraction,
        "mem_get_info": mem_get_info,
        "empty_cache": lambda: None,
        "cudart": lambda: runtime,
    }


class HostGenerator:
    """``torch.default_generator``: that of the process."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpus.process.generator, name)


def _random(gpus: Gpus) -> dict[str, Any]:
    class Generators:
        def __getitem__(self, index: int) -> torch.Generator:
            return gpus.process.generators[index]

        def __len__(self) -> int:
            return gpus.count

    def generator(device: Any) -> torch.Generator:
        index = _index(gpus, "cuda" if device is None else device)
        return gpus.process.generators[index]

    def seed_all(seed: int) -> None:
        for each in gpus.process.generators:
            each.manual_seed(seed)

    def set_all(states: Any) -> None:
        for index, state in enumerate(states):
            gpus.process.generators[index].set_state(state)  # IndexError with fewer GPUs, as torch's

    return {
        "default_generators": Generators(),
        "manual_seed": lambda seed: generator(None).manual_seed(seed),
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "get_rng_state_all": lambda: [each.get_state() for each in gpus.process.generators],
        "set_rng_state_all": set_all,
    }


def _once_a_process(gpus: Gpus, cached: Any) -> Any:
    """A function that gives what a process has once, and keeps it."""
    kept = functools.cache(lambda process, *args: cached.__wrapped__(*args))
    return lambda *args: kept(gpus.process, *args)


def _back(gpus: Gpus, plain: Any, outputs: Any, gradients: Any, *args: Any, **options: Any) -> Any:
    """A backward pass."""
    with gpus.going_back(next((each.device for each in gradients if each is not None), None)):
        return plain(outputs, gradients, *args, **options)


def _index(gpus: Gpus, device: Any) -> int:
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return gpus.current_device if device.index is None else device.index
