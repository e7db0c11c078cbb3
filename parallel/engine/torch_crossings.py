"""What passes from stage to stage in a pipeline of torch's own: tensors, their shapes, and the order of dims.

Takes a partition and the form of every value; gives the ``Crossing``s at each cut, or says why torch's pipelines cannot
carry what passes. They send tensors alone, from one stage to the next, in shapes that are fixed before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel.graph.layers import RANDOM_STATE
from parallel.graph.partition import Partition
from parallel.trace.fake_run import fake_run
from parallel.trace.trace import Traced, left_as_it_was

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


@dataclass(frozen=True)
class Crossing:
    """A tensor that goes from a stage to the next. Gloo sends what is contiguous alone: in a model whose layout is
    channels_last, images (n, c, h, w) travel as (n, h, w, c), which are the same bytes.

    Attributes:
        name: of the value.
        shape: in the model.
        differentiable: its gradient comes back.
        channels_last: it is an image of a model with this layout.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    channels_last: bool

    @property
    def example(self) -> Tensor:
        """As it travels, without data."""
        plain = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return self.sent(plain).requires_grad_(self.differentiable)

    def sent(self, value: Tensor) -> Tensor:
        """``value`` as it travels."""
        return (value.permute(0, 2, 3, 1) if self.channels_last else value).contiguous()

    def received(self, value: Tensor) -> Tensor:
        """What travelled, as the model has it."""
        return value.permute(0, 3, 1, 2) if self.channels_last else value


def crossings(partition: Partition, forms: Mapping[str, Form | None], channels_last: bool) -> list[list[Crossing]]:
    """What passes at the cut behind each stage but the last, by name.

    Args:
        forms: of the values, for one microbatch; None of what is not one tensor.
        channels_last: layout of the model.

    Raises:
        ValueError: all that torch's pipelines cannot carry.
    """
    found: list[list[Crossing]] = [[] for _ in range(partition.depth - 1)]
    faults = []
    for edge in partition.edges:
        if edge.value == RANDOM_STATE:
            continue
        form = forms[edge.value]
        if edge.target > edge.source + 1:
            faults.append(f"{edge.value} from stage {edge.source} to stage {edge.target}, past those between")
        elif form is None:
            faults.append(f"{edge.value} from stage {edge.source} to stage {edge.target}, which is not a tensor")
        else:
            images = channels_last and len(form[0]) == 4
            found[edge.source].append(Crossing(edge.value, *form, edge.differentiable, images))
    if faults:
        begin = ", ".join(partition.graph.layers[start].name for start in partition.starts[1:])
        raise ValueError(
            "torch's pipelines send tensors alone, and from each stage to the next alone; this model, with stages that "
            f"begin at {begin}, sends {'; '.join(faults)}: use --parallel gpipe or 1f1b, which send any value to any "
            "stage, or fewer --stages, or other --cuts"
        )
    return found


def forms_of(
    traced: Traced, shape: tuple[int, ...], device: torch.device, autocast: torch.dtype | None
) -> dict[str, Form | None]:
    """Form of every value in training, by name, for images of ``shape``; None of what is not one tensor."""
    dtype = next(traced.model.parameters()).dtype.to_real()
    with left_as_it_was(traced.model):
        traced.model.train()
        facts = fake_run(traced.training, shape, dtype, device, autocast)
    return {name: fact.form for name, fact in facts.items()}


def is_channels_last(module: nn.Module) -> bool:
    """Some weights of convolutions have this layout and no other."""
    return any(
        weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
        for weight in module.parameters()
    )
