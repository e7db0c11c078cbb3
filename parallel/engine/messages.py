"""Values that travel between stages: any structure of tensors and plain numbers, over a ``Communicator``.

The form of a value (structure, shapes, dtypes, order of dims) depends on the shape of the tiles only. So the first
message of each kind begins with a header; later ones are tensors alone, received into buffers that were posted ahead.

Between two ranks, receives are posted in the order of the sends. Message n of a channel has tag n modulo ``TAGS``.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from parallel.comm.communicator import TAGS, Communicator, Work
from parallel.comm.objects import UnknownTypeError, dump, load

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TensorForm:
    """Shape, dtype and memory layout of a tensor: all that allocating another one takes.

    Attributes:
        stride: of dense memory, so that channels_last stays channels_last.
        needs_grad: a gradient will come back for it.
        on_host: in host memory, though the sender computes on another device, as random states are; the receiver puts
            it there, too. Otherwise it is on the device of each of them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] = field(compare=False)
    needs_grad: bool
    on_host: bool = False

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device = CPU) -> TensorForm:
        """Return the form of ``tensor``, which a rank that computes on ``device`` sends."""
        dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
        on_host = tensor.device.type == "cpu" and device.type != "cpu"
        return cls(tuple(tensor.shape), tensor.dtype, dense.stride(), tensor.requires_grad, on_host)

    def empty(self, device: torch.device) -> Tensor:
        """Return memory for such a tensor, on a rank that computes on ``device``."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=CPU if self.on_host else device)

    def dense(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` laid out as this form says, copied only if it is not."""
        if tensor.stride() == self.stride:
            return tensor
        return torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}" + " on the CPU" * self.on_host


@dataclass(frozen=True)
class Form:
    """The structure of a message: its tensors' forms, and everything in it that is not a tensor."""

    spec: TreeSpec
    tensors: tuple[TensorForm, ...]
    constants: tuple[Any, ...]
    """One per leaf; the class TensorForm stands where the leaf is a tensor."""

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value with ``tensors`` in their places."""
        remaining = iter(tensors)
        leaves = [next(remaining) if constant is TensorForm else constant for constant in self.constants]
        return tree_unflatten(leaves, self.spec)

    def gradient(self) -> Form:
        """Return the form of the list of gradients that comes back: one for each tensor that needs it."""
        tensors = tuple([replace(tensor, needs_grad=False) for tensor in self.tensors if tensor.needs_grad])
        _, spec = tree_flatten(list(tensors))
        return Form(spec, tensors, (TensorForm,) * len(tensors))

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "no tensor"


def take_apart(value: Any, device: torch.device = CPU) -> tuple[Form, list[Tensor]]:
    """The form of ``value``, which a rank that computes on ``device`` sends, and its tensors in order."""
    # Taken apart, a size would come back as a plain tuple.
    leaves, spec = tree_flatten(value, is_leaf=lambda part: isinstance(part, torch.Size))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    constants = tuple([TensorForm if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    return Form(spec, tuple([TensorForm.of(tensor, device) for tensor in tensors]), constants), tensors


class Messenger:
    """Sends and receives the values of one rank.

    Args:
        device: of this rank; received tensors are put there, but for those that were in host memory at the sender.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator = communicator
        self.device = device
        self._sent: collections.Counter[int] = collections.Counter()
        self._posted: collections.Counter[int] = collections.Counter()
        self._known: dict[tuple[str, Hashable], Form] = {}
        self._under_way: collections.deque[tuple[Work, Tensor]] = collections.deque()
        self._unresolved: dict[int, PendingMessage] = {}
        self.bytes_sent: collections.Counter[int] = collections.Counter()
        """Bytes of tensors sent to each rank, headers left out."""

    def send(self, peer: int, kind: Hashable, value: Any) -> Form:
        """Begin to send ``value``; its tensors must stay untouched until they have left.

        Args:
            kind: what it is, the same at the receiver; values of one kind have one form.

        Returns:
            The form, which a receiver knows too.

        Raises:
            ValueError: the form differs from that of the first value of this kind, or holds an object that is no plain
                data.
        """
        form, tensors = take_apart(value, self.device)
        tag = _next(self._sent, peer)
        known = self._known.setdefault(("sent", kind), form)
        if known is form:
            header = torch.frombuffer(bytearray(_header(form)), dtype=torch.uint8)
            self._begin(torch.tensor([header.numel()]), peer, tag)
            self._begin(header, peer, tag)
        elif known != form:  # the order of dims may differ: the announced one is sent
            raise ValueError(f"{form} is to be sent where {known} was announced for tiles of this shape")
        self.send_tensors(peer, tensors, known.tensors, tag)
        return known

    def send_tensors(
        self, peer: int, tensors: Sequence[Tensor], forms: Sequence[TensorForm], tag: int | None = None
    ) -> None:
        """Begin to send tensors whose forms the receiver knows.

        Args:
            tag: of a message that was begun; None: of the next one.
        """
        tag = _next(self._sent, peer) if tag is None else tag
        for tensor, form in zip(tensors, forms, strict=True):
            self._begin(form.dense(tensor.detach()), peer, tag)
            self.bytes_sent[peer] += tensor.numel() * tensor.element_size()

    def post(self, peer: int, kind: Hashable = None, form: Form | None = None) -> PendingMessage:
        """Begin to receive the next message from ``peer``: a value of ``kind``, or tensors of a known ``form``."""
        # The tensors of an earlier message must be asked for before those of a later one.
        earlier = self._unresolved.pop(peer, None)
        if earlier is not None:
            earlier.recv_header()
        form = form or self._known.get(("received", kind))
        incoming = PendingMessage(self, peer, _next(self._posted, peer), kind, form)
        if form is None:
            self._unresolved[peer] = incoming
        return incoming

    def remember_form(self, peer: int, kind: Hashable, form: Form) -> None:
        """Remember the form that the header of an awaited message held."""
        self._known["received", kind] = form
        self._unresolved.pop(peer, None)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def _begin(self, tensor: Tensor, peer: int, tag: int) -> None:
        # Sent tensors are let go as soon as they have left, not when the step ends.
        while self._under_way and self._under_way[0][0].done():
            self._under_way.popleft()
        self._under_way.append((self.communicator.isend(tensor, peer, tag), tensor))


class PendingMessage:
    """A message on its way to this rank."""

    def __init__(self, messenger: Messenger, peer: int, tag: int, kind: Hashable, form: Form | None) -> None:
        self._messenger, self._peer, self._tag, self._kind, self._form = messenger, peer, tag, kind, form
        self._works: list[Work] = []
        self._tensors: list[Tensor] = []
        if form is None:
            self._length = torch.zeros(1, dtype=torch.int64)
            self._works.append(self._begin(self._length))
        else:
            self._ask_for_tensors(form)

    def recv_header(self) -> Form:
        """Wait for the header, if one is due, and ask for the tensors."""
        if self._form is None:
            self._works.pop().wait()
            header = torch.empty(int(self._length), dtype=torch.uint8)
            self._begin(header).wait()
            self._form = load(header.numpy().tobytes(), Form, TensorForm)
            self._messenger.remember_form(self._peer, self._kind, self._form)
            self._ask_for_tensors(self._form)
        return self._form

    def wait(self) -> tuple[Form, list[Tensor]]:
        """Form and tensors, once they are here."""
        form = self.recv_header()
        for work in self._works:
            work.wait()
        return form, self._tensors

    def _ask_for_tensors(self, form: Form) -> None:
        self._tensors = [tensor.empty(self._messenger.device) for tensor in form.tensors]
        self._works = [self._begin(tensor) for tensor in self._tensors]

    def _begin(self, tensor: Tensor) -> Work:
        return self._messenger.communicator.irecv(tensor, self._peer, self._tag)


def _header(form: Form) -> bytes:
    try:
        return dump(form, Form, TensorForm)
    except UnknownTypeError as fault:
        raise ValueError(
            f"between stages go tensors, plain values, tuples, lists, dicts and named tuples of them; {fault}: return "
            "such a structure there, or cut the model elsewhere (--cuts)"
        ) from fault


def _next(counter: collections.Counter[int], peer: int) -> int:
    """The tag of the next message to or from ``peer``."""
    counter[peer] += 1
    return (counter[peer] - 1) % TAGS
