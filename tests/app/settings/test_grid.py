"""What a user may ask for with ``--grid`` and not get: one message each, before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app import train
from app.settings.strategy import StrategySettings
from app.settings.strategy_errors import strategy_errors

SPATIAL: dict[str, Any] = {"parallel": "spatial", "ranks": 2, "grid": "2x1"}
TEAMS: dict[str, Any] = {"parallel": "1f1b", "ranks": 4, "grid": "2x1"}
UNREAD = "--grid: a grid is ROWSxCOLUMNS of members, as 2x1 or 2x2; got "


@pytest.mark.parametrize(
    "text", ["2", "x2", "0x2", "00x1", "2X1", "-1x2", "2x1x1", "2x1:3", "2 x 1", "２x1", "two by one"]
)
def test_other_texts_are_no_grids(text: str) -> None:
    assert strategy_errors(StrategySettings(**SPATIAL | {"grid": text})) == [f"{UNREAD}{text!r}"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (TEAMS | {"grid": "2x1,1x1"}, f"{UNREAD}'2x1,1x1'"),
        (TEAMS | {"schedule": Path(__file__)}, "--grid 2x1: a schedule file is of single ranks, not of teams"),
        ({"parallel": "spatial"}, "--parallel spatial divides each tile among 2 ranks or more; got --ranks 1"),
        (SPATIAL | {"grid": "1x1"}, "--grid 1x1 divides nothing: give a grid of 2 ranks or more, as 2x1"),
        (SPATIAL | {"ranks": 3, "grid": "2x2"}, "--grid 2x2 takes 4 ranks for a team, or a multiple; got 3: give"),
        (SPATIAL | {"ranks": 3}, "--grid 2x1 takes 2 ranks for a team, or a multiple; got 3: give --ranks 2, or"),
        (SPATIAL | {"ranks": 4, "batch": 1}, "each of 2 groups of 2 ranks needs a microbatch"),
        (SPATIAL | {"stages": 2}, "--stages 2 is about a model split into stages; --parallel spatial has one stage"),
        (SPATIAL | {"cuts": "fc"}, "--cuts=fc is about a model split into stages; --parallel spatial has"),
        (SPATIAL | {"parallel": "auto"}, "--grid is of a strategy that is named, as --parallel spatial; got"),
        (SPATIAL | {"parallel": "ddp"}, "of a team, which --parallel ddp does not have: use --parallel spatial, or"),
        (SPATIAL | {"parallel": "fsdp"}, "of a team, which --parallel fsdp does not have: use --parallel spatial, or"),
        (SPATIAL | {"parallel": "single", "ranks": 1}, "of a team, which --parallel single does not have"),
        (SPATIAL | {"compile": True}, "--grid 2x1: compiled stages cannot exchange parts of maps: leave c"),
        (SPATIAL | {"norm_statistics": "deferred"}, "--grid 2x1: deferred statistics are not of teams"),
        (SPATIAL | {"offload_state": "parameters"}, "--grid 2x1: parameters on the host are not of teams: use"),
        (
            SPATIAL | {"zero": 3},
            "--zero 3 divides a model that each rank computes whole: got --parallel spatial, use ddp",
        ),
        (TEAMS | {"grid": "2x2"}, "--parallel 1f1b splits the model over 2 teams or more; got --grid 2x2 and 4 ranks"),
        (TEAMS | {"stages": 3}, "--grid 2x1 takes 6 ranks for 3 teams, or a multiple; got 4: give --ranks 6, or"),
        (TEAMS | {"parallel": "zero-bubble"}, "--grid 2x1: zero-bubble splits the backward pass, which exchanges"),
        (TEAMS | {"stream": "auto"}, "--stream auto is planned for --parallel single, ddp and spatial; got"),
        (TEAMS | {"stream": "16", "recompute": "block"}, "--stream 16 computes a tile again box by box, and goes w"),
        (TEAMS | {"stream": "16", "offload": "overlap"}, "--stream 16 computes a tile again box by box, and goes w"),
    ],
)
def test_what_teams_cannot_do_is_one_fault_of_the_settings(asked: dict[str, Any], message: str) -> None:
    (fault,) = strategy_errors(StrategySettings(**asked))
    assert message in fault


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (SPATIAL, "spatial 1 x 1 of 2x1, m=1"),
        (SPATIAL | {"grid": "", "ranks": 3}, "spatial 1 x 1 of 3x1, m=1"),
        (SPATIAL | {"grid": "10x2", "ranks": 40}, "spatial 2 x 1 of 10x2, m=2"),
        (TEAMS, "1f1b 1 x 2 of 2x1, m=4"),
        (TEAMS | {"ranks": 8, "stages": 2}, "1f1b 2 x 2 of 2x1, m=8"),
        (TEAMS | {"parallel": "master", "grid": "2x1"}, "master 1 x 2 of 2x1, m=4"),
        (TEAMS | {"stream": "16"}, "1f1b 1 x 2 of 2x1, m=4 +stream 16"),
    ],
)
def test_what_teams_can_do_is_taken_as_it_is_asked_for(asked: dict[str, Any], shown: str) -> None:
    settings = StrategySettings(**asked)
    assert strategy_errors(settings) == []
    strategy = settings.to_strategy("cpu")
    assert (str(strategy), strategy.mesh.groups) == (shown, settings.groups)


def test_a_wrong_grid_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--slides", str(tmp_path), "--parallel", "spatial", "--ranks", "3", "--grid", "2x2"]
    assert train.main(words) == 2
    assert "error: --grid 2x2 takes 4 ranks for a team, or a multiple; got 3" in capsys.readouterr().err
