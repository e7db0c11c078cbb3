import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.microbatch import microbatch_seed, share_of, split_batch


@given(batch=st.integers(1, 200), m=st.integers(1, 200))
def test_every_tile_is_in_one_microbatch_and_sizes_differ_by_at_most_one(batch: int, m: int) -> None:
    if m > batch:
        with pytest.raises(ValueError, match="raise --batch or lower --microbatches"):
            split_batch(batch, m)
        return
    parts = split_batch(batch, m)
    assert [tile for part in parts for tile in part] == list(range(batch))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(world=st.integers(1, 16), m=st.integers(1, 64))
def test_every_microbatch_has_one_rank(world: int, m: int) -> None:
    if m < world:
        with pytest.raises(ValueError, match="cannot keep"):
            share_of(0, world, m)
        return
    assert [i for rank in range(world) for i in share_of(rank, world, m)] == list(range(m))


def test_seeds_differ_by_seed_step_and_microbatch() -> None:
    seeds = {microbatch_seed(seed, step, i) for seed in range(5) for step in range(5) for i in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert microbatch_seed(1, 2, 3) == microbatch_seed(1, 2, 3)
