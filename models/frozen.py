"""Frozen parts of a model: what ``--freeze`` does.

Takes a model with the weights it starts from; parameters of the named modules need no gradient then, and their batch
norms go by the running statistics they have, in training too.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from models.external import close_matches, keep_statistics
from models.layer_depth import layers_of

TRUNK = "trunk"
"""Stands for all layers but the last, where no module is called so."""


def freeze(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """Freeze, in place, what is at ``paths`` in ``model``; return the names of the frozen parameters.

    Args:
        paths: of modules or parameters, such as ``layer1`` or ``encoder.0``, or ``TRUNK``.

    Raises:
        ValueError: nothing is there, or nothing is left to be trained.
    """
    parameters = dict(model.named_parameters())
    frozen: set[str] = set()
    for path in paths:
        names = {name for name in parameters if f"{name}.".startswith(f"{path}.")}
        if not names and path == TRUNK:
            names = {name for layer in layers_of(model)[:-1] for name in layer}
        if not names:
            known = {part for name in parameters for part in (name.partition(".")[0], name.rpartition(".")[0]) if part}
            raise ValueError(
                f"--freeze {path}: the model has no parameters there; {close_matches(path, known | {TRUNK})}"
            )
        frozen |= names
    if len(frozen) == len(parameters):
        raise ValueError("--freeze leaves no parameter of the model to be trained: name fewer modules")
    for name in frozen:
        parameters[name].requires_grad_(False)
    keep_statistics(
        part
        for name, part in model.named_modules()
        if isinstance(part, _BatchNorm) and part.track_running_stats and _is_frozen(model, name)
    )
    return [name for name in parameters if name in frozen]


def _is_frozen(model: nn.Module, path: str) -> bool:
    """Whether no parameter of the module at ``path``, or of the nearest around it that has any, is trained."""
    while True:
        trained = [parameter.requires_grad for parameter in model.get_submodule(path).parameters()]
        if trained or not path:
            return not any(trained)
        path = path.rpartition(".")[0]
