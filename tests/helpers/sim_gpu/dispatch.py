"""Operations on tensors of simulated GPUs: launched on the stream that is current, refused where devices mix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.sim_gpu.hazards import HOST
from tests.helpers.sim_gpu.memory import Memory, true

if TYPE_CHECKING:
    from tests.helpers.sim_gpu.gpus import Gpus
    from tests.helpers.sim_gpu.timeline import Stream

aten = torch.ops.aten
ON_SHELLS = {
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.lift_fresh.default,
    aten._conj.default,
}
"""Operations that only say where a tensor lies, and whose schema does not tell."""
INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations that take indices from the host, too, and copy them."""
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
        if not _is_faked() and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            args = tree_map(_empty_for_meta, args)  # of a tensor without data, something like it
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if _is_faked() or any(_is_elsewhere(tensor) for tensor in tensors) or _is_meta(kwargs):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and _is_composite(func):  # elsewhere torch has taken it apart by itself
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
        device = _one_device(func, memories, meant, gpus.current_device)
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
            or _by_mask(func, args)
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
        if numbers and _computes(func):
            changed = {id(tensor) for tensor in _written(func, args, kwargs)}
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
            return gpus.empty(func(*tree_map(_meta, args), **kwargs, device="meta"), stream.device)
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
        zeros, named = tree_map(lambda leaf: _zeros(leaf) if isinstance(leaf, Tensor) else leaf, inner)
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
            for target, source in zip(into, _fresh(func, result), strict=True):
                target.copy_(source)

        gpus.timeline.launch(stream, str(func), later)
        return made

    def _access(
        self, func: Any, args: Any, kwargs: Any, stream: Stream, memories: list[tuple[Tensor, Memory | None]]
    ) -> None:
        if not _computes(func):
            return
        written = _written(func, args, kwargs)
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
                    for argument, given in _named(func, args, kwargs)
                    if argument.alias_info is not None
                    and argument.alias_info.before_set & returned.alias_info.before_set
                )
            else:
                value = tree_map(lambda leaf: fresh(leaf) if isinstance(leaf, Tensor) else leaf, value)
            results.append(value)
        return tuple(results) if len(returns) > 1 else results[0]


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """That of torch, for what operations take and give: several times faster."""
    if isinstance(value, (list, tuple)):
        return type(value)([tree_map(function, each) for each in value])
    if isinstance(value, dict):
        return {name: tree_map(function, each) for name, each in value.items()}
    return function(value)


def tree_leaves(value: Any) -> list[Any]:
    """Everything that is no list, tuple or dict."""
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in tree_leaves(each)]
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in tree_leaves(each)]
    return [value]


def _computes(func: Any) -> bool:
    """An operation uses the values of what it is given."""
    return not (func.is_view or func in ON_SHELLS or FACTORY_FUNCTION_REGEX.match(func._schema.name))


def _fresh(func: Any, made: Any) -> list[Tensor]:
    """The new tensors among what an operation gave."""
    returns = func._schema.returns
    pairs = zip(returns, made if len(returns) > 1 else [made], strict=True) if returns else ()
    new = [value for returned, value in pairs if returned.alias_info is None or not returned.alias_info.is_write]
    return [leaf for leaf in tree_leaves(new) if isinstance(leaf, Tensor)]


def _one_device(
    func: Any, memories: list[tuple[Tensor, Memory | None]], asked: torch.device | None, current: int
) -> int | None:
    """The device that an operation runs on, None for the host.

    Raises:
        RuntimeError: its tensors are on several.
    """
    if asked is not None:
        if asked.type == "cuda":
            return current if asked.index is None else asked.index
        if asked.type == "cpu":
            return None
    devices = {memory.device for _, memory in memories if memory is not None and memory.device is not None}
    host = [tensor for tensor, memory in memories if memory is None or memory.device is None]
    if not devices:
        return None
    strays = [tensor for tensor in host if tensor.dim()]
    if func in INDEXES and memories[0][1] is not None:
        strays = [tensor for tensor in strays if tensor.dtype.is_floating_point]
    if len(devices) > 1 or strays:
        names = sorted(f"cuda:{device}" for device in devices) + (["cpu"] if strays else [])
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {', '.join(names)} ({func})")
    return devices.pop()


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation changes, by its schema."""
    found: list[Tensor] = []
    for name, value in _named(func, args, kwargs):
        if name.alias_info is not None and name.alias_info.is_write:
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if func in (aten.native_batch_norm.default, aten.cudnn_batch_norm.default) and args[5]:
        found += [value for value in args[3:5] if value is not None]  # its schema keeps silent on them
    return found


def _named(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    arguments = func._schema.arguments
    yield from zip(arguments, args, strict=False)
    for argument in arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


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


def _by_mask(func: Any, args: Any) -> bool:
    indices = tree_leaves(args[1]) if func in INDEXES else []
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def _zeros(leaf: Tensor) -> Tensor:
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype).zero_()


def _empty_for_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)


def _is_elsewhere(tensor: Tensor) -> bool:
    return torch._C.TensorBase.device.__get__(tensor).type != "cpu" or tensor.layout is not torch.strided  # type: ignore[attr-defined]


@functools.cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _is_faked() -> bool:
    """Torch's fake tensors are on, whose mode comes below all others."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _is_meta(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
