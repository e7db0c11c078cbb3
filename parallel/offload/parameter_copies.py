"""What one layer asks for of parameters on the host, in one forward pass, and what its backward pass needs again.

A unit holds its copies while the layer computes; then only what autograd saved of them is remembered, and brought to
the device again when the backward pass comes to it, for as long as somebody there needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor, nn

from parallel.offload.copies import Copies, Mark
from parallel.offload.packing import check_version, form_of, view_like


class DeviceCopy:
    """A parameter's copy on the device, for as long as somebody holds it."""

    def __init__(self, parameter: nn.Parameter, tensor: Tensor, mark: Mark, copies: Copies) -> None:
        self.parameter = parameter
        self.tensor = tensor
        self._mark = mark
        self._copies = copies

    def arrive(self) -> None:
        """Computing waits for the copy."""
        mark, self._mark = self._mark, None
        if mark is not None:
            self._copies.wait(mark)

    def __del__(self) -> None:
        # Its memory is used again by what is computed next, which must not be before the copy is done.
        self.arrive()


Bring = Callable[[nn.Parameter], DeviceCopy]
"""Gives the parameter's copy on the device, perhaps still under way."""


class Unit:
    """What one layer asked for in one forward pass.

    Attributes:
        scope: the call of the layer.
        before: the unit before it in the same pass.
        first: the parameter asked for first.
        copies: held until ``release``.
        given: to the layer, by parameter and whether gradients were wanted.
    """

    def __init__(self, scope: object, before: Unit | None, first: int) -> None:
        self.scope = scope
        self.before = before
        self.first = first
        self.released = False
        self.copies: list[DeviceCopy] = []
        self.given: dict[tuple[int, bool], Tensor] = {}
        self._visits: weakref.WeakValueDictionary[int, Visit] = weakref.WeakValueDictionary()
        self._returned = False

    def release(self) -> None:
        """The layer has computed: its copies are held by what it saved only."""
        self.released = True
        self.copies.clear()
        self.given.clear()

    def visit(self, parameter: nn.Parameter, bring: Bring) -> Visit:
        """What is kept of ``parameter`` for the backward pass of this unit."""
        visit = self._visits.get(id(parameter))
        if visit is None:
            self._visits[id(parameter)] = visit = Visit(parameter, self, bring)
        return visit

    def come_back(self) -> None:
        """Its backward pass begins: bring what it needs, and begin with what the one before will."""
        if self._returned:
            return
        self._returned = True
        self._bring()
        before = self.before
        while before is not None and not before._visits:
            before = before.before
        if before is not None:
            before._bring()

    def _bring(self) -> None:
        for visit in self._visits.values():
            visit.bring()


class Visit:
    """A parameter that the backward pass of one unit needs again: on the device from then until nobody needs it."""

    def __init__(self, parameter: nn.Parameter, unit: Unit, bring: Bring) -> None:
        self._parameter, self._unit = parameter, unit
        self._bring = bring
        self._version = parameter._version
        self._copy: DeviceCopy | None = None

    def bring(self) -> DeviceCopy:
        if self._copy is None:
            self._copy = self._bring(self._parameter)
        return self._copy

    def tensor(self) -> Tensor:
        """The copy.

        Raises:
            RuntimeError: the parameter was changed meanwhile.
        """
        check_version(self._parameter, self._version)
        self._unit.come_back()
        copy = self.bring()
        copy.arrive()
        return copy.tensor


class Claim:
    """A tensor that autograd saved and that lies in a parameter's copy."""

    def __init__(self, visit: Visit, tensor: Tensor) -> None:
        self._visit = visit
        self._form = form_of(tensor)

    def unpack(self) -> Tensor:
        """The same part of the parameter, on the device again."""
        return view_like(self._visit.tensor(), self._form)
