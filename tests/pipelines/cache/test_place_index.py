"""Places of tiles in arrays: what a dictionary would say, in a tenth of its bytes."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.cache import tile_kind
from pipelines.cache.tile_kind import PlaceIndex


@pytest.mark.parametrize("alike", [False, True], ids=["keys", "equal keys"])
def test_it_says_what_a_dictionary_says(alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if alike:
        monkeypatch.setattr(tile_kind, "FACTORS", np.zeros(4, np.uint64))
    index, expected = PlaceIndex(), {}
    rng = np.random.default_rng(0)
    for shard in range(60):
        places = rng.integers(-3, 3, (8, 4))
        places[6:] = 0  # empty slots
        index.add(places, shard)
        expected |= {tuple(row): (shard, slot) for slot, row in enumerate(places.tolist()) if any(row)}
    for place, there in expected.items():
        assert index.find(place) == there
    assert index.find((9, 9, 9, 9)) is None
    place, there = next(iter(expected.items()))
    index.drop(place, (there[0], 7))
    assert index.find(place) == there, "it lies elsewhere"
    index.drop(place, there)
    assert index.find(place) != there


def test_a_tile_takes_48_bytes_and_few_blocks() -> None:
    index, tiles, shards = PlaceIndex(), 512, 100
    for shard in range(shards):
        index.add(np.arange(1, 4 * tiles + 1).reshape(tiles, 4) + shard * 4 * tiles, shard)
    held = sum(array.nbytes for block in index._blocks for array in (block.keys, block.places, block.at))
    assert held == 48 * tiles * shards
    assert len(index._blocks) <= 7
