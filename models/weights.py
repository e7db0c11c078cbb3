"""Weights from a file into a model: what ``--weights FILE`` does.

Takes .pt, .pth or .safetensors with a state dict, bare or under ``model`` or ``state_dict``, with or without the
``module.`` of DistributedDataParallel; gives the list of what was not loaded: the head when the classes differ.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from models.heads import pool_path

WRAPPERS = ("model", "state_dict")
DATA_PARALLEL = "module."
SHOWN_FAULTS = 20


def load_weights(model: nn.Module, path: Path) -> list[str]:
    """Load what fits from ``path`` into ``model``, in place; return a line for each tensor that was not loaded.

    A head with another number of classes, or missing from the file, keeps its random weights, and so does the pooling
    of another ``--head``; auxiliary heads and poolings that the model was built without are passed over. All are in
    the result; the rest must match.

    Raises:
        ValueError: the file is not there, cannot be read, holds no tensors, or fits another model (the keys are
            named, all at once).
    """
    tensors = read_tensors(path)
    wanted = {key: tensor for key, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    head = list(wanted)[-1].rpartition(".")[0] + "."
    other_shape = [key for key in wanted if key in tensors and tensors[key].shape != wanted[key].shape]
    missing = [key for key in wanted if key not in tensors and not key.endswith("num_batches_tracked")]
    extra = [key for key in tensors if key not in wanted]

    fresh = {key: f"{key} (not in the file)" for key in missing if key.startswith(head)}
    fresh |= {key: f"{key} (auxiliary head, not in the model)" for key in extra if key.lower().startswith("aux")}
    if path_of_pool := pool_path(model):
        of_pool = f"{path_of_pool}."
        fresh |= {key: f"{key} (--head, not in the file)" for key in missing if key.startswith(of_pool)}
        fresh |= {key: f"{key} (another --head, not in the model)" for key in extra if key.startswith(of_pool)}
    if only_classes_differ([(tensors[key], wanted[key]) for key in other_shape]):
        for key in other_shape:
            shapes = f"file {tuple(tensors[key].shape)}, model {tuple(wanted[key].shape)}"
            fresh[key] = f"{key} (other number of classes: {shapes})"

    faults = [
        f"{key}: file {tuple(tensors[key].shape)}, model {tuple(wanted[key].shape)}"
        for key in other_shape
        if key not in fresh
    ]
    faults += [f"{key}: not in the file" for key in missing if key not in fresh]
    faults += [f"{key}: not in the model" for key in extra if key not in fresh]
    if faults:
        shown = faults[:SHOWN_FAULTS] + ([f"and {len(faults) - SHOWN_FAULTS} more"] if faults[SHOWN_FAULTS:] else [])
        raise ValueError(
            f"the weights in {path} are of another model ({len(faults)} of {len(wanted)} tensors differ); "
            f"choose the --model they were trained with:\n  " + "\n  ".join(shown)
        )
    model.load_state_dict({key: value for key, value in tensors.items() if key not in fresh}, strict=False)
    return list(fresh.values())


def only_classes_differ(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Return whether (file, model) tensors differ in output channels alone, all by the same two counts.

    Only a head can: the output channels of any other layer are input channels of the next.
    """
    counts = {(file.shape[:1], wanted.shape[:1]) for file, wanted in pairs}
    return len(counts) == 1 and all(file.shape[1:] == wanted.shape[1:] for file, wanted in pairs)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the state dict in ``path``, on the CPU, wrappers and prefix removed. No code of the file is run.

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
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    tensors = dict(content) if isinstance(content, Mapping) else {}
    others = [str(key) for key, value in tensors.items() if not isinstance(value, Tensor)]
    if others or not tensors:
        what = f"not all are tensors: {', '.join(others[:8])}" if others else "it holds no state dict"
        raise ValueError(f"--weights {path}: {what}; expected a state dict, bare or under {' or '.join(WRAPPERS)}")
    if all(key.startswith(DATA_PARALLEL) for key in tensors):
        tensors = {key.removeprefix(DATA_PARALLEL): value for key, value in tensors.items()}
    return tensors
