"""A storage that autograd saved, which may lie on the device, on the host, or be on its way."""

from __future__ import annotations

from torch import Tensor

from parallel.offload.activation_meter import ActivationMeter, Kept
from parallel.offload.copies import Mark
from parallel.offload.packing import bytes_view, check_version


class Entry:
    """One saved storage.

    Attributes:
        place: number in its flight.
        device: its bytes on the device, None while they are on the host alone.
        host: room on the host that holds or awaits them.
        mark: of the copy under way, if any.
        references: packed tensors that lie in it.
        waiting: counted in the window: not asked for yet.
    """

    __slots__ = ("_kept", "_source", "_version", "bytes", "device", "host", "mark", "place", "references", "waiting")

    def __init__(self, tensor: Tensor, place: int, meter: ActivationMeter | None) -> None:
        self.place = place
        self.bytes = tensor.untyped_storage().nbytes()
        self.device: Tensor | None = bytes_view(tensor)
        self.host: Tensor | None = None
        self.mark: Mark = None
        self.references = 0
        self.waiting = False
        self._source: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._kept: Kept | None = None if meter is None else meter.hold(tensor)

    def same(self, tensor: Tensor) -> bool:
        """``tensor``, which lies in this storage, has the values that were saved."""
        return tensor._version == self._version

    def check(self) -> None:
        """Refuse what was changed in place after it was saved and before it was copied."""
        if self._source is not None:
            check_version(self._source, self._version)

    def arrive(self, device: Tensor, mark: Mark, meter: ActivationMeter | None) -> None:
        self.device, self.mark = device, mark
        self._kept = None if meter is None else meter.hold(device)

    def leave(self) -> None:
        """Forget what lies on the device."""
        self.device = self._source = self._kept = None
