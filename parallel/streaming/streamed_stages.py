"""The stages of a model, each computed in boxes of the tile as far as it can be, and whole where it cannot at all.

Takes a traced model and its partition; gives modules of the stages that a rank holds. What enters a stage are maps that
other stages made, with their gradients, and values without rows. Its boxes are those of the tile, whatever the size of
its maps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from parallel.graph.partition import Partition
from parallel.offload.host_memory import HostMemory
from parallel.streaming.operation import Reading
from parallel.streaming.read_region import NothingInBoxes
from parallel.streaming.region import WHOLE_TILE
from parallel.streaming.streamed_module import StreamedRun, StreamedStage, parted
from parallel.trace.cut import cut_stage
from parallel.trace.left_as_it_was import left_as_it_was
from parallel.trace.trace import Traced
from parallel.trace.without_data import replacements, swapped, without_data


def streamed_stages(
    traced: Traced,
    partition: Partition,
    numbers: Collection[int],
    box: int,
    shape: tuple[int, ...],
    stored_bytes: int | None = None,
    host: HostMemory | None = None,
) -> dict[int, StreamedStage]:
    """Return the stages ``numbers`` of the model, computed in boxes of ``box`` px.

    Args:
        shape: (n, 3, h, w) of a usual microbatch; others may follow.
        stored_bytes: that maps of one stage and microbatch should take on the host; None: as for ``RegionRun``.
        host: where they are; None: in memory.

    Raises:
        ValueError: no stage can be computed in boxes; which layer is the first that cannot, and why.
    """
    with left_as_it_was(traced.model):
        traced.model.train()
        values = _values(traced, partition, shape)
        stages: dict[int, StreamedStage] = {}
        reasons: list[str] = []
        others = (number for number in range(partition.depth) if number not in numbers)
        for number in (*numbers, *others):
            if len(reasons) < len(stages) and len(stages) >= len(numbers):
                break  # one can; of the others their ranks say what is wrong
            entering = [values[name] for name in partition.inputs_of(number)]
            stages[number] = _stage(traced, partition, number, box, stored_bytes, _scale(entering, shape), host)
            run = stages[number]._run_training
            assert isinstance(run, StreamedRun)
            try:
                run.planned(stages[number], entering)
            except NothingInBoxes as reason:
                reasons.append(str(reason))
    if len(reasons) == partition.depth:
        raise ValueError(reasons[0])
    for stage in stages.values():
        stage.train(traced.model.training)
    return {number: stages[number] for number in numbers}


def _stage(
    traced: Traced,
    partition: Partition,
    number: int,
    box: int,
    stored_bytes: int | None,
    scale: tuple[Fraction, Fraction],
    host: HostMemory | None,
) -> StreamedStage:
    def run(
        nodes: Sequence[fx.Node], inputs: tuple[str, ...], outputs: tuple[str, ...], slots: dict[str, str], _: str
    ) -> StreamedRun:
        names = {slot: value for value, slot in slots.items()}  # what evaluation has in place of a value of training
        inside, given = (tuple(names.get(name, name) for name in ends) for ends in (inputs, outputs))
        return StreamedRun(nodes, inside, given, box, stored_bytes, scale, host, traced.updated)

    stage = cut_stage(traced, partition, number, (), StreamedStage, run)
    assert isinstance(stage, StreamedStage)
    return stage


def _values(traced: Traced, partition: Partition, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what passes between stages, in shape and type alone, by name; and the tiles."""
    parameter = next(traced.model.parameters())
    device, reading, made = parameter.device, Reading(traced.model), dict[str, Any]()
    backward = {edge.value: edge.differentiable for edge in partition.edges}

    def example(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = torch.zeros((), dtype=leaf.dtype, device=device).expand(leaf.shape)
        return tensor.requires_grad_(backward.get(name, False) and leaf.is_floating_point())

    images = torch.zeros((), dtype=parameter.dtype.to_real(), device=device).expand(shape)
    if partition.depth == 1:
        return dict.fromkeys(partition.inputs_of(0), images)
    state = replacements(traced.model, torch.zeros_like)  # a model may look at a flag of its own
    with without_data() as fake, swapped(traced.model, {key: fake.from_tensor(t) for key, t in state.items()}):
        _follow(traced, reading, fake.from_tensor(images))
    for name, value in reading.values.items():
        if name in backward or name in partition.inputs_of(0):
            made[name] = tree_map(lambda leaf, name=name: example(name, leaf), value)
    return made


def _follow(traced: Traced, reading: Reading, images: Tensor) -> None:
    """Let ``reading`` learn the value of every node."""
    for node in traced.training.graph.nodes:
        if node.op == "placeholder":
            reading.values[node.name] = images
        elif node.op != "output":
            try:
                reading.of(node)
            except Exception as fault:  # whatever a user's module raises
                raise ValueError(
                    f"--stream over several stages needs the shapes that pass between them without data, and "
                    f"{node.name} ({node.target}) cannot run so: {' '.join(str(fault).split())}. Use --stream with "
                    "--parallel single, or leave --stream out"
                ) from fault


def _scale(entering: Sequence[Any], shape: tuple[int, ...]) -> tuple[Fraction, Fraction]:
    """Return px of the tile for each of the largest map that enters a stage."""
    maps, _ = parted(dict(enumerate(entering)))
    if not maps:
        return WHOLE_TILE
    rows, columns = max(tuple(value.shape[2:]) for value in maps.values())
    return Fraction(shape[2], rows), Fraction(shape[3], columns)
