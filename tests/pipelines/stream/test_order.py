"""Orders: every row once, few slides at a time, classes equally often; weights; the same for the same seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.stream.order import (
    IN_TURN,
    Bags,
    Balance,
    IndexOrder,
    SlideShuffle,
    Weighted,
    pixel_weights,
    slide_weights,
)

slides_of_tiles = st.lists(st.integers(0, 6), min_size=1, max_size=60).map(lambda s: np.array(s, np.int32))


def shuffle(slide, open_slides=3, seed=0):
    return SlideShuffle(np.arange(len(slide)), slide, seed, 0, open_slides)


@given(slides_of_tiles, st.integers(1, 8), st.integers(0, 3))
def test_shuffle_gives_every_row_once_and_mixes_at_most_open_slides_at_a_time(slide, open_slides, epoch):
    order = shuffle(slide, open_slides).epoch(epoch)
    assert sorted(order) == list(range(len(slide)))
    drawn = slide[order]
    spans = [(np.flatnonzero(drawn == k)[0], np.flatnonzero(drawn == k)[-1]) for k in np.unique(drawn)]
    assert max(sum(first <= t <= last for first, last in spans) for t in range(len(drawn))) <= open_slides


def test_shuffle_draws_a_new_order_for_each_epoch_and_seed():
    slide = np.repeat(np.arange(8, dtype=np.int32), 20)
    epochs = [tuple(shuffle(slide, seed=s).epoch(e)) for s in range(2) for e in range(3)]
    assert len(set(epochs)) == 6
    assert tuple(shuffle(slide).epoch(2)) == epochs[2]


def test_no_epoch_ends_on_a_lone_slide():
    slide = np.repeat(np.arange(7, dtype=np.int32), 50)
    assert len(np.unique(slide[shuffle(slide, 6).epoch(0)][-150:])) == 3  # 7 slides in groups of 4 and 3, not 6 and 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 5))
def test_balance_draws_each_stratum_equally_often(sizes, epoch):
    stratum = np.repeat(np.arange(len(sizes)), sizes)
    order = Balance(tuple(IndexOrder(np.flatnonzero(stratum == k)) for k in range(len(sizes))), seed=1)
    drawn = stratum[order.epoch(epoch)]
    assert order.length == len(drawn) >= len(stratum)
    assert len(set(np.bincount(drawn, minlength=len(sizes)))) == 1
    rounds = drawn.reshape(-1, len(sizes))
    assert (np.sort(rounds, axis=1) == np.arange(len(sizes))).all()


def test_balance_sees_all_rows_of_a_stratum_equally_often_over_epochs():
    slide = np.zeros(3, np.int32)
    small = SlideShuffle(np.arange(3), slide, 0, 0, 1)
    large = SlideShuffle(np.arange(3, 24), np.repeat(np.arange(7, dtype=np.int32), 3), 0, 1, 2)
    order = Balance((small, large), seed=0)
    seen = np.bincount(np.concatenate([order.epoch(e) for e in range(7)]), minlength=24)
    assert order.length == 24
    assert (seen[:3] == 7 * 12 // 3).all()
    assert (seen[3:] == 7 * 12 // 21).all()


@pytest.mark.parametrize("classes", [2, 3])
def test_strided_shares_of_a_balanced_order_see_all_classes(classes):
    """A plain 0, 1, 0, 1, ... would give each of two ranks with every second row one class only."""
    stratum = np.arange(40 * classes) % classes
    order = Balance(tuple(IndexOrder(np.flatnonzero(stratum == k)) for k in range(classes)), seed=0)
    for rank in range(classes):
        assert len(np.unique(stratum[order.epoch(0)[rank::classes]])) == classes


@given(
    slides_of_tiles,
    st.lists(st.sampled_from([0.0, 1e-9, 0.1, 1.0, 7.3]), min_size=60, max_size=60),
    st.integers(0, 40),
    st.integers(0, 3),
)
def test_weighted_draws_each_row_and_slide_as_its_weight_says(slide, weights, epoch, seed):
    weight = np.array(weights[: len(slide)])
    if not weight.sum():
        weight[0] = 1.0
    order = Weighted(np.arange(len(slide)), slide, weight, seed, 3)
    drawn = order.epoch(epoch)
    assert len(drawn) == order.length == len(slide)
    wanted = weight / weight.sum() * len(slide)
    counts = np.bincount(drawn, minlength=len(slide))
    assert (np.abs(counts - wanted) < 1 + 1e-6).all()
    assert not counts[weight == 0].any()
    of_slide = np.bincount(slide[drawn], minlength=7)
    assert (np.abs(of_slide - np.bincount(slide, wanted, minlength=7)) < 1 + 1e-6).all()
    assert (order.epoch(epoch) == drawn).all()


def test_weighted_leaves_nothing_out_for_long():
    slide = np.repeat(np.arange(2, dtype=np.int32), [10, 190])
    order = Weighted(np.arange(200), slide, np.where(slide == 0, 1 / 10, 1 / 190), 5, 2)
    counts = np.stack([np.bincount(order.epoch(e), minlength=200) for e in range(40)])
    # the large slide's tiles are drawn every other epoch or so: none waits for more than three times that
    assert counts[:, slide == 1].sum(0).min() >= 19
    assert all(counts[k : k + 6].sum(0).min() >= 1 for k in range(34))
    assert len({tuple(order.epoch(e)) for e in range(5)}) == 5


@given(slides_of_tiles, st.integers(1, 9))
def test_bags_have_tiles_of_one_slide_and_see_all_of_them_equally_often_over_epochs(slide, size):
    order = Bags(np.arange(len(slide)), slide, size, 0)
    epochs = [order.epoch(epoch) for epoch in range(12)]
    for drawn in epochs[:4]:
        bags = slide[drawn].reshape(-1, size)
        assert (bags == bags[:, :1]).all()
        assert sorted(bags[:, 0]) == np.unique(slide).tolist()
        assert order.length == bags.size
    counts = np.bincount(np.concatenate(epochs), minlength=len(slide))
    for number in np.unique(slide):
        assert np.ptp(counts[slide == number]) <= 1


def test_slides_weigh_alike():
    slide = np.array([0, 0, 0, 2, 5, 5])  # numbers of slides without a tile are left out
    weights = slide_weights(slide)
    assert weights.sum() == pytest.approx(1)
    assert np.bincount(slide, weights)[[0, 2, 5]] == pytest.approx([1 / 3] * 3)
    assert weights[:3] == pytest.approx([1 / 9] * 3)


def shown(areas):
    """Share of each class of the px that are shown."""
    px = pixel_weights(areas) @ areas
    return px / px.sum()


def test_rare_classes_are_shown_as_much_as_common_ones_where_tiles_allow():
    rng = np.random.default_rng(0)
    tumour, stroma = 4096 * (rng.random(500) < 0.03), 4096 * (rng.random(500) < 0.2)
    stroma = np.where(tumour > 0, 0, stroma)
    areas = np.stack([4096 - tumour - stroma, stroma, tumour], 1)
    assert areas.sum(0)[2] < 0.1 * areas.sum(0)[0]
    assert shown(areas) == pytest.approx([1 / 3] * 3, abs=1e-6)
    mixed = np.stack([4096 - 3000 * (tumour > 0), 3000 * (tumour > 0)], 1)
    assert shown(mixed) == pytest.approx([1 / 2] * 2, abs=1e-4)


def test_a_class_that_is_never_large_is_shown_as_much_as_can_be_and_the_rest_is_still_seen():
    areas = np.array([[4096, 0]] * 90 + [[3686, 410]] * 10)
    weights = pixel_weights(areas)
    assert (weights > 0).all()
    assert weights[90:].sum() == pytest.approx(1 - IN_TURN / 2 + IN_TURN / 2 * 10 * 3686 / areas[:, 0].sum(), abs=1e-3)
    assert shown(areas)[1] > 7 * areas[:, 1].sum() / areas.sum()


def test_what_is_ignored_is_not_drawn():
    areas = np.array([[10, 0, 0], [0, 0, 10], [0, 0, 0]])
    assert pixel_weights(areas).tolist() == pytest.approx([0.5, 0.5, 0])
    with pytest.raises(ValueError, match="nothing on any of them"):
        pixel_weights(np.zeros((3, 2), np.int64))
