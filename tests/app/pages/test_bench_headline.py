"""What is said of a benchmark follows from its rows, and no more than that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.pages.bench_file import read_bench
from app.pages.bench_groups import RowGroup, groups
from app.pages.bench_headline import data_parallel_limits, lead, sentence, verdict
from tests.helpers.bench_folder import GIB, row, unfit, write_bench, write_rows


def found(folder: Path, *rows: dict[str, Any]) -> list[RowGroup]:
    return groups(read_bench(write_rows(folder, list(rows))).results)


def speed(strategy: str, low: float, middle: float, high: float, **changed: Any) -> dict[str, Any]:
    spread = {"images_per_second_range": [low, high], "images_per_second_repeats": [low, middle, high]}
    return row(strategy, images_per_second=middle, **spread, **changed)


DDP = speed("ddp", 1.9, 2.0, 2.1)


@pytest.mark.parametrize(
    ("rows", "kind", "words"),
    [
        ((DDP, speed("1f1b", 2.2, 2.4, 2.5)), "faster", "1f1b is the fastest: 2.4 images/s (2.2 to 2.5), 1.2 × ddp"),
        ((DDP, speed("1f1b", 2.0, 2.2, 2.5)), "level", "1.1 × ddp with 2 images/s (1.9 to 2.1); their ranges overlap"),
        ((DDP, speed("1f1b", 1.0, 1.5, 1.6)), "slower", "ddp is the fastest: 2 images/s (1.9 to 2.1); next is 1f1b"),
        ((DDP, row("1f1b", images_per_second=9.0, images_per_second_range=None)), "level", "without repeats"),
        ((DDP, unfit("1f1b")), "baseline", "no other strategy ran"),
        ((unfit("ddp"), speed("1f1b", 1, 1, 1)), "only", "ddp does not fit in 3 GiB a rank; 1f1b is the fastest that"),
        ((unfit("ddp"), unfit("fsdp")), "none", "ddp, fsdp do not fit in 3 GiB a rank; nothing ran"),
        ((speed("1f1b", 1, 1, 1), speed("gpipe", 2, 2, 2)), "unheld", "gpipe is the fastest that ran, 2 images/s"),
        ((DDP, speed("1f1b", 8, 9, 9, loss_matches=False)), "baseline", "no other strategy ran"),
    ],
)
def test_a_group_is_told_as_it_is(tmp_path: Path, rows: tuple[dict[str, Any], ...], kind: str, words: str) -> None:
    (group,) = found(tmp_path, *rows)
    assert verdict(group)[0] == kind
    assert words in sentence(group, 3 * GIB)


def test_the_lead_counts_the_groups(tmp_path: Path) -> None:
    fast, slow, level = speed("1f1b", 3, 3, 3), speed("1f1b", 1, 1, 1), speed("1f1b", 2, 2, 2)
    told = lead(
        found(
            tmp_path,
            *(
                change
                for tile, one in ((256, fast), (512, fast), (768, slow), (1024, level))
                for change in (DDP | {"tile_px": tile}, one | {"tile_px": tile})
            ),
            *(unfit("ddp", tile_px=2048), speed("1f1b", 1, 1, 1, tile_px=2048)),
            *(unfit("ddp", tile_px=4096), unfit("1f1b", tile_px=4096)),
        )
    )
    assert told == (
        "Of 4 comparisons with the data-parallel baseline, another strategy was faster in 2, slower in 1, and not to "
        "be told apart in 1. In 1 more case, the data-parallel baseline did not fit the memory and another strategy "
        "did. In 1, nothing ran."
    )


def test_the_lead_says_what_is_missing(tmp_path: Path) -> None:
    assert lead(found(tmp_path, DDP)) == "Only the data-parallel baseline was measured, and nothing beside it."
    assert lead(found(tmp_path, speed("1f1b", 1, 1, 1))).startswith("No data-parallel baseline was measured")


def test_limits_are_told_by_ranks(tmp_path: Path) -> None:
    rows = [
        *(row(strategy, tile_px=512) for strategy in ("ddp", "fsdp", "ddp + recompute")),
        *(unfit(strategy, tile_px=1024) for strategy in ("ddp", "fsdp")),
        *(row("ddp + recompute", tile_px=1024), unfit("ddp + recompute", tile_px=2048)),
        *(unfit("ddp", tile_px=512, ranks=4), row("1f1b", tile_px=512, ranks=4)),
    ]
    assert list(data_parallel_limits(found(tmp_path, *rows))) == [
        "Of the tiles tried, on 2 ranks: ddp and fsdp fit up to 512 px, ddp + recompute fits up to 1024 px.",
        "Of the tiles tried, on 4 ranks: ddp fits none.",
    ]


def test_ratios_said_are_those_of_the_rows(tmp_path: Path) -> None:
    """Every sentence of a large benchmark, against the file itself."""
    folder = write_bench(tmp_path)
    rows = json.loads((folder / "bench.json").read_text())["rows"]
    for group in groups(read_bench(folder).results):
        kind, best = verdict(group)
        own = [
            one
            for one in rows
            if (one["model"], one["tile_px"], one["ranks"]) == (group.model, group.tile_px, group.ranks)
            and one["status"] == "ok"
        ]
        if best is None:
            assert kind in ("none", "baseline")
            assert len(own) == (kind == "baseline")
            continue
        others = [one for one in own if one["strategy"] not in ("ddp", "single")]
        assert best.speed == max(one["images_per_second"] for one in others)
        base = [one for one in own if one["strategy"] in ("ddp", "single")]
        assert bool(base) == (kind in ("faster", "slower", "level"))
        if base:
            ratio = best.speed / base[0]["images_per_second"]
            assert f"{ratio:.3g} × " in sentence(group, None)
