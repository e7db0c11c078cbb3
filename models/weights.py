"""Weights from a file, or of a library, into a model: what ``--weights`` does.

Takes .pt, .pth or .safetensors with a state dict, bare or under ``teacher``, ``model`` or ``state_dict``, with or
without words before its names such as ``module.`` or ``backbone.``; returns what matched, block by block. Of a
checkpoint of ours, averages of weights are taken where it has any.
"""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.heads import bag_head_path, pool_path

WRAPPERS = ("teacher", "model", "state_dict")
"""Keys that a state dict lies under: that of a teacher in self-supervised training goes before its student's."""

WORDS = ("module", "model", "encoder", "backbone", "teacher", "trunk", "encoder_q", "_orig_mod")
"""Parts of names that stand for a model inside of another, in a file or in the model."""

LEAST = 0.5
"""Of the numbers of the smaller of model and file, the part that has to match."""

SHOWN_FAULTS = 20
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Last word of the names of what only batch norms have."""

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of R, G and B, 0 to 1, that torchvision and most of timm train with."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights to start from.

    Attributes:
        tensors: state dict, with the names of the model's parameters or of those of a part of it.
        source: file or library, for messages.
        normalisation: mean and standard deviation, of R, G and B from 0 to 1, of the images they were trained on; None:
            a file that does not say.
    """

    tensors: Mapping[str, Tensor]
    source: str
    normalisation: tuple[Sequence[float], Sequence[float]] | None


def load_weights(model: nn.Module, weights: Weights) -> LoadedWeights:
    """Load what fits of ``weights`` into ``model``, in place; return what did and what did not.

    Their names may have words of ``WORDS`` before them, and be those of a part of the model that is called so: the
    encoder of a U-Net. A block (a module at the top, or of that part) is loaded as a whole, or not at all where the
    file, or the model, has none of that name. A head with another number of classes keeps its random weights, and so
    does the pooling of another ``--head``.

    Raises:
        ValueError: they fit another model (names all keys).
    """
    wanted = {key: tensor for key, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    in_file, source = weights.tensors, weights.source
    prefix, part = best_fit(in_file, wanted)
    tensors = {part + key.removeprefix(prefix): value for key, value in in_file.items() if key.startswith(prefix)}
    outside = [key for key in in_file if not key.startswith(prefix)]
    fitting = [key for key in wanted if key in tensors and tensors[key].shape == wanted[key].shape]
    other_shape = [key for key in wanted if key in tensors and tensors[key].shape != wanted[key].shape]
    missing = [key for key in wanted if key not in tensors and not key.endswith("num_batches_tracked")]
    extra = [key for key in tensors if key not in wanted]

    begun = {block_of(key, part) for key in (*fitting, *other_shape)}
    head = list(wanted)[-1].rpartition(".")[0] + "."
    fresh = {key: "not in the file" for key in missing if block_of(key, part) not in begun or key.startswith(head)}
    unused = {key: "not in the model" for key in extra if block_of(key, part) not in begun}
    unused |= {key: "auxiliary head, not in the model" for key in extra if key.lower().startswith("aux")}
    if path_of_pool := pool_path(model):
        of_pool = f"{path_of_pool}."
        fresh |= {key: "--head, not in the file" for key in missing if key.startswith(of_pool)}
        unused |= {key: "another --head, not in the model" for key in extra if key.startswith(of_pool)}
    if bag_head := bag_head_path(tensors):
        unused |= {key: "--bag, not in the model" for key in extra if key.startswith(f"{bag_head}.")}
    shapes = {key: f"file {tuple(tensors[key].shape)}, model {tuple(wanted[key].shape)}" for key in other_shape}
    # Another number of classes can be a head's alone: output channels of other layers are input channels of the next.
    counts = {(tensors[key].shape[:1], wanted[key].shape[:1]) for key in other_shape}
    is_head = len(counts) == 1 and all(tensors[key].shape[1:] == wanted[key].shape[1:] for key in other_shape)
    kept = shapes if is_head else {}

    faults = [f"{key}: {text}" for key, text in shapes.items() if key not in kept]
    faults += [f"{key}: not in the file" for key in missing if key not in fresh]
    faults += [f"{key}: not in the model" for key in extra if key not in unused]
    if faults:
        more = [f"and {len(faults) - SHOWN_FAULTS} more"] if faults[SHOWN_FAULTS:] else []
        of_norms = all(fault.partition(":")[0].endswith(STATISTICS) for fault in faults)
        raise ValueError(
            f"the weights in {source} are of another model ({len(faults)} of {len(wanted)} tensors differ); "
            f"choose the {'--norm' if of_norms else '--model'} they were trained with:\n  "
            + "\n  ".join([*faults[:SHOWN_FAULTS], *more])
        )
    _refuse_another_model(source, tensors, wanted, fitting)
    model.load_state_dict({key: tensors[key] for key in fitting}, strict=False)
    reasons = [f"{key} ({reason})" for key, reason in (fresh | unused).items()]
    reasons += [f"{key} (other number of classes: {text})" for key, text in kept.items()]
    of_kind = {"loaded": fitting, "fresh": fresh, "other shape": kept, "unused": [*unused, *outside]}
    tensors_of = {kind: Counter(block_of(key, part) for key in of_kind[kind]) for kind in KINDS}
    names = dict.fromkeys((*(block_of(key, part) for key in wanted), *(n for kind in KINDS for n in tensors_of[kind])))
    blocks = {name: {kind: tensors_of[kind][name] for kind in KINDS} for name in names}
    return LoadedWeights(source, prefix, part, len(wanted), blocks, tuple(reasons), frozenset((*fresh, *kept)))


def best_fit(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return what comes before the names in the file, and before those in the model, where most tensors match."""
    shapes = {key: tensor.shape for key, tensor in wanted.items()}

    def matches(pair: tuple[str, str]) -> int:
        prefix, part = pair
        own = ((part + key.removeprefix(prefix), value) for key, value in tensors.items() if key.startswith(prefix))
        return sum(shapes.get(key) == value.shape for key, value in own)

    # The first of the best: shorter ones come first.
    return max(itertools.product(_leading_words(tensors), _leading_words(wanted)), key=matches)


def block_of(key: str, part: str) -> str:
    """Return the block of a tensor: the first of its modules, or the first after ``part`` of the model."""
    inside = part if key.startswith(part) else ""
    return inside + key.removeprefix(inside).partition(".")[0]


def read_weights(path: Path) -> Weights:
    """Return the state dict in ``path``, on the CPU, wrappers removed. No code of the file is run.

    Raises:
        ValueError: not there, not readable, or no tensors in it.
    """
    if not path.is_file():
        raise ValueError(f"--weights {path}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: object = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as fault:
        raise ValueError(
            f"--weights {path}: not a file of tensors alone, and nothing else is unpickled, as it could run code; "
            f"save model.state_dict() ({str(fault).splitlines()[0]})"
        ) from fault
    except Exception as fault:  # a damaged file fails in any of a dozen ways, zip, pickle or header
        raise ValueError(
            f"--weights {path}: cannot be read as PyTorch or safetensors weights: {type(fault).__name__}: {fault}"
        ) from fault
    saved: Mapping[str, Any] = content if isinstance(content, Mapping) else {}
    averages = saved.get("average")
    normalisation = saved.get("normalisation")
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    tensors = dict(content) if isinstance(content, Mapping) else {}
    others = [str(key) for key, value in tensors.items() if not isinstance(value, Tensor)]
    if others or not tensors:
        what = f"not all are tensors: {', '.join(others[:8])}" if others else "it holds no state dict"
        raise ValueError(f"--weights {path}: {what}; expected a state dict, bare or under {' or '.join(WRAPPERS)}")
    if isinstance(averages, Mapping) and averages.keys() <= tensors.keys():  # a checkpoint of ours
        tensors.update(averages)
    return Weights(tensors, str(path), normalisation and (tuple(normalisation[0]), tuple(normalisation[1])))


def _leading_words(keys: Iterable[str]) -> list[str]:
    """Prefixes of ``WORDS`` at the beginning of ``keys``, with a dot behind it, and "", shorter ones first."""
    found = {""}
    for key in keys:
        words = list(itertools.takewhile(WORDS.__contains__, key.split(".")[:-1]))
        found.update(".".join(words[:n]) + "." for n in range(1, len(words) + 1))
    return sorted(found, key=lambda words: (len(words), words))


def _refuse_another_model(
    source: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], fitting: list[str]
) -> None:
    """Raise ValueError where hardly anything in the file is of the model."""
    matched, own, given = (
        sum(tensor.numel() for tensor in some)
        for some in ([wanted[key] for key in fitting], wanted.values(), tensors.values())
    )
    if fitting and matched >= LEAST * min(own, given):
        return
    names = [f"{key} {tuple(tensor.shape)}" for key, tensor in tensors.items()]
    own_names = [f"{key} {tuple(tensor.shape)}" for key, tensor in wanted.items()]
    raise ValueError(
        f"--weights {source}: {len(fitting) or 'none'} of its {len(tensors)} tensors match the model, by name and "
        f"shape: they are of another model. The file has {', '.join(names[:3])}; the model {', '.join(own_names[:3])}"
    )


KINDS = ("loaded", "fresh", "other shape", "unused")
"""Loaded; left as drawn, as the file has none; left as drawn, of other classes; in the file alone."""


@dataclass(frozen=True)
class LoadedWeights:
    """Part of a file that is in a model.

    Attributes:
        prefix: stood before the names in the file that were taken, with a dot behind it.
        part: of the model that they are in, likewise.
        tensors: of the model.
        blocks: name -> how many tensors of each of ``KINDS``; those of the model first, in its order.
        left: a line for each tensor that was not loaded.
        drawn: tensors of the model that were not loaded.
    """

    source: str
    prefix: str
    part: str
    tensors: int
    blocks: Mapping[str, Mapping[str, int]]
    left: tuple[str, ...]
    drawn: frozenset[str]

    @property
    def lines(self) -> tuple[str, ...]:
        """Return what a user reads: how much of the model was loaded, then a table of blocks."""
        loaded = sum(counts["loaded"] for counts in self.blocks.values())
        where = f", named {self.prefix}* in the file" if self.prefix else ""
        where += f", into {self.part.removesuffix('.')}" if self.part else ""
        rows = [["block", *KINDS]]
        rows += [[name, *(str(counts[kind] or "-") for kind in KINDS)] for name, counts in self.blocks.items()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        cells = (
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            for row in rows
        )
        table = (f"  {'  '.join(row)}" for row in cells)
        return f"--weights {self.source}: {loaded} of {self.tensors} tensors loaded{where}", *table

    @property
    def summary(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return {
            "file": self.source,
            "prefix": self.prefix,
            "part": self.part,
            "tensors": self.tensors,
            "blocks": {name: dict(counts) for name, counts in self.blocks.items()},
            "left": list(self.left),
        }
