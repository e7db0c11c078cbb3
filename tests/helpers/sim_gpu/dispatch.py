"""Operations on tensors of simulated GPUs: launched on the stream that is current, refused where devices mix."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.sim_gpu.hazards import HOST
from tests.helpers.sim_gpu.memory import Memory, true
from tests.helpers.sim_gpu.schemas import (
    ON_SHELLS,
    arguments_of,
    by_mask,
    computes,
    empty_for_meta,
    is_composite,
    is_elsewhere,
    is_faked,
    is_meta,
    meta_of,
    new_of,
    one_device,
    tree_leaves,
    tree_map,
    written_by,
    zeros_of,
)

if TYPE_CHECKING:
    from tests.helpers.sim_gpu.gpus import Gpus
    from tests.helpers.sim_gpu.timeline import Stream

aten = torch.ops.aten
EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
HOST_GENERATOR = torch.default_generator
"""That of torch: each process of a simulation has another."""
SYNCHRONISING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Dispatch(TorchDispatchMode):
    """On in every thread of a simulation."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not is_faked() and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            args = tree_map(empty_for_meta, args)  # of a tensor without data, something like it
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if is_faked() or any(is_elsewhere(tensor) for tensor in tensors) or is_meta(kwargs):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and is_composite(func):  # elsewhere torch has taken it apart by itself
            with self:
                return func.decompose(*args, **kwargs)
        with self._gpus.timeline.lock:
            self._gpus.give_out_freed()
            return self._call(func, args, kwargs, tensors)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        gpus = self._gpus
        memories = [(tensor, gpus.memories.of(tensor)) for tensor in tensors]
        asked = kwargs.get("device")
        if func in (aten._to_copy.default, aten.copy_.default):
            return self._copy(func, args, kwargs)
        if func is aten._pin_memory.default:
            return gpus.memories.pin(torch.clone(args[0]), gpus.process)
        if func is aten.is_pinned.default:
            return bool(memories[0][1]) and memories[0][1].device is None
        meant = None if asked is None else gpus.meant(torch.device(asked))
        device = one_device(func, memories, meant, gpus.current_device)
        gpus.note_device(device)
        if device is None:
            return self._on_host(func, args, dict(kwargs), memories)
        if func.is_view or func in ON_SHELLS:
            return func(*args, **kwargs)
        stream = gpus.current_stream(device)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        if any(memory is None and tensor.dim() for tensor, memory in memories):
            gpus.process.hazards.host_waits(f"indices copied to the device by {func}", stream=stream.number)
        if (
            any(tag in func.tags for tag in SYNCHRONISING)
            or func is aten._local_scalar_dense.default
            or by_mask(func, args)
        ):
            made = self._now(func, args, kwargs, stream, memories)
        else:
            made = self._launch(func, args, kwargs, stream, memories)
        new = {
            memory.number
            for leaf in tree_leaves(made)
            if isinstance(leaf, Tensor) and (memory := gpus.memories.of(leaf))
        }
        new -= {memory.number for _, memory in memories if memory is not None}
        if new and func not in EMPTY:
            gpus.process.hazards.access(stream.number, str(func), [], new)
        return made

    # What follows is called with the lock held.

    def _on_host(
        self, func: Any, args: Any, kwargs: dict[str, Any], memories: list[tuple[Tensor, Memory | None]]
    ) -> Any:
        gpus = self._gpus
        pinned = kwargs.pop("pin_memory", None)
        numbers = {memory.number for _, memory in memories if memory}
        if numbers and computes(func):
            changed = {id(tensor) for tensor in written_by(func, args, kwargs)}
            written = {memory.number for tensor, memory in memories if memory and id(tensor) in changed}
            gpus.process.hazards.access(HOST, f"{func}", numbers - written, written)
        random = gpus.process.generator if torch.Tag.nondeterministic_seeded in func.tags else None
        made = _drawn(lambda: func(*args, **kwargs), random)
        return gpus.memories.pin(made, gpus.process) if pinned else made

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A copy within a device, from one to another, or to or from the host."""
        gpus = self._gpus
        if func is aten.copy_.default:
            target, source = args[0], args[1]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source, target = args[0], None
            waits = not kwargs.get("non_blocking", False)
        of_source = gpus.memories.of(source)
        on = gpus.device_of(source)
        if target is None:
            asked = kwargs.get("device")
            to = on if asked is None or not gpus.is_from_python else gpus.index(torch.device(asked))
            options = {
                "dtype": kwargs.get("dtype"),
                "memory_format": kwargs.get("memory_format") or torch.preserve_format,
            }
            form = torch.empty_like(
                source, dtype=options["dtype"], memory_format=options["memory_format"], device="meta"
            )
            if to is None and on is None:
                made = func(source, **options)
                return gpus.memories.pin(made, gpus.process) if kwargs.get("pin_memory") else made
            target = torch.empty_strided(form.size(), form.stride(), dtype=form.dtype)
            if to is not None:
                target = gpus.empty(form, to)
            elif kwargs.get("pin_memory") or not waits:  # torch's own ``to("cpu", non_blocking=True)`` page-locks
                gpus.memories.pin(target, gpus.process)
        of_target = gpus.memories.of(target)
        to = gpus.device_of(target)
        if to is None and on is None:
            self._on_host(aten.copy_.default, (target, source), {}, [(target, of_target), (source, of_source)])
            return target
        gpus.note_device(to)
        device = to if to is not None else on
        assert device is not None
        stream = gpus.current_stream(device)
        reads = [of_source] if of_source else []
        writes = [of_target] if of_target else []
        self._use(stream, "copy", reads, writes)
        inner = true(source, of_source) if of_source else source.detach()
        into = true(target, of_target) if of_target else target.detach()
        if of_source is None:
            inner = inner.clone()  # pageable memory is read before the call returns
        work = gpus.timeline.launch(stream, "copy", lambda: into.copy_(inner))
        crosses = (to is None) != (on is None)
        to_pageable = to is None and of_target is None
        if crosses and (waits or to_pageable):
            gpus.timeline.force([work], f"{gpus.process} waits for a copy")
            gpus.process.hazards.host_waits(
                "copy to the host" if to is None else "copy to the device", stream=stream.number
            )
        return target

    def _now(
        self, func: Any, args: Any, kwargs: dict[str, Any], stream: Stream, memories: list[tuple[Tensor, Memory | None]]
    ) -> Any:
        """An operation whose result the host needs in order to go on."""
        self._access(func, args, kwargs, stream, memories)
        self._gpus.timeline.force(stream.last, f"{self._gpus.process} waits for {func}")
        self._gpus.process.hazards.host_waits(f"{func}", stream=stream.number)
        made = func(*self._inner(args), **self._inner(kwargs))
        return self._returned(made, func, args, kwargs, lambda leaf: self._gpus.adopt(leaf, stream))

    def _launch(
        self, func: Any, args: Any, kwargs: dict[str, Any], stream: Stream, memories: list[tuple[Tensor, Memory | None]]
    ) -> Any:
        gpus = self._gpus
        if func in EMPTY:
            return gpus.empty(func(*tree_map(meta_of, args), **kwargs, device="meta"), stream.device)
        gpus.launched(stream.device)
        self._access(func, args, kwargs, stream, memories)
        inner, named = self._inner(args), self._inner(kwargs)
        random = gpus.process.generators[stream.device] if torch.Tag.nondeterministic_seeded in func.tags else None
        run: Callable[[], Any] = lambda: func(*inner, **named)  # noqa: E731
        if gpus.timeline.idle(stream):
            made = _drawn(run, random)
            gpus.timeline.note()
            return self._returned(made, func, args, kwargs, lambda leaf: gpus.adopt(leaf, stream))
        return self._deferred(func, args, kwargs, stream, run, (inner, named), random)

    def _deferred(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        stream: Stream,
        run: Callable[[], Any],
        inner: Any,
        random: torch.Generator | None,
    ) -> Any:
        """Launch what cannot run yet: what it gives has its form, and NaNs."""
        gpus = self._gpus
        # Numbers are drawn in the order in which kernels are launched: now, by a run on zeros, and by ``later`` again.
        state = None if random is None else random.get_state()
        zeros, named = tree_map(lambda leaf: zeros_of(leaf) if isinstance(leaf, Tensor) else leaf, inner)
        form = _drawn(lambda: func(*zeros, **named), random)
        into: list[Tensor] = []

        def empty(leaf: Tensor) -> Tensor:
            made = gpus.empty(leaf, stream.device)
            into.append(self._inner(made))
            return made

        made = self._returned(form, func, args, kwargs, empty)

        def later() -> None:
            now = None if random is None else random.get_state()
            if random is not None and state is not None:
                random.set_state(state)
            result = _drawn(run, random)
            if random is not None and now is not None:
                random.set_state(now)
            for target, source in zip(into, new_of(func, result), strict=True):
                target.copy_(source)

        gpus.timeline.launch(stream, str(func), later)
        return made

    def _access(
        self, func: Any, args: Any, kwargs: Any, stream: Stream, memories: list[tuple[Tensor, Memory | None]]
    ) -> None:
        if not computes(func):
            return
        written = written_by(func, args, kwargs)
        of_device = [
            (tensor, memory) for tensor, memory in memories if memory is not None and memory.device is not None
        ]
        writes = [memory for tensor, memory in of_device if any(tensor is other for other in written)]
        self._use(stream, str(func), [memory for _, memory in of_device], writes)

    def _use(self, stream: Stream, name: str, reads: list[Memory], writes: list[Memory]) -> None:
        pinned = any(memory.device is None for memory in (*reads, *writes))
        numbers = [{memory.number for memory in memories} for memories in (reads, writes)]
        self._gpus.process.hazards.access(stream.number, name, *numbers, pinned=pinned)

    def _inner(self, values: Any) -> Any:
        def inner(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            memory = self._gpus.memories.of(leaf)
            return true(leaf, memory) if memory and memory.device is not None else leaf.detach()

        return tree_map(inner, values)

    def _returned(self, made: Any, func: Any, args: Any, kwargs: Any, fresh: Callable[[Tensor], Any]) -> Any:
        """What an operation gave: arguments that it changed as they were given, ``fresh`` of the rest."""
        returns = func._schema.returns
        if not returns:
            return None
        results = []
        for returned, value in zip(returns, made if len(returns) > 1 else [made], strict=True):
            if returned.alias_info is not None and returned.alias_info.is_write:
                value = next(
                    given
                    for argument, given in arguments_of(func, args, kwargs)
                    if argument.alias_info is not None
                    and argument.alias_info.before_set & returned.alias_info.before_set
                )
            else:
                value = tree_map(lambda leaf: fresh(leaf) if isinstance(leaf, Tensor) else leaf, value)
            results.append(value)
        return tuple(results) if len(returns) > 1 else results[0]


def _drawn(run: Callable[[], Any], generator: torch.Generator | None) -> Any:
    """Run a kernel that draws from torch's own generator with the state of another."""
    if generator is None:
        return run()
    own = HOST_GENERATOR.get_state()
    HOST_GENERATOR.set_state(generator.get_state())
    try:
        return run()
    finally:
        generator.set_state(HOST_GENERATOR.get_state())
        HOST_GENERATOR.set_state(own)
