"""Places of tiles in arrays: what a dictionary would say, in a tenth of its bytes."""

import tracemalloc

import numpy as np
import pytest

from pipelines.cache import shards as shards_module
from pipelines.cache.shards import PlaceIndex


@pytest.mark.parametrize("alike", [False, True], ids=["keys", "equal keys"])
def test_places_are_found_as_in_a_dictionary(alike, monkeypatch):
    if alike:
        monkeypatch.setattr(shards_module, "FACTORS", np.zeros(4, np.uint64))
    index, expected, rng = PlaceIndex(), {}, np.random.default_rng(0)
    for shard in range(60):
        places = rng.integers(-3, 3, (8, 4))
        places[6:] = 0  # empty slots
        index.add(places, shard)
        expected |= {tuple(row): (shard, slot) for slot, row in enumerate(places.tolist()) if any(row)}
    assert {place: index.find(place) for place in expected} == expected
    assert index.find((9, 9, 9, 9)) is None
    place, there = next(iter(expected.items()))
    index.drop(place, (there[0], 7))
    assert index.find(place) == there, "it lies elsewhere"
    index.drop(place, there)
    assert index.find(place) != there


def test_the_places_of_tiles_take_48_bytes_each():
    tiles, shards = 512, 100
    places = [np.arange(1, 4 * tiles + 1).reshape(tiles, 4) + shard * 4 * tiles for shard in range(shards)]
    tracemalloc.start()
    index = PlaceIndex()
    for shard, of_shard in enumerate(places):
        index.add(of_shard, shard)
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert index.find(tuple(places[7][3].tolist())) == (7, 3)
    assert held_bytes < 1.05 * 48 * tiles * shards
