"""A stage of a model as a module: maps the values the stage receives to those it sends, whole or segment by segment.

A tile of 16,384 px would be 3.2 GB of floats, so that images and targets may be ``Boxes``, which are read box by box.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, fx, nn

from parallel.graph.partition import Partition
from parallel.memory.policy import Segment
from parallel.space.cuts import Span
from parallel.space.team import Box

T = TypeVar("T")
Run = Callable[..., tuple[Any, ...]]
"""(stage module, values) -> values."""


@runtime_checkable
class Boxes(Protocol):
    """Images (n, c, h, w) or targets (n, h, w) whose boxes are made when they are asked for, each time anew."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole; rows and columns last."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the boxes."""

    @property
    def device(self) -> torch.device:
        """Device of the boxes."""

    def box(self, rows: Span, columns: Span) -> Tensor:
        """Return these rows and columns of all, in memory of their own: the same numbers as a crop of the whole."""


def as_tensor(value: Tensor | Boxes) -> Tensor:
    """Return all of it as a tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (tuple, list, dict)):
        raise ValueError(
            f"images and targets of a microbatch are one tensor each, got a {type(value).__name__}: join its parts in "
            "a tensor, and take them apart in the model or loss"
        )
    rows, columns = value.shape[-2:]
    return value.box(Span(0, rows), Span(0, columns))


@dataclass(frozen=True, eq=False)
class SegmentRun:
    """Consecutive layers of a stage that are run, and recomputed, together.

    Attributes:
        run: (stage module, values named in ``inputs``) -> values named in ``outputs``.
        finished: names of the values that no later segment uses.
        uses_rng: its layers may draw random numbers.
        modules: that it calls, with those inside them.
    """

    run: Run
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    finished: tuple[str, ...]
    recompute: bool
    uses_rng: bool
    modules: frozenset[nn.Module]


RunSegment = Callable[[SegmentRun, Run, tuple[Any, ...]], tuple[Any, ...]]
"""(segment, its computation, values that enter it) -> values it gives."""


class StageModule(nn.Module):
    """The layers of one stage. ``named_parameters()`` and ``state_dict()`` have the names of the whole model.

    Attributes:
        inputs: names of the values ``forward`` takes, in order.
        outputs: names of the values it gives, in order. Those that only training makes are None in evaluation.
        segments: of the stage in training; none where it is run as one.
        run_segment: what segments are run by in training.
        gives_sums: ``sums`` computes sums of the output without holding it whole.
        of_one_member: names of the parameters and buffers that no other member of a team holds.
    """

    gives_sums = False
    of_one_member: frozenset[str] = frozenset()

    def __init__(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self._run_training: Run
        self._run_evaluation: Run
        self._modes: list[tuple[nn.Module, bool, bool]] = []
        self.segments: tuple[SegmentRun, ...] = ()
        self.run_segment: RunSegment | None = None

    def forward(self, *values: Any) -> Any:
        """Return the values named in ``outputs``, from those named in ``inputs``."""
        if not self.training:
            return self._run_evaluation(self, *values)
        if self.run_segment is None or not self.segments:
            return self._run_training(self, *values)
        known = dict(zip(self.inputs, values, strict=True))
        for segment in self.segments:
            entering = tuple(known[name] for name in segment.inputs)
            for name in segment.finished:
                del known[name]
            made = self.run_segment(segment, self.segment_pass(segment), entering)
            known.update(zip(segment.outputs, made, strict=True))
            del entering, made
        return tuple(known[name] for name in self.outputs)

    def segment_pass(self, segment: SegmentRun) -> Run:
        """Return what computes a segment, once or, where it is recomputed, twice."""
        return functools.partial(segment.run, self)

    def held(self, named: Iterable[tuple[str, T]], *, own: bool) -> list[T]:
        """Return those of ``named`` parameters or buffers that are this member's own, or those that others hold too."""
        return [value for name, value in named if (name in self.of_one_member) is own]

    @property
    def root(self) -> nn.Module:
        """Return the module whose call computes the stage, and which holds its parameters by their names."""
        return self

    @property
    def counts(self) -> bool:
        """Return whether this rank's loss, tiles and statistics count: those of one member of a team do."""
        return True

    def samples(self, count: int) -> range:
        """Return the tiles of a microbatch of ``count`` that this rank may be given without the others."""
        return range(count)

    def tiles(self, images: Tensor | Boxes, shape: tuple[int, ...]) -> Any:
        """Return what the first stage takes of tiles of ``shape`` (n, 3, h, w)."""
        return as_tensor(images)

    def part_of_tiles(self, shape: tuple[int, ...]) -> Box | None:
        """Return the rows and columns that this rank computes of tiles of ``shape``; None: it may want all."""
        return None

    def part_of_masks(self, shape: tuple[int, ...]) -> Box | None:
        """Return the rows and columns whose targets this rank holds against the output; None: it may want all."""
        return None

    def context(
        self, shape: tuple[int, ...], random: int | Tensor = 0, log: Any = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass on tiles of ``shape``, which has what draws the random numbers in
        place of the stage, or None.

        Args:
            random: seed, or state, that the stage draws from.
            log: of messages, where the pass will be computed a second time, or is.
        """
        return contextlib.nullcontext()

    def replay_log(self) -> Any:
        """Return an empty log of the messages of a forward pass; None where it receives none."""
        return None

    def loss(self, run: Run, loss: Callable[[Any, Any], Tensor], values: Iterable[Any], targets: Any) -> Tensor:
        """Return the ``loss`` of the output that ``run`` gives for ``values``, and ``targets``."""
        (output,) = run(*values)
        return loss(output, as_tensor(targets))

    def sums(self, values: Sequence[Any], asked: Any) -> Tensor | None:
        """Return the sums that are asked of the output; None on ranks that do not have it."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> StageModule:
        """Switch modes as the whole model's ``train()``, which may keep some modules in a mode of their own."""
        super().train(mode)
        for module, training, evaluation in self._modes:
            module.training = training if mode else evaluation
        return self


MakeRun = Callable[[Sequence[fx.Node], tuple[str, ...], tuple[str, ...], dict[str, str], str], Run]
"""As ``compiled``."""


def segment_runs(
    module: StageModule,
    model: nn.Module,
    nodes: Sequence[fx.Node],
    partition: Partition,
    segments: Sequence[Segment],
    make_run: MakeRun,
) -> Iterator[SegmentRun]:
    """Yield the segments of a stage, ready to run; none where no segment is recomputed."""
    if not any(segment.recompute for segment in segments):
        return
    position = partition.graph.position
    nodes_of = [[node for node in nodes if s.start <= position[node.name] < s.stop] for s in segments]
    used = [{argument.name for node in inside for argument in node.all_input_nodes} for inside in nodes_of]
    made = [{node.name for node in inside if node.op != "placeholder"} for inside in nodes_of]
    for k, (segment, inside) in enumerate(zip(segments, nodes_of, strict=True)):
        later = set(module.outputs).union(*used[k + 1 :])
        entering = tuple(sorted(used[k] - made[k], key=lambda name: position[name]))
        leaving = tuple(node.name for node in inside if node.name in made[k] & later)
        before = set(module.inputs).union(*made[:k])
        layers = partition.graph.layers[segment.start : segment.stop]
        yield SegmentRun(
            make_run(inside, entering, leaving, {}, f"layers {segment.start} to {segment.stop}"),
            entering,
            leaving,
            tuple(sorted(name for name in before & used[k] if name not in later)),
            segment.recompute,
            any(layer.random for layer in layers),
            frozenset(
                submodule
                for path in paths_of(inside, "call_module")
                for submodule in model.get_submodule(path).modules()
            ),
        )


def compiled(
    nodes: Sequence[fx.Node], inputs: tuple[str, ...], outputs: tuple[str, ...], slots: dict[str, str], name: str
) -> Run:
    """Return a function (stage module, values) -> values that runs ``nodes``; it lets go of values after their last
    use.

    Args:
        slots: value of evaluation -> value in whose place it travels.
        name: of the code in tracebacks.
    """
    graph = fx.Graph()
    copies = {value: graph.placeholder(value) for value in inputs}
    copies |= {value: copies[slot] for value, slot in slots.items() if slot in copies}
    results: dict[str, Any] = {}
    for node in nodes:
        if node.op == "output":
            results[node.name] = fx.map_arg(node.args[0], lambda argument: copies[argument.name])
        elif node.op != "placeholder":
            copies[node.name] = graph.node_copy(node, lambda argument: copies[argument.name])
    results |= {slot: copies[value] for value, slot in slots.items() if slot in outputs}
    graph.output(tuple(results.get(value, copies.get(value)) for value in outputs))
    code = graph.python_code("self")
    file = f"<{name}>"
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)
    space = dict(code.globals)
    exec(compile(code.src, file, "exec"), space)
    run: Run = space["forward"]
    return run


def paths_of(nodes: Iterable[fx.Node], op: str) -> set[str]:
    """Return the targets of the ``nodes`` of kind ``op``."""
    return {str(node.target) for node in nodes if node.op == op}


def layout_of(value: Tensor) -> torch.memory_format:
    """Return whether the channels of (n, c, h, w) are next to each other in memory, in torch's words."""
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format
