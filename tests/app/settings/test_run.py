from __future__ import annotations

import itertools
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from app.settings.fields import flags_of
from app.settings.optimization import OptimizerSettings
from app.settings.run import (
    DataSettings,
    RunConfig,
    ScoreSettings,
    SplitSettings,
    StrategySettings,
    StreamSettings,
)

CONFIG = RunConfig(DataSettings(Path("slides")))


def test_defaults_are_valid() -> None:
    assert CONFIG.validate() == []


def test_every_flag_has_its_own_name_and_help() -> None:
    names = [flag.name for flag in flags_of(RunConfig)]
    assert len(names) == len(set(names))

    def undocumented(config_type: type) -> list[str]:
        import ast
        import inspect

        body = ast.parse(inspect.getsource(config_type)).body[0].body  #
        documented = {
            a.target.id  #
            for a, b in itertools.pairwise(body)
            if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)
        }
        return [
            f.name
            for f in fields(config_type)
            if f.name not in documented and not is_dataclass(getattr(CONFIG, f.name, 0))
        ]

    parts = [
        RunConfig,
        *(type(getattr(CONFIG, f.name)) for f in fields(CONFIG) if is_dataclass(getattr(CONFIG, f.name))),
    ]
    assert {part.__name__: undocumented(part) for part in parts if undocumented(part)} == {}


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        (replace(CONFIG, steps=0), ["--steps must be at least 1; got 0"]),
        (
            replace(CONFIG, steps=3, epochs=2.0),
            ["give --steps or --epochs, not both; got 3 and 2; remove the one that --config gives"],
        ),
        (replace(CONFIG, epochs=0.0), ["--epochs must be above 0"]),
        (replace(CONFIG, strategy=StrategySettings("ddp", ranks=4, batch=2)), ["every rank needs a microbatch"]),
        (replace(CONFIG, strategy=StrategySettings(parallel="single", ranks=2)), ["uses one process; got 2 ranks"]),
        (replace(CONFIG, stream=StreamSettings(read_ahead="lots")), ["512MiB or 2GiB; got 'lots'"]),
        (replace(CONFIG, stream=StreamSettings(read_ahead="xMiB")), ["got 'xMiB'"]),
        (
            replace(CONFIG, optimization=OptimizerSettings(lr=0, momentum=1)),
            ["--lr must be above 0", "--momentum"],
        ),
        (
            replace(CONFIG, optimization=OptimizerSettings(loss="focal", label_smoothing=0.1, focal_gamma=0.5)),
            ["--loss focal has another form", "--focal-gamma must be at least 1"],
        ),
        (replace(CONFIG, optimization=OptimizerSettings(label_smoothing=1)), ["--label-smoothing is a share"]),
        (replace(CONFIG, score=ScoreSettings(top_k=0)), ["--top-k must be at least 1; got 0"]),
        (
            replace(CONFIG, data=DataSettings(Path("s"), slide_mpp=1000), split=SplitSettings(0.6, 0.6)),
            ["--slide-mpp must be between 0.05 and 100 um/px; got 1000", "leave no slide to train on"],
        ),
    ],
)
def test_every_fault_is_named(config: RunConfig, messages: list[str]) -> None:
    found = "\n".join(config.validate())
    for message in messages:
        assert message in found


@pytest.mark.parametrize(("text", "size"), [("1GiB", 1 << 30), ("1.5MiB", 3 << 19), ("64KiB", 1 << 16)])
def test_sizes(text: str, size: int) -> None:
    assert StreamSettings(read_ahead=text).read_ahead_bytes == size
