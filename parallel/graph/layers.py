"""The layers of a model, what they compute and what passes between them: plain data that splitting works on.

A layer's name is also the name of the value it gives. Layers stand in the order in which the model runs them, which is
a topological order. Skip connections are ordinary edges.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Convolution:
    """The shape of a convolution, plain or transposed; lengths in px.

    Attributes:
        batch: tiles.
        kernel: (height, width); ``stride`` and ``dilation`` likewise.
        size_in: (height, width) of what goes in; ``size_out`` of what comes out.
    """

    batch: int
    channels_in: int
    channels_out: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    size_in: tuple[int, ...]
    size_out: tuple[int, ...]
    transposed: bool


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a forward pass. Views and allocations, which touch no memory, are none.

    Attributes:
        name: torch's own: "convolution", "native_batch_norm", "max_pool2d_with_indices", "addmm".
        flops: multiply-adds times two.
        read_bytes: of the tensors it is given.
        written_bytes: of the tensors it gives, or changes.
        differentiable: its backward pass follows.
        passes_on: gradients flow on to earlier layers, not only to parameters.
        convolution: its shape, of a convolution.
    """

    name: str
    flops: int
    read_bytes: int
    written_bytes: int
    differentiable: bool = True
    passes_on: bool = True
    convolution: Convolution | None = None


INPUT = "input"
OUTPUT = "output"
"""Kinds of the layers that stand for the model's arguments and for what it returns."""

RANDOM_STATE = "#random"
"""Pseudo-value: the state of the random generator after a stage's forward pass, handed to the next stage that draws, so
that dropout is what the plain model draws."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One operation or one module that is not looked into.

    Attributes:
        name: unique; the name of its value.
        kind: ``input``, ``output``, the class of a module (``Conv2d``) or the name of a function (``add``).
        inputs: names of the values it uses, each once.
        module: path of the module in the model ("layer1.0.conv1"), "" for a function.
        output_bytes: of the value it gives, for the traced shapes; 0 for what is not a tensor.
        param_bytes: of the parameters it uses; ``largest_param_bytes``: of the largest of them.
        flops: multiply-adds times two of its forward pass, for the traced shapes.
        differentiable: a gradient flows back through its value in training.
        random: it may draw random numbers in training.
        scope: path of the module whose forward runs it; ``module`` itself where that is set.
        saved: (number, bytes) of each piece of memory that autograd keeps of it for backward, parameters and buffers
            not counted; layers that keep the same memory name the same number.
        ops: what its forward pass computes.
        output_storages: (number, bytes) of each storage that its value lies in, numbered as in ``saved``; with none,
            the value is taken to lie in memory of its own.
        forward_work, backward_work: bytes that live besides only while the layer itself runs, forward and backward.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    module: str = ""
    output_bytes: int = 0
    param_bytes: int = 0
    largest_param_bytes: int = 0
    flops: int = 0
    differentiable: bool = True
    random: bool = False
    scope: str = ""
    saved: tuple[tuple[int, int], ...] = ()
    ops: tuple[Op, ...] = ()
    output_storages: tuple[tuple[int, int], ...] = ()
    forward_work: int = 0
    backward_work: int = 0


@dataclass(frozen=True)
class LayerGraph:
    """A model as ``trace`` found it.

    Attributes:
        layers: in the order they run.
        inseparable: pairs (first, last) of positions in ``layers`` between which no cut may fall: a value changed in
            place, or parameters or buffers used several times. Disjoint and sorted.
        classes: path of a module -> name of its class; only for labels.
        whole: path of a module that could not be looked into -> why; only for messages.
    """

    layers: tuple[Layer, ...]
    inseparable: tuple[tuple[int, int], ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    whole: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    by_name: Mapping[str, Layer] = field(init=False, repr=False, compare=False)
    position: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {layer.name: layer for layer in self.layers})
        object.__setattr__(self, "position", {layer.name: k for k, layer in enumerate(self.layers)})
        assert len(self.by_name) == len(self.layers), "layer names are unique"

    @functools.cached_property
    def owned_bytes(self) -> tuple[int, ...]:
        """Return by position the bytes of a layer's parameters; a module that is called again has none left."""
        seen: set[str] = set()
        owned = []
        for layer in self.layers:
            owned.append(0 if layer.module in seen else layer.param_bytes)
            if layer.module:
                seen.add(layer.module)
        return tuple(owned)

    @functools.cached_property
    def last_uses(self) -> tuple[int, ...]:
        """Return for each position the last that uses its value; its own where none does."""
        last = list(range(len(self.layers)))
        for position, layer in enumerate(self.layers):
            for name in layer.inputs:
                last[self.position[name]] = position
        return tuple(last)

    @functools.cached_property
    def freed_bytes(self) -> tuple[int, ...]:
        """Return by position the bytes that a layer saves and no layer before it: its backward pass frees them."""
        seen: set[int] = set()
        freed = []
        for layer in self.layers:
            first_saved = {number: size for number, size in layer.saved if number not in seen}
            seen.update(first_saved)  # not |=, which makes a new set of a dictionary's keys
            freed.append(sum(first_saved.values()))
        return tuple(freed)

    @functools.cached_property
    def asked_back(self) -> frozenset[str]:
        """Return names of the values that the output's gradient flows back to.

        Parameters before what only a detached value uses, or nothing, have no gradient at all, which an optimizer takes
        for another thing than zero. Layers around a value that is changed in place count as one, since what goes in
        there may come out by another's name.
        """
        last_of = {last: first for first, last in self.inseparable}
        names: set[str] = set()
        begin, flows = len(self.layers), False
        for position in reversed(range(len(self.layers))):
            if position in last_of:
                begin = last_of[position]
                flows = any(layer.name in names for layer in self.layers[begin : position + 1])
            layer = self.layers[position]
            together = flows and position >= begin
            if layer.kind == OUTPUT or together or (layer.differentiable and layer.name in names):
                names.update(layer.inputs)
            if position == begin:
                begin, flows = len(self.layers), False
        return frozenset(names)

    def flows_back(self, name: str) -> bool:
        """Return whether a gradient may come back for a value, also where that comes from something written into it."""
        position = self.position[name]
        return name in self.asked_back and (self.layers[position].differentiable or position in self._written)

    @functools.cached_property
    def _written(self) -> frozenset[int]:
        """Return positions around values that are changed in place, where a layer there is differentiable."""
        spans = [range(first, last + 1) for first, last in self.inseparable]
        return frozenset(k for span in spans if any(self.layers[k].differentiable for k in span) for k in span)

    def can_cut(self, position: int) -> bool:
        """Return whether a stage may end before ``layers[position]``."""
        return position not in self._held

    @functools.cached_property
    def _held(self) -> frozenset[int]:
        return frozenset(k for first, last in self.inseparable for k in range(first + 1, last + 1))
