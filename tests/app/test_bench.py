"""``app.bench``: cases, rows, claims, what single runs come to, and whole small benchmarks as a user starts them."""

import itertools
import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from app import bench
from app.benchmark import row as trials
from app.benchmark.command import BenchCommand, Case, StrategySpec
from app.benchmark.row import Trial, compare, row_of, run_trial
from app.settings.run import DataSettings
from parallel.space.team import TeamGrid
from tests.app.conftest import CLASSIFIER, begin
from tests.helpers.in_process import call


def case(label, ranks=2, **more):
    return Case(StrategySpec.parse(label), ranks, 256, 4, 4, **more)


def trial(speed, loss=0.5, **more):
    summary = {"images_per_second": speed, "images_per_second_no_data": speed, "pixels_per_second": speed * 256**2}
    summary |= {"data_wait_fraction": 0.1, "global_batch": 4, "precision": "fp32", "strategy": "ddp"}
    return Trial("ok", "", {**summary, "peak_memory_bytes": [5, 6], **more}, (loss, 0.1), 3.0)


def rows(**found):
    """Return the rows of trials by strategy, whose plus signs are underscores in the names."""
    made = [row_of(case(name.replace("_", "+")), "m", trials, None) for name, trials in found.items()]
    compare(made)
    return {row["strategy"]: row for row in made}


def cases(strategies, *sizes, **more):
    asked = dict(zip(("tiles", "ranks", "stages"), sizes, strict=False))
    return BenchCommand(DataSettings(Path()), strategies=tuple(strategies.split()), **asked, **more).cases()


def labels(found):
    return [(one.ranks, one.label) for one in found]


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("master+offload+recompute", ("master", ("recompute", "offload"), None)),
        ("1f1b@4x1+recompute", ("1f1b", ("recompute",), TeamGrid(4, 1))),
        ("single+stream", ("single", ("stream",), None)),
        ("dpp", r"knows auto, single.*got 'dpp'"),
        ("ddp+speed", "recompute, offload, stream; got 'speed'"),
    ],
)
def test_strategies_are_named_with_what_they_save_and_their_grid(text, spec):
    if isinstance(spec, tuple):
        assert StrategySpec.parse(text) == spec
    else:
        with pytest.raises(ValueError, match=spec):
            StrategySpec.parse(text)


def test_a_case_is_named_and_says_why_it_cannot_run():
    assert case("ddp+recompute").label == "ddp + recompute"
    assert case("spatial@02x1+recompute").label == "spatial of 2x1 + recompute"
    made = [row_of(case(text, 4), "m", [trial(1.0)], None) for text in ("spatial", "1f1b@2x1", "ddp")]
    assert [(row["grid"], row["chosen"]) for row in made] == [("4x1", "4x1"), ("2x1", None), (None, None)]
    assert [case(text, 4).refusal for text in ("ddp", "spatial", "1f1b@2x1")] == ["", "", ""]
    assert "mast computes 2 microbatches" in case("mast").refusal
    assert case("single+stream", 1).settings.stream == "auto"
    assert "--stream auto is planned for --parallel single, ddp and spatial" in case("1f1b+stream").refusal
    assert "every microbatch a tile" in Case(StrategySpec("gpipe"), 2, 256, 1, 2).refusal
    assert case("ddp", memory="2GiB").settings.memory_excess == "stop"


def test_teams_run_on_the_ranks_that_they_divide():
    runs_on = {"spatial": [*range(2, 11)], "spatial@2x2": [4, 8], "1f1b@2x1": [4, 6, 8, 10], "single": [1]}
    for text, ranks in {**runs_on, "auto": [*range(1, 11)]}.items():
        assert [n for n in range(1, 11) if StrategySpec.parse(text).runs_on(n)] == ranks
    assert StrategySpec.parse("1f1b@2x1").depths(8, (2, 3, 4)) == [2, None]
    assert StrategySpec.parse("spatial@2x1").depths(8, (2, 4)) == [None]
    found = cases("ddp spatial spatial@2x1 1f1b@2x1 1f1b", [256], [2, 4, 8], [2], microbatches=8)
    assert all(one.refusal == "" for one in found)
    assert labels(found) == [
        *((2, label) for label in ("ddp", "spatial", "spatial of 2x1", "1f1b")),
        *((4, label) for label in ("ddp", "spatial", "spatial of 2x1", "1f1b of 2x1", "1f1b 2 x 2")),
        *((8, label) for label in ("ddp", "spatial", "spatial of 2x1", "1f1b 2 x 2 of 2x1", "1f1b 4 x 2")),
    ]
    hybrid = found[-2]
    assert hybrid.name == "256px_8x_1f1b2x2of2x1"
    assert {"--stages 2", "--grid 2x1"} <= set(map(" ".join, itertools.pairwise(hybrid.arguments)))
    assert (hybrid.settings.groups, hybrid.settings.depth, hybrid.settings.group_ranks) == (2, 2, 4)
    assert "--grid" not in found[1].arguments


def test_one_rank_runs_single_and_several_run_the_rest():
    found = cases("single ddp gpipe+recompute", [256, 512], [1, 2], batch=4, microbatches=2, scaling="weak")
    names = ("1x_single", "2x_ddp", "2x_gpipe+recompute")
    assert [one.name for one in found] == [f"{px}px_{name}" for px in (256, 512) for name in names]
    assert [(one.batch, one.microbatches) for one in found[:3]] == [(4, 2), (8, 4), (8, 4)]
    arguments = found[2].arguments
    assert arguments[arguments.index("--recompute") + 1] == "block"


def test_a_row_is_the_median_of_its_repeats_and_fails_with_one():
    row = row_of(case("gpipe"), "m", [trial(1.0), trial(4.0, peak_memory_bytes=[9, 1]), trial(2.0)], None)
    assert (row["images_per_second"], row["images_per_second_range"]) == (2.0, [1.0, 4.0])
    assert row["peak_memory_bytes"] == [9, 6]
    assert row["time"] == {"compute": pytest.approx(1.8), "bubble": None, "transfer": None, "data": pytest.approx(0.2)}
    split = trial(2.0, step_seconds={"compute": 1.0, "bubble": 0.5, "transfer": 0.1})
    assert row_of(case("gpipe"), "m", [split], None)["time"]["transfer"] == pytest.approx(2 - 0.2 - 1.5)
    unmeasured = trial(2.0, stages=2, step_seconds=None)
    assert row_of(case("gpipe"), "m", [unmeasured], None)["time"] is None
    row = row_of(case("gpipe"), "m", [trial(1.0), Trial("failed", "it broke")], None)
    assert (row["status"], row["reason"], row["images_per_second"]) == ("failed", "it broke", None)
    found = rows(ddp=[trial(1.0)], gpipe=[trial(1.0), Trial("killed", "by somebody")])
    assert (found["gpipe"]["claim"], found["gpipe"]["loss_matches"]) == ("killed by signal 9", None)


OUT, KILLED = [Trial("out-of-memory", "too much")], [Trial("killed", "a rank was ended by signal 9")]


@pytest.mark.parametrize(
    ("found", "claims"),
    [
        (
            {"ddp": [trial(1.0), trial(1.1)], "gpipe": [trial(2.0), trial(2.1)], "master": [trial(1.05), trial(0.9)]},
            {
                "ddp": "1.05 images/s: the baseline",
                "gpipe": "1.95x ddp on 2 ranks, ranges apart",
                "master": "0.93x ddp on 2 ranks, ranges overlap",
            },
        ),
        ({"ddp": [trial(1.0)], "gpipe": [trial(2.0)]}, {"gpipe": "2.00x ddp on 2 ranks, measured once"}),
        (
            {"ddp": OUT, "master_recompute": [trial(0.25)]},
            {"master + recompute": "0.25 images/s where ddp is out of memory", "ddp": "out of memory"},
        ),
        ({"gpipe": [trial(1.0)]}, {"gpipe": "1 images/s; no data-parallel baseline was run"}),
        (
            {"ddp": OUT, "ddp_recompute": [trial(0.5)], "master_recompute": [trial(0.6)], "gpipe": OUT},
            {
                "master + recompute": "0.6 images/s where ddp is out of memory; 1.20x ddp + recompute",
                "ddp + recompute": "0.5 images/s where ddp is out of memory",
                "gpipe": "out of memory",
            },
        ),
        (
            {"ddp": KILLED, "gpipe": [trial(1.0)]},
            {"ddp": "killed by signal 9", "gpipe": "1 images/s where ddp was killed"},
        ),
    ],
)
def test_claims_are_against_data_parallelism_on_the_same_work(found, claims):
    found = rows(**found)
    assert {name: found[name]["claim"] for name in claims} == claims
    assert "master" not in claims or found["gpipe"]["times_baseline"] == pytest.approx(2.05 / 1.05)


@pytest.mark.parametrize(
    ("precision", "loss", "matches"),
    [
        *(("fp32", 0.51, False), ("fp32", 0.5 + 1e-7, True), ("fp32", 0.501, False)),
        *(("tf32", 0.501, True), ("bf16", 0.501, True)),
    ],
)
def test_nothing_is_claimed_for_other_work(precision, loss, matches):
    """Losses in shorter precision may differ by more."""
    ours, theirs = trial(1.0, precision=precision), trial(9.0, loss=loss, precision=precision)
    row = rows(ddp=[ours], gpipe=[theirs])["gpipe"]
    assert row["loss_matches"] is matches
    assert ("nothing is claimed" in row["claim"]) != matches


def test_tiles_are_needed_and_a_launcher_is_not(monkeypatch):
    (fault,) = BenchCommand(DataSettings(Path("slides")), tiles=()).validate()
    assert "--tiles takes one or more" in fault
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert "start it once" in BenchCommand(DataSettings(Path("slides"))).validate()[0]


def train_here(patch, start):
    """Train in this process, by ``start``, what trials ask for."""

    def run(command, output, timeout_s):
        done = start(*command[3:], code=None)
        output.write_text(done.stdout + done.stderr)
        return done.returncode

    patch.setattr(trials, "_run", run)


def run_single(tmp_path, slides, name, model=CLASSIFIER, timeout_s=120, **more):
    (tmp_path / "tiles").mkdir(exist_ok=True)
    shared = ["--slides", str(slides), "--model", model, "--steps", "3"]
    asked = Case(StrategySpec("single"), 1, 256, 4, 2, **more)
    return run_trial(asked, shared, tmp_path / "tiles", tmp_path / name, timeout_s)


def test_out_of_memory_is_a_result(classify_slides, train, tmp_path, monkeypatch):
    """Torch's message counts, whatever the kernel, which counts its kills, did to others meanwhile."""
    train_here(monkeypatch, train)
    found = run_single(tmp_path, classify_slides, "small", memory="2MiB")
    assert found.status == "out-of-memory"
    assert "--memory 2 MiB" in found.reason
    assert Trial.load(tmp_path / "small" / "trial.json") == found
    monkeypatch.setattr(trials, "memory_kills", iter((3, 4)).__next__)
    told = run_single(tmp_path, classify_slides, "told", "tests.helpers.tiny_models:without_memory")
    assert told.status == "out-of-memory"


@pytest.mark.process
def test_a_rank_ended_by_signal_9_is_not_out_of_device_memory_and_a_hang_is_ended(
    classify_slides, tmp_path, monkeypatch
):
    monkeypatch.setattr(trials, "memory_kills", iter((3, 4, 5)).__next__)
    found = run_single(tmp_path, classify_slides, "run", "tests.helpers.tiny_models:killed")
    assert found.status == "killed"
    assert "count of such kills rose by 1" in found.reason
    hung = run_single(tmp_path, classify_slides, "late", timeout_s=0.1)
    assert (hung.status, hung.reason[:15]) == ("failed", "not done after ")


def test_another_benchmark_is_not_gone_on_with(tmp_path, capsys):
    asked = ["--slides", str(tmp_path), "--out", str(tmp_path / "out"), "--tiles", "256", "--ranks", "1"]
    assert bench.main([*asked, "--strategies", "single"]) == 1  # no slides: nothing ran, which is written down
    assert "cannot" in capsys.readouterr().out
    assert bench.main([*asked, "--strategies", "single", "--resume", "--batch", "2"]) == 2
    assert "batch: the benchmark has 8, asked is 2" in capsys.readouterr().err
    more = [*asked, "4", "--strategies", "single", "--resume"]  # ranks, whose most decide the default of microbatches
    assert bench.main(more) == 2
    assert "the benchmark has 2, asked is 8: add --microbatches 2" in capsys.readouterr().err
    assert bench.main([*more, "--microbatches", "2"]) == 1
    grown = [*asked[:2], "--out", str(tmp_path / "weak"), "--tiles", "256", "--scaling", "weak", "--microbatches", "4"]
    assert bench.main([*grown, "--strategies", "ddp", "--ranks", "2", "4"]) == 1
    assert bench.main([*grown, "--strategies", "ddp", "--ranks", "1", "2", "4", "--resume"]) == 2
    assert "--batch is that of the fewest, 2 in the benchmark; asked are 1" in capsys.readouterr().err


def test_a_benchmark_of_another_machine_is_not_gone_on_with(tmp_path, monkeypatch, capsys):
    """Speeds of two machines had stood in one table."""
    environment = {"cpu": {"model": "CPU A"}, "gpus": [{"name": "A40"}]}
    monkeypatch.setattr("app.benchmark.runner.describe_environment", lambda: environment)
    asked = ["--slides", str(tmp_path), "--out", str(tmp_path / "out"), "--tiles", "256", "--ranks", "1"]
    asked += ["--strategies", "single"]
    assert bench.main(asked) == bench.main([*asked, "--resume"]) == 1  # no slides: nothing ran
    environment = environment | {"gpus": []}
    assert bench.main([*asked, "--resume"]) == 2
    assert "machine: the benchmark has CPU A, A40; this is CPU A: name another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "repeated"),
    [("failed", True), ("killed", True), ("cannot", True), ("out-of-memory", False), ("ok", False)],
)
def test_runs_whose_fault_may_be_mended_are_repeated(status, repeated, tmp_path, monkeypatch):
    """A run that had been too slow was not measured with more time, either."""
    measured = []

    def run(case, shared, prepared, folder, timeout_s):
        result = trial(1.0) if measured or status == "ok" else Trial(status, "a fault")
        measured.append(timeout_s)
        folder.mkdir(parents=True, exist_ok=True)
        result.save(folder / "trial.json")
        return result

    monkeypatch.setattr("app.benchmark.runner.run_trial", run)
    monkeypatch.setattr("app.benchmark.runner.BenchmarkRunner._prepare", lambda *_: None)
    asked = ["--slides", str(tmp_path), "--out", str(tmp_path / "out"), "--tiles", "256", "--ranks", "1"]
    asked += ["--strategies", "single", "--repeats", "1"]
    assert bench.main(asked) == (status != "ok")
    assert bench.main([*asked, "--resume", "--trial-timeout-s", "7200"]) == (status == "out-of-memory")
    assert measured == [3600, 7200][: 1 + repeated]


DELAYED = "delayed gradients, not the plain step"
TINY = ("--model", CLASSIFIER, "--mpp", "0.5", "--tiles", "256", "--batch", "4", "--slides")


@pytest.fixture
def measure(train_ranks, monkeypatch):
    """``app.bench`` in this process, which trains in this process, too; ranks are forked."""
    train_here(monkeypatch, train_ranks)
    return lambda *arguments, code=0: call("app.bench", *arguments, env={"OMP_NUM_THREADS": "1"}, code=code)


@pytest.mark.process
def test_a_benchmark_is_refused_and_gone_on_with(classify_slides, measure, tmp_path):
    out = tmp_path / "bench"
    asked = (*TINY, classify_slides, "--steps", "3", "--out", out, "--ranks", "2", "--microbatches", "4")
    asked += ("--repeats", "1", "--twin-steps=1", "--strategies", "ddp")
    assert "mast computes 2 microbatches" in measure(*asked, "mast").stdout
    assert "--resume" in measure(*asked, code=2).stderr
    second = measure(*asked, "mast", "master", "pipedream", "--resume")
    assert second.stdout.count("images/s (") == 2  # those that were added
    ddp, mast, master, pipedream = json.loads((out / "bench.json").read_text())["rows"]
    found = [(row["strategy"], row["status"]) for row in (ddp, mast, master, pipedream)]
    assert found == [("ddp", "ok"), ("mast", "cannot"), ("master", "ok"), ("pipedream", "ok")]
    assert master["loss_matches"] is True
    assert len(master["peak_memory_bytes"]) == len(master["device_bytes"]) == len(master["bytes_sent"]) == 2
    assert 0 < master["bubble_predicted"] < 1
    assert (out / master["schedule_svg"]).exists()
    assert ddp["baseline"] is None
    assert master["times_baseline"] == pytest.approx(master["images_per_second"] / ddp["images_per_second"])
    assert "x ddp on 2 ranks" in second.stdout
    assert not list(out.glob("trials/*/*/checkpoints"))
    assert pipedream["loss_matches"] is None
    assert pipedream["claim"].endswith(f"x ddp on 2 ranks, measured once; {DELAYED}")
    assert DELAYED not in ddp["claim"]
    (summary,) = out.glob("trials/*pipedream*/*/summary.json")
    assert json.loads(summary.read_text())["gradients"] == DELAYED
    assert DELAYED in " ".join((summary.parent / "run.log").read_text().split())
    assert DELAYED in (out / "report.html").read_text()


@pytest.mark.process
def test_groups_and_teams_are_measured(classify_slides, measure, tmp_path):
    asked = (*TINY, classify_slides, "--steps", "3", "--repeats", "1", "--out", tmp_path, "--ranks", "4")
    asked += ("--stages", "2", "--microbatches", "4", "--twin-steps=0")
    done = measure(*asked, "--strategies", "ddp", "gpipe", "1f1b@2x1")
    ddp, gpipe, team = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert (gpipe["strategy"], gpipe["status"], gpipe["ranks"], gpipe["stages"]) == ("gpipe 2 x 2", "ok", 4, 2)
    assert (ddp["status"], ddp["stages"], gpipe["loss_matches"]) == ("ok", None, True)
    assert gpipe["claim"].endswith("x ddp on 4 ranks, measured once")
    assert (team["strategy"], team["grid"], team["status"], team["loss_matches"]) == ("1f1b of 2x1", "2x1", "ok", True)
    for shown in (done.stdout, (tmp_path / "report.html").read_text()):
        assert "1f1b of 2x1" in shown


@pytest.mark.process
def test_a_benchmark_that_is_asked_to_end_leaves_nothing_running(classify_slides, tmp_path):
    asked = [*TINY, str(classify_slides), "--steps", "100000", "--ranks", "2", "--out", str(tmp_path)]
    process = begin(sys.executable, "-m", "app.bench", *asked, "--strategies", "ddp")
    metrics, until = tmp_path / "trials" / "256px_2x_ddp" / "1" / "metrics.csv", time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < until:
        time.sleep(0.2)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 3  # the launcher and two ranks
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    _, left = psutil.wait_procs(ranks, timeout=10)
    assert not left


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((3, 4), "the host's memory ran out, and the kernel killed for it (its count of such kills rose by 1)"),
        ((3, 3), "not for lack of memory: the kernel's count of such kills stands at 3"),
        ((None, None), "probably by the kernel as the host's memory ran out; it keeps no count here"),
    ],
    ids=["counted", "not counted", "not told"],
)
def test_who_ended_a_rank_is_told_as_far_as_the_kernel_counts(counts, told):
    reason = trials._who_killed(*counts)
    assert reason.startswith("a rank was ended by signal 9")
    assert told in reason
