"""A convolution taken apart: what its own part gives, rims, and halos are all of it, once each."""

from __future__ import annotations

import itertools
import random

import pytest

from parallel.space.borders import borders
from parallel.space.grid import Span
from parallel.space.rule import Window
from parallel.space.team import Box, Grid, SpatialMesh


def cells(box: Box) -> set[tuple[int, int]]:
    return set(itertools.product(range(*box[0]), range(*box[1])))


def seen(rules: tuple[Window, Window], row: int, column: int) -> set[tuple[int, int]]:
    """What a number of the output is made of."""
    rows, columns = (
        range(first := number * rule.stride - rule.before, first + rule.reach, rule.dilation)
        for number, rule in zip((row, column), rules, strict=True)
    )
    return set(itertools.product(rows, columns))


def window(draw: random.Random) -> Window:
    kernel, dilation = draw.choice([1, 2, 3, 3, 5, 7]), draw.choice([1, 1, 2, 3])
    return Window(kernel, draw.choice([1, 1, 2, 3]), dilation, pad := draw.choice([0, 1, 2, 3]), pad)


@pytest.mark.parametrize("seed", range(2))
def test_every_number_is_made_of_its_part_or_in_a_rim(seed: int) -> None:
    draw = random.Random(seed)
    apart, whole = 0, 0
    for _ in range(60):
        rules, taken = (window(draw), window(draw)), (draw.randrange(20, 50), draw.randrange(20, 50))
        made = rules[0].out(taken[0]), rules[1].out(taken[1])
        mesh = SpatialMesh(draw.choice([Grid(2, 1), Grid(1, 2), Grid(2, 2)]), taken)
        if min(made) < 2 or not mesh.fits(made):
            continue
        exchange = mesh.exchange(rules, made, taken)
        for member, have in enumerate(exchange.boxes):
            output = mesh.owned(member, made)
            split = borders(rules, output, have, exchange.owned[member], taken)
            if split is None:
                whole += 1
                continue
            apart += 1
            base, rims = cells(split.base), [cells(rim.made) for rim in split.strips]
            halos = [cells(halo.box) for halo in split.halos]
            assert sum(map(len, [base, *halos])) == len(cells(have)) == len(base.union(*halos))
            assert sum(map(len, rims)) == len(set().union(*rims))
            for row, column in cells(output):
                taps = cells((Span(0, taken[0]), Span(0, taken[1]))) & seen(rules, row, column)
                if not taps <= base:
                    assert any((row, column) in rim for rim in rims)
                for halo, at in zip(split.halos, halos, strict=True):
                    assert not taps & at or (row, column) in cells(halo.made)
    assert apart > 20
    assert whole > 5
