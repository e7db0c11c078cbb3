"""Layers of a model from input to output, by its parameters: for ``--layer-decay`` and ``--freeze``.

A layer is a block where modules string blocks together (``layer1``, a list of transformer blocks, the stages of a
Swin), else a convolution or a linear layer. Parameters of a module that is looked into, such as a class token, go with
the layer behind them; a module with numbers for channels alone, such as a norm, goes with the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from models.external import close_matches, keep_statistics
from models.heads import PoolHead

LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Layer = tuple[str, ...]
"""Names of parameters."""


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the names of all parameters, layer by layer; one that several modules share is in the first."""
    layers: list[Layer] = []
    bare: Layer = ()
    seen: set[nn.Parameter] = set()
    for is_bare, path, unit in _units(model, ""):
        named = unit._parameters.items() if is_bare else unit.named_parameters()
        own = {f"{path}{name}": parameter for name, parameter in named if parameter is not None}
        own = {name: parameter for name, parameter in own.items() if parameter not in seen}
        seen.update(own.values())
        if is_bare:
            bare += tuple(own)
        elif own and layers and not bare and all(parameter.dim() <= 1 for parameter in own.values()):
            layers[-1] += tuple(own)
        elif own:
            layers.append((*bare, *own))
            bare = ()
    if bare:
        layers[-1:] = [(*(layers[-1] if layers else ()), *bare)]
    return layers


def layer_decay_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return what the learning rate of each parameter is multiplied with: 1 in the last layer, ``decay`` times as much
    in each before (Bao et al. 2022, BEiT, section 3.1).

    Raises:
        ValueError: the model has a single layer.
    """
    layers = layers_of(model)
    if len(layers) < 2:
        raise ValueError(
            f"--layer-decay {decay:g} lowers the learning rate from layer to layer, and this model has "
            f"{len(layers)}: leave it out"
        )
    return {name: decay ** (len(layers) - 1 - depth) for depth, layer in enumerate(layers) for name in layer}


def _units(module: nn.Module, path: str) -> Iterator[tuple[bool, str, nn.Module]]:
    """(whether only its own parameters are meant, path with a dot behind it, module) of what makes up ``module``."""
    yield True, path, module
    for name, child in module.named_children():
        inner = f"{path}{name}."
        # a list of two or more blocks; a convolution with its norm and activation is none
        lists = [part for part in child.modules() if isinstance(part, LISTS)]
        if isinstance(child, LISTS) or any(sum(map(_is_block, part.children())) >= 2 for part in lists):
            yield from _units(child, inner)
        else:
            yield False, inner, child


def _is_block(module: nn.Module) -> bool:
    inside = [child for child in module.children() if next(child.parameters(), None) is not None]
    return bool(inside) and not (isinstance(module, LISTS) and not any(list(part.children()) for part in inside))


TRUNK = "trunk"
"""Stands for all layers but the last and the pooling of ``--head``, where no module is called so."""


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
            pools = tuple(f"{name}." for name, part in model.named_modules() if isinstance(part, PoolHead))
            names = {name for layer in layers_of(model)[:-1] for name in layer if not name.startswith(pools)}
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
    """Return whether no parameter of the module at ``path``, or of the nearest around it that has any, is trained."""
    while True:
        trained = [parameter.requires_grad for parameter in model.get_submodule(path).parameters()]
        if trained or not path:
            return not any(trained)
        path = path.rpartition(".")[0]
