"""Maps of a simulated GPU that lie on the host in strips hold what plain maps hold, and no copy races with another."""

from __future__ import annotations

import pytest
import torch

from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from parallel.space.grid import Span
from parallel.streaming.maps import Maps
from parallel.streaming.patch import Box
from parallel.streaming.strip_maps import StripMaps
from tests.helpers.sim_gpu import simulated

SHAPE, NAME = (2, 3, 12, 16), "map"
FORMS = {NAME: SHAPE}, {NAME: (2, 3)}
CELLS = [(Span(r, r + 4), Span(c, c + 8)) for r in (0, 4, 8) for c in (0, 8)]
RIMS: list[Box] = [
    (Span(max(0, r.start - 1), min(12, r.stop + 1)), Span(max(0, c.start - 1), min(16, c.stop + 1))) for r, c in CELLS
]
CUTS = {NAME: {0, 7, 8, 9, 16}}
UNEVEN: list[Box] = [(Span(6, 9), Span(3, 12)), (Span(0, 2), Span(5, 6)), (Span(11, 12), Span(0, 16))]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("late", [None, 0])
def test_boxes_are_those_of_plain_maps(layout: torch.memory_format, late: int | None) -> None:
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    plain, sums = (Maps(*FORMS, cpu, HostMemory()) for _ in range(2))
    with simulated(1, late=late) as gpus:
        gpu = torch.device("cuda", 0)
        host = HostMemory(Copies.for_device(gpu))
        ours, our_sums = (StripMaps(*FORMS, gpu, host, cuts=CUTS) for _ in range(2))

        def numbers(box: Box) -> torch.Tensor:
            values = torch.randn(2, 3, box[0].size, box[1].size, generator=generator)
            return values.contiguous(memory_format=layout)

        for cells in (CELLS, UNEVEN):
            for box in cells:
                value = numbers(box)
                plain.write(NAME, box, value)
                ours.write(NAME, box, value.to(gpu))
            for box in (*RIMS, *UNEVEN):
                value = numbers(box)
                sums.add(NAME, box, value)
                our_sums.add(NAME, box, value.to(gpu))
            for expected, maps in ((plain, ours), (sums, our_sums)):
                for box, following in zip(RIMS, [*RIMS[1:], UNEVEN[0]], strict=True):
                    maps.begin(NAME, following)
                    ours_there = maps.fetch(NAME, box).cpu()
                    there = expected.fetch(NAME, box)
                    assert torch.equal(ours_there, there)
                    assert ours_there.is_contiguous(memory_format=layout)
        our_sums.take(NAME)
        our_sums.add(NAME, UNEVEN[0], numbers(UNEVEN[0]).to(gpu))
        assert our_sums.fetch(NAME, UNEVEN[1]).count_nonzero() == 0, "rows that nobody wrote are zeros"
        assert gpus.found == []
