"""Units of a fully sharded model: runs of modules that are gathered for their passes and freed after them.

Parameters outside of units are gathered for the whole step. As in Zhao et al. 2023, PyTorch FSDP, section 4: units
bound the bytes that are whole at a time, and too many of them are messages too small for the link.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from parallel.memory.gathered import Sharding

SMALLEST, LARGEST = 64, 8
"""A unit of its own has at least 1/64 of all parameters, so there are at most 64; one above 1/8 is looked into."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def sharding_units(module: nn.Module) -> list[list[nn.Module]]:
    """Blocks of ``module``: members of Sequential, ModuleList and ModuleDict, and modules made of modules, which are
    there to be called.

    Small neighbours in one container make one unit. A parameter that is tied across the border of a unit keeps that
    unit from being one.

    Returns:
        Disjoint or nested units, inner ones before those around them; empty when there are no blocks.

    Raises:
        ValueError: a parameter without dims, which cannot be divided, or parameters of several types.
    """
    types = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()})
    if len(types) > 1:
        raise ValueError(
            f"the parameters are {' and '.join(types)}, and --parallel fsdp divides those of one type alone: make them "
            "one, as torch.view_as_complex of a real parameter does, or use --parallel ddp"
        )
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise ValueError(
                f"{name} is a single number without dims, which --parallel fsdp cannot divide among ranks: make it "
                "torch.Tensor of shape (1,), or use --parallel ddp"
            )
    return _Search(module).units


def recomputed_modules(module: nn.Module, units: Iterable[Iterable[nn.Module]]) -> list[nn.Module]:
    """Return the modules that are recomputed one by one: blocks of several layers, whatever parameters they have, with
    no unit inside. A single layer would keep as much. Sequentials of layers are blocks, those of blocks are not.

    Args:
        units: as ``sharding_units`` returns them.
    """
    members = {each for unit in units for each in unit}
    found: dict[nn.Module, None] = {}

    def look_into(parent: nn.Module) -> None:
        for child in parent.children():
            inner = {*child.modules()} - {child}
            strings = isinstance(child, _CONTAINERS) and any(map(_is_block, inner))
            if not members.isdisjoint(inner) or _is_list(child) or strings:
                look_into(child)
            elif inner:
                found[child] = None

    look_into(module)
    return list(found)


def sharding_of(module: nn.Module) -> Sharding:
    """Return units and recomputed modules by path, for plans; a ValueError as of ``sharding_units``."""
    units, paths = sharding_units(module), {each: path for path, each in module.named_modules()}
    blocks = recomputed_modules(module, units)
    return Sharding(tuple(tuple(paths[each] for each in unit) for unit in units), tuple(paths[each] for each in blocks))


class _Search:
    def __init__(self, root: nn.Module) -> None:
        self.units: list[list[nn.Module]] = []
        total = sum(parameter.numel() for parameter in root.parameters())
        self._smallest, self._largest = total / SMALLEST, total / LARGEST
        self._taken: set[nn.Parameter] = set()
        self._owners: dict[nn.Parameter, set[nn.Module]] = {}
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(parameter, set()).add(module)
        self._seen = {root}
        self._look_into(root)

    def _look_into(self, module: nn.Module) -> None:
        """Add the units below ``module``."""
        if is_parametrized(module):
            return  # its weights are made by modules that it calls in ways of its own
        children = [child for child in module.children() if child not in self._seen]
        self._seen.update(children)
        if not isinstance(module, _CONTAINERS):
            for child in children:
                before = len(self.units)
                if self._left_in([child]) > self._largest or isinstance(child, _CONTAINERS):
                    self._look_into(child)
                # The weight of a single layer may be used without calling it, what is made of layers is called.
                if len(self.units) == before and next(child.children(), None) and not _is_list(child):
                    self._close([child])
            return
        run: list[nn.Module] = []
        for child in children:
            bare = _is_list(child)
            if bare or self._left_in([child]) > self._largest:
                self._look_into(child)
                self._close(run)
                run = []
            if not bare:
                run.append(child)
            if self._left_in(run) >= self._smallest:
                self._close(run)
                run = []
        self._close(run)

    def _close(self, run: list[nn.Module]) -> None:
        """Make ``run`` a unit if it is large enough and shares no parameter with modules outside."""
        inside = {module for member in run for module in member.modules()}
        own = [parameter for parameter in _parameters(run) if parameter not in self._taken]
        if self._left_in(run) >= self._smallest and all(self._owners[parameter] <= inside for parameter in own):
            self.units.append([member for member in run if next(member.parameters(), None) is not None])
            self._taken.update(own)

    def _left_in(self, run: Iterable[nn.Module]) -> int:
        """Numbers in the parameters of ``run`` that are in no unit yet."""
        return sum(parameter.numel() for parameter in _parameters(run) if parameter not in self._taken)


def _is_block(module: nn.Module) -> bool:
    """Return whether ``module`` has layers, and a forward of its own."""
    return not isinstance(module, _CONTAINERS) and next(module.children(), None) is not None


def _is_list(module: nn.Module) -> bool:
    """Return whether ``module`` only holds modules and cannot be called."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _parameters(run: Iterable[nn.Module]) -> dict[nn.Parameter, None]:
    """Return the parameters of ``run``, in order, each once."""
    return dict.fromkeys(parameter for member in run for parameter in member.parameters())
