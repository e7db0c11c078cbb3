"""Who hands what of a map to whom: pieces without gaps, the same to both ends; a convolution taken apart is whole."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from parallel.space.cuts import Span
from parallel.space.rule import SAME, AdaptivePool, Mirrored, Resample, Rule, Transposed, Window
from parallel.space.spatial_plan import borders
from parallel.space.team import Exchange, SpatialMesh, TeamGrid, overlap, team_cuts

Px = tuple[int, int]


def random_rule(draw: random.Random, side: int) -> Rule:
    pads = draw.randint(0, 4), draw.randint(0, 4)
    kernel, stride, dilation = draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 3)
    window = Window(kernel, stride, dilation, *pads)
    others: list[Rule] = [
        SAME,
        Transposed(kernel, stride, dilation),
        Resample(draw.randint(1, 3 * side), None, draw.choice(["linear", "corners", "nearest"])),
        Mirrored(*pads, "reflect"),
        AdaptivePool(draw.randint(1, side)),
    ]
    return draw.choice([window if window.out(side) > 0 else SAME, *others])


def random_mesh(draw: random.Random) -> SpatialMesh:
    mesh = SpatialMesh(TeamGrid(draw.randint(1, 4), draw.randint(1, 3)), (draw.randint(5, 40), draw.randint(5, 40)))
    cuts = [
        (0, *sorted(draw.randint(0, side) for _ in range(parts - 1)), side)
        for side, parts in zip(mesh.side, (mesh.grid.rows, mesh.grid.columns), strict=True)
    ]
    mesh.__dict__["cuts"] = (cuts[0], cuts[1])
    return mesh


def px_of(box: tuple[Span, Span]) -> set[Px]:
    return {(row, column) for row in range(*box[0]) for column in range(*box[1])}


def faults(exchange: Exchange, sides: Px) -> list[str]:
    """What of the rules of an exchange does not hold."""
    found = []
    whole = px_of((Span(0, sides[0]), Span(0, sides[1])))
    members = range(len(exchange.owned))
    if Counter(px for box in exchange.owned for px in px_of(box)) != Counter(whole):
        found.append("parts do not partition the map")
    for member in members:
        given = Counter(px for piece in exchange.pieces[member] for px in px_of(piece.box))
        if given != Counter(px_of(exchange.needs[member]) & whole):
            found.append(f"pieces of {member} are not what it needs of the map")
        for owner, box in exchange.pieces[member]:
            if not px_of(box) or not px_of(box) <= px_of(exchange.owned[owner]):
                found.append(f"{member} is to get of {owner} what that has not")
        for other in members:
            sent = [box for target, box in exchange.sends[other] if target == member]
            if sent != [piece.box for piece in exchange.recvs[member] if piece.owner == other]:
                found.append(f"{other} sends {member} other than it expects, or in another order")
    if exchange.px != sum(len(px_of(box)) for member in members for _, box in exchange.sends[member]):
        found.append("the px on paper are not those sent")
    return found


def test_pieces_partition_what_each_member_needs() -> None:
    draw = random.Random(17)
    beyond_neighbours = 0
    for _ in range(120):
        mesh = random_mesh(draw)
        taken = draw.randint(4, 18), draw.randint(4, 12)
        rules = random_rule(draw, taken[0]), random_rule(draw, taken[1])
        exchange = mesh.exchange(rules, (rules[0].out(taken[0]), rules[1].out(taken[1])), taken)
        assert not faults(exchange, taken), (mesh, rules, taken)
        assert exchange.is_local == (exchange.px == 0)
        columns = mesh.grid.columns
        beyond_neighbours += any(
            abs(piece.owner // columns - member // columns) > 1
            for member, pieces in enumerate(exchange.pieces)
            for piece in pieces
        )
        assert not faults(mesh.gathered(taken), taken)
    assert beyond_neighbours > 10


def test_what_a_member_needs_comes_from_corners_too() -> None:
    exchange = SpatialMesh(TeamGrid(3, 3), (30, 30)).exchange((Window(3, 1, 1, 1, 1),) * 2, (30, 30), (30, 30))
    sizes = {piece.owner: len(px_of(piece.box)) for piece in exchange.recvs[4]}
    assert sizes == {0: 1, 1: 10, 2: 1, 3: 10, 5: 10, 6: 1, 7: 10, 8: 1}
    assert [piece.owner for piece in exchange.recvs[0]] == [1, 3, 4]


def test_a_halo_wider_than_a_part_comes_from_several_members() -> None:
    """Dilation 12 in parts of 8 rows: the second of five needs rows of the first, and of the two behind it."""
    rule = Window(3, 1, 12, 12, 12)
    exchange = SpatialMesh(TeamGrid(5, 1), (40, 6)).exchange((rule, SAME), (40, 6), (40, 6))
    assert exchange.needs[1][0] == Span(-4, 28)
    assert [(piece.owner, piece.box[0]) for piece in exchange.pieces[1]] == [
        (0, Span(0, 8)), (1, Span(8, 16)), (2, Span(16, 24)), (3, Span(24, 28)),
    ]  # fmt: skip


def test_cuts_boxes_and_grids() -> None:
    assert team_cuts(2048, 3) == (0, 672, 1376, 2048)  # where strides do
    assert team_cuts(61, 2) == (0, 30, 61)
    mesh = SpatialMesh(TeamGrid(4, 1), (64, 64))
    assert mesh.fault((4, 1)) is None
    assert mesh.fault((3, 64)) is not None  # every member has a part
    box = Span(2, 5), Span(0, 4)
    assert overlap(box, (Span(4, 9), Span(1, 2))) == (Span(4, 5), Span(1, 2))
    assert overlap(box, (Span(5, 9), Span(1, 2))) is None  # they only touch
    gathered = SpatialMesh(TeamGrid(2, 2), (11, 9)).gathered((7, 5))
    assert len(px_of(gathered.boxes[0])) == 35
    assert not any(gathered.recvs[member] for member in (1, 2, 3))
    assert gathered.sends[0] == ()
    assert (str(TeamGrid.parse("10x3")), TeamGrid.parse("10x3").members) == ("10x3", 30)
    for text in ("2", "0x2", "2x", "2 x 2", "-1x2", "2x2x2", ""):
        with pytest.raises(ValueError, match="ROWSxCOLUMNS"):
            TeamGrid.parse(text)


def seen(rules: tuple[Window, Window], row: int, column: int) -> set[tuple[int, int]]:
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
        mesh = SpatialMesh(draw.choice([TeamGrid(2, 1), TeamGrid(1, 2), TeamGrid(2, 2)]), taken)
        if min(made) < 2 or mesh.fault(made):
            continue
        exchange = mesh.exchange(rules, made, taken)
        for member, have in enumerate(exchange.boxes):
            output = mesh.owned(member, made)
            split = borders(rules, output, have, exchange.owned[member], taken)
            if split is None:
                whole += 1
                continue
            apart += 1
            base, rims = px_of(split.base), [px_of(rim.made) for rim in split.strips]
            halos = [px_of(halo.box) for halo in split.halos]
            assert sum(map(len, [base, *halos])) == len(px_of(have)) == len(base.union(*halos))
            assert sum(map(len, rims)) == len(set().union(*rims))
            for row, column in px_of(output):
                taps = px_of((Span(0, taken[0]), Span(0, taken[1]))) & seen(rules, row, column)
                if not taps <= base:
                    assert any((row, column) in rim for rim in rims)
                for halo, at in zip(split.halos, halos, strict=True):
                    assert not taps & at or (row, column) in px_of(halo.made)
    assert apart > 20
    assert whole > 5
