"""``app.bench``: cases, rows, claims, and what single runs come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app import bench
from app.benchmark import trial as trials
from app.benchmark.case import Case, StrategySpec, cases_of
from app.benchmark.command import BenchCommand
from app.benchmark.row import compare, row_of
from app.benchmark.trial import Trial, run_trial
from app.settings.run import DataSettings
from parallel.space.team import Grid


def case(label: str, ranks: int = 2, **more: Any) -> Case:
    asked = StrategySpec.parse(label)
    return Case(asked.name, asked.savings, ranks, 256, 4, 4, grid=str(asked.grid or ""), **more)


def trial(speed: float, loss: float = 0.5, **more: Any) -> Trial:
    summary = {
        "images_per_second": speed,
        "images_per_second_no_data": speed,
        "pixels_per_second": speed * 256**2,
        "data_wait_fraction": 0.1,
        "global_batch": 4,
        "precision": "fp32",
        "strategy": "ddp",
        "peak_memory_bytes": [5, 6],
        **more,
    }
    return Trial("ok", "", summary, (loss, 0.1), 3.0)


def rows(**found: list[Trial]) -> dict[str, dict[str, Any]]:
    """By strategy, dots for plus signs."""
    made = [row_of(case(name.replace("_", "+")), "m", trials, None) for name, trials in found.items()]
    compare(made)
    return {row["strategy"]: row for row in made}


def test_strategies_are_named_with_what_they_save() -> None:
    assert StrategySpec.parse("master+offload+recompute") == ("master", ("recompute", "offload"), None)
    assert case("ddp+recompute").label == "ddp + recompute"
    with pytest.raises(ValueError, match=r"knows auto, single.*got 'dpp'"):
        StrategySpec.parse("dpp")
    with pytest.raises(ValueError, match="recompute or offload; got 'speed'"):
        StrategySpec.parse("ddp+speed")


def test_teams_are_named_with_their_grid() -> None:
    assert StrategySpec.parse("1f1b@4x1+recompute") == ("1f1b", ("recompute",), Grid(4, 1))
    assert case("spatial@02x1+recompute").label == "spatial of 2x1 + recompute"
    assert [case(text, 4).team for text in ("spatial", "1f1b@2x1", "ddp")] == ["4x1", "2x1", ""]
    assert [case(text, 4).refusal for text in ("spatial", "1f1b@2x1")] == ["", ""]


def test_teams_run_on_the_ranks_that_they_divide() -> None:
    texts = ["spatial", "spatial@2x2", "1f1b@2x1", "auto", "single"]
    runs = {text: [n for n in range(1, 11) if StrategySpec.parse(text).runs_on(n)] for text in texts}
    assert runs == {
        "spatial": list(range(2, 11)),
        "spatial@2x2": [4, 8],
        "1f1b@2x1": [4, 6, 8, 10],
        "auto": list(range(1, 11)),
        "single": [1],
    }
    assert StrategySpec.parse("1f1b@2x1").depths(8, (2, 3, 4)) == [2, None]
    assert StrategySpec.parse("spatial@2x1").depths(8, (2, 4)) == [None]
    asked = (["ddp", "spatial", "spatial@2x1", "1f1b@2x1", "1f1b"], [256], [2, 4, 8], [2])
    found = list(cases_of(*asked, batch=8, microbatches=8, scaling="strong", memory=None))
    assert all(one.refusal == "" for one in found)
    assert [(one.ranks, one.label) for one in found] == [
        *((2, label) for label in ("ddp", "spatial", "spatial of 2x1", "1f1b")),
        *((4, label) for label in ("ddp", "spatial", "spatial of 2x1", "1f1b of 2x1", "1f1b 2 x 2")),
        *((8, label) for label in ("ddp", "spatial", "spatial of 2x1", "1f1b 2 x 2 of 2x1", "1f1b 4 x 2")),
    ]
    hybrid = found[-2]
    assert hybrid.name == "256px_8x_1f1b2x2of2x1"
    assert [hybrid.arguments[hybrid.arguments.index(flag) + 1] for flag in ("--stages", "--grid")] == ["2", "2x1"]
    assert (hybrid.settings.groups, hybrid.settings.depth, hybrid.settings.group_ranks) == (2, 2, 4)
    assert "--grid" not in found[1].arguments


def test_rows_of_teams_name_the_grid() -> None:
    found = rows(ddp=[trial(1.0)], spatial=[trial(2.0)])
    assert [(row["grid"], row["chosen"], row["stages"]) for row in found.values()] == [
        (None, None, None),
        ("2x1", "2x1", None),
    ]
    row = row_of(case("1f1b@2x1", 4), "m", [trial(1.0)], None)
    assert (row["strategy"], row["grid"], row["chosen"], row["stages"]) == ("1f1b of 2x1", "2x1", None, 2)


def test_one_rank_runs_single_and_several_run_the_rest() -> None:
    found = list(
        cases_of(
            ["single", "ddp", "gpipe+recompute"],
            [256, 512],
            [1, 2],
            batch=4,
            microbatches=2,
            scaling="weak",
            memory=None,
        )
    )
    assert [one.name for one in found] == [
        "256px_1x_single",
        "256px_2x_ddp",
        "256px_2x_gpipe+recompute",
        "512px_1x_single",
        "512px_2x_ddp",
        "512px_2x_gpipe+recompute",
    ]
    assert [(one.batch, one.microbatches) for one in found[:3]] == [(4, 2), (8, 4), (8, 4)]
    arguments = found[2].arguments
    assert arguments[arguments.index("--recompute") + 1] == "block"


def test_stages_that_are_a_part_of_the_ranks_make_groups() -> None:
    found = list(
        cases_of(
            ["ddp", "gpipe+recompute", "auto", "single"],
            [256],
            [1, 2, 3, 4],
            [2, 4],
            batch=8,
            microbatches=8,
            scaling="strong",
            memory=None,
        )
    )
    assert [(one.ranks, one.label) for one in found] == [
        (1, "auto"),
        (1, "single"),
        *((2, label) for label in ("ddp", "gpipe + recompute", "auto")),
        *((3, label) for label in ("ddp", "auto")),
        *((4, label) for label in ("ddp", "gpipe 2 x 2 + recompute", "gpipe + recompute", "auto")),
    ]
    hybrid = next(one for one in found if one.stages)
    assert hybrid.name == "256px_4x_gpipe2x2+recompute"
    assert hybrid.arguments[hybrid.arguments.index("--stages") + 1] == "2"
    assert (hybrid.settings.groups, hybrid.settings.depth, hybrid.refusal) == (2, 2, "")
    assert all("--stages" not in one.arguments for one in found if one is not hybrid)
    made = [row_of(one, "m", [trial(speed)], None) for one, speed in zip(found[-4:-2], (1.0, 2.0), strict=True)]
    compare(made)
    assert made[1]["stages"] == 2
    assert made[1]["claim"] == "2.00x ddp on 4 ranks, measured once"


def test_a_case_says_why_it_cannot_run() -> None:
    assert case("ddp").refusal == ""
    assert "mast computes 2 microbatches" in case("mast").refusal
    assert "every microbatch a tile" in Case("gpipe", (), 2, 256, 1, 2).refusal
    assert case("ddp", memory="2GiB").settings.memory_excess == "stop"


def test_a_row_is_the_median_of_its_repeats() -> None:
    row = row_of(case("gpipe"), "m", [trial(1.0), trial(4.0, peak_memory_bytes=[9, 1]), trial(2.0)], None)
    assert (row["images_per_second"], row["images_per_second_range"]) == (2.0, [1.0, 4.0])
    assert row["peak_memory_bytes"] == [9, 6]
    assert row["time"] == {"compute": pytest.approx(1.8), "bubble": None, "transfer": None, "data": pytest.approx(0.2)}
    split = trial(2.0, step_seconds={"compute": 1.0, "bubble": 0.5, "transfer": 0.1})
    assert row_of(case("gpipe"), "m", [split], None)["time"]["transfer"] == pytest.approx(2 - 0.2 - 1.5)
    unmeasured = trial(2.0, stages=2, step_seconds=None)
    assert row_of(case("gpipe"), "m", [unmeasured], None)["time"] is None


def test_one_repeat_that_fails_fails_the_row() -> None:
    row = row_of(case("gpipe"), "m", [trial(1.0), Trial("failed", "it broke")], None)
    assert (row["status"], row["reason"], row["images_per_second"]) == ("failed", "it broke", None)


def test_claims_are_against_data_parallelism_on_the_same_work() -> None:
    found = rows(ddp=[trial(1.0), trial(1.1)], gpipe=[trial(2.0), trial(2.1)], master=[trial(1.05), trial(0.9)])
    assert found["ddp"]["claim"] == "1.05 images/s: the baseline"
    assert found["gpipe"]["claim"] == "1.95x ddp on 2 ranks, ranges apart"
    assert found["master"]["claim"] == "0.93x ddp on 2 ranks, ranges overlap"
    assert found["gpipe"]["times_baseline"] == pytest.approx(2.05 / 1.05)
    assert rows(ddp=[trial(1.0)], gpipe=[trial(2.0)])["gpipe"]["claim"].endswith("measured once")


def test_where_data_parallelism_does_not_fit_images_per_second_stand_alone() -> None:
    found = rows(ddp=[Trial("out-of-memory", "too much")], master_recompute=[trial(0.25)])
    assert found["master + recompute"]["claim"] == "0.25 images/s where ddp is out of memory"
    assert found["ddp"]["claim"] == "out of memory"
    assert rows(gpipe=[trial(1.0)])["gpipe"]["claim"] == "1 images/s; no data-parallel baseline was run"


def test_where_data_parallelism_fits_only_by_recomputing_it_is_held_against_that() -> None:
    out = [Trial("out-of-memory", "too much")]
    found = rows(ddp=out, ddp_recompute=[trial(0.5)], master_recompute=[trial(0.6)], gpipe=out)
    assert found["master + recompute"]["claim"] == "0.6 images/s where ddp is out of memory; 1.20x ddp + recompute"
    assert found["ddp + recompute"]["claim"] == "0.5 images/s where ddp is out of memory"
    assert found["gpipe"]["claim"] == "out of memory"


def test_nothing_is_claimed_for_other_work() -> None:
    found = rows(ddp=[trial(1.0)], gpipe=[trial(9.0, loss=0.51)], master=[trial(9.0, loss=0.5 + 1e-7)])
    assert found["master"]["loss_matches"] is True
    assert found["gpipe"]["loss_matches"] is False
    assert "nothing is claimed" in found["gpipe"]["claim"]


@pytest.mark.parametrize(("precision", "matches"), [("fp32", False), ("tf32", True), ("bf16", True)])
def test_losses_in_shorter_precision_may_differ_by_more(precision: str, matches: bool) -> None:
    found = rows(ddp=[trial(1.0, precision=precision)], gpipe=[trial(9.0, loss=0.501, precision=precision)])
    assert found["gpipe"]["loss_matches"] is matches


def test_losses_on_other_numbers_of_ranks_may_differ_by_more() -> None:
    one = Case("single", (), 1, 256, 4, 4)
    made = [
        row_of(one, "m", [trial(1.0, loss=0.5)], None),
        row_of(case("ddp"), "m", [trial(1.0, loss=0.5 + 1e-4)], None),
        row_of(case("gpipe"), "m", [trial(1.0, loss=0.5 + 1e-4 + 1e-7)], None),
        row_of(case("master"), "m", [trial(1.0, loss=0.5)], None),
    ]
    compare(made)
    assert [row["loss_matches"] for row in made] == [None, True, True, False]
    made[1]["losses"][0] = 0.51
    compare(made)
    assert made[1]["loss_matches"] is False


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"steps": 2}, "--steps must be at least 3"),
        ({"ranks": (2, 2)}, "each once; got 2 2"),
        ({"tiles": ()}, "--tiles takes one or more"),
        ({"strategies": ("ddp", "dpp")}, "got 'dpp'"),
        ({"stages": (2, 3), "ranks": (4,)}, "--stages takes numbers of 2 or more that divide one of --ranks 4; got 3"),
        ({"stages": (1,)}, "got 1"),
        ({"stages": (2, 2)}, "--stages takes one or more, each once; got 2 2"),
        ({"memory": "2 GB"}, "--memory takes a size"),
        ({"microbatches": 9}, "--microbatches must be 1 to --batch 8"),
        ({"ranks": (1,), "strategies": ("ddp",)}, "nothing to measure"),
        ({"strategies": ("ddp", "spatial@2y1")}, "--strategies spatial@2y1: a grid is ROWSxCOLUMNS"),
        ({"strategies": ("ddp", "spatial@")}, "--strategies spatial@: a grid is ROWSxCOLUMNS"),
        ({"strategies": ("ddp@2x1",)}, "--strategies ddp@2x1: ddp has no teams"),
        ({"strategies": ("spatial@1x1", "ddp")}, "spatial@1x1 divides nothing"),
        (
            {"strategies": ("spatial@2x2", "ddp")},
            "its teams take 4, 8, 12 ... ranks; got --ranks 1 2: add",
        ),
        (
            {"strategies": ("ddp", "1f1b@2x1"), "ranks": (2,)},
            "its teams take 4, 6, 8 ... ranks; got --ranks 2: add",
        ),
    ],
)
def test_wrong_settings_are_told(settings: dict[str, Any], fault: str) -> None:
    found = BenchCommand(DataSettings(Path("slides")), **settings).validate()
    assert len(found) == 1
    assert fault in found[0]


def test_a_launcher_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert "start it once" in BenchCommand(DataSettings(Path("slides"))).validate()[0]


@pytest.mark.process
def test_out_of_memory_is_a_result_and_so_is_a_hang(classify_slides: Path, tmp_path: Path) -> None:
    shared = ["--slides", str(classify_slides), "--model", "tests.helpers.tiny_models:classifier", "--steps", "3"]
    (tmp_path / "tiles").mkdir()
    one = Case("single", (), 1, 256, 4, 2, memory="2MiB")
    found = run_trial(one, shared, tmp_path / "tiles", tmp_path / "small", 120)
    assert found.status == "out-of-memory"
    assert "--memory 2 MiB" in found.reason
    assert Trial.load(tmp_path / "small" / "trial.json") == found
    hung = run_trial(one, shared, tmp_path / "tiles", tmp_path / "late", 0.1)
    assert (hung.status, hung.reason[:15]) == ("failed", "not done after ")


@pytest.mark.process
def test_a_rank_ended_by_signal_9_is_not_out_of_device_memory(
    classify_slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ended_by("tests.helpers.tiny_models:killed", classify_slides, tmp_path, (3, 4), monkeypatch)
    assert (found.status, found.reason) == ("killed", trials._who_killed(3, 4))


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((3, 4), "the host's memory ran out, and the kernel killed for it (its count of such kills rose by 1)"),
        ((3, 3), "not for lack of memory: the kernel's count of such kills stands at 3"),
        ((None, None), "probably by the kernel as the host's memory ran out; it keeps no count here"),
    ],
    ids=["counted", "not counted", "not told"],
)
def test_who_ended_a_rank_is_told_as_far_as_the_kernel_counts(counts: tuple[int | None, int | None], told: str) -> None:
    reason = trials._who_killed(*counts)
    assert reason.startswith("a rank was ended by signal 9")
    assert told in reason


@pytest.mark.process
def test_what_torch_says_of_memory_is_out_of_memory(
    classify_slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the kernel did to others meanwhile."""
    found = ended_by("tests.helpers.tiny_models:without_memory", classify_slides, tmp_path, (3, 4), monkeypatch)
    assert found.status == "out-of-memory"


def ended_by(
    model: str, slides: Path, folder: Path, counts: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> Trial:
    """A run of ``model`` on one rank, before and after which the kernel tells ``counts`` kills."""
    told = iter(counts)
    monkeypatch.setattr(trials, "memory_kills", lambda: next(told))
    (folder / "tiles").mkdir()
    shared = ["--slides", str(slides), "--model", model, "--steps", "3"]
    return run_trial(Case("single", (), 1, 256, 4, 2), shared, folder / "tiles", folder / "run", 120)


def test_a_row_of_killed_runs_says_so() -> None:
    killed = [Trial("killed", "a rank was ended by signal 9")]
    found = rows(ddp=killed, gpipe=[trial(1.0)])
    assert found["ddp"]["claim"] == "killed by signal 9"
    assert found["gpipe"]["claim"] == "1 images/s where ddp was killed"


def test_another_benchmark_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--slides", str(tmp_path), "--out", str(tmp_path / "out"), "--tiles", "256", "--ranks", "1"]
    assert bench.main([*asked, "--strategies", "single"]) == 1  # no slides: nothing ran, which is written down
    assert "cannot" in capsys.readouterr().out
    assert bench.main([*asked, "--strategies", "single", "--resume", "--batch", "2"]) == 2
    assert "batch: the benchmark has 8, asked is 2" in capsys.readouterr().err
