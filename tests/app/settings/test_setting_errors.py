"""Settings of a strategy that exclude each other: one error each, by the words that a user looks for."""

import math
from pathlib import Path

import pytest

from app.settings.fields import with_values
from app.settings.run import DataSettings, RunConfig
from app.settings.strategy import StrategySettings
from app.settings.strategy_errors import strategy_errors
from app.train import main
from app.verify import VerifyCommand
from parallel.schedule.text import Push

NUMBERS = {"ranks", "stages", "chunks", "batch", "microbatches", "zero", "cpu_ranks", "staleness"}


def settings_of(text):
    """Settings in words such as ``gpipe ranks=2 compile``; the first without a value is the strategy."""
    asked = {}
    for word in text.split():
        name, given, value = word.partition("=")
        if not given:
            name, value = ("compile", True) if word == "compile" else ("parallel", word)
        if name in ("grid", "gradient_buckets"):
            value = value.replace("_", " ")
        asked[name] = int(value) if name in NUMBERS else Path(value) if name in ("schedule", "replay") else value
    return StrategySettings(**asked)


RANKS = "ranks=3 device=mixed cpu_ranks=1"
SPATIAL, TEAMS = "spatial ranks=2 grid=2x1", "1f1b ranks=4 grid=2x1"
DELAYED = "pipedream updates the weights after every microbatch, which was not tried with"

WHOLE = {"tile": "slide", "augment": "none"}
NO_GRIDS = ("2", "x2", "0x2", "00x1", "2X1", "-1x2", "2x1x1", "2x1:3", "２x1", "two-by-one")

FAULTS = [
    ("gpipe", "2 ranks or more; got --ranks 1"),
    ("fsdp", "fsdp keeps parts of the model on 2 ranks or more"),
    ("fsdp ranks=2 cuts=fc", "--cuts is about a model split into stages"),
    ("fsdp ranks=2 recompute=optimal memory=1GiB", "--recompute optimal is not for --parallel fsdp"),
    ("gpipe ranks=3 stages=2", "3 ranks cannot be divided into groups of --stages 2"),
    ("gpipe ranks=2 stages=3", "--stages must be 2 to the number of ranks, 2; got 3"),
    *((f"{on} stages=0", "--stages must be at least 2; got 0") for on in ("1f1b ranks=2", TEAMS, "subgraph ranks=2")),
    ("gpipe ranks=4 stages=2 microbatches=1", "each of 2 groups of 2 ranks needs a"),
    ("mast ranks=2 microbatches=3", "2 microbatches per group, 2 in all"),
    ("1f1b ranks=2 chunks=2", "--chunks is for --parallel interleaved"),
    ("interleaved ranks=2 chunks=1", "--chunks must be at least 2; got 1"),
    ("1f1b ranks=2 zero=3 schedule=nowhere.csv", "--zero 3 divides a model", "nowhere.csv is not a file"),
    ("1f1b ranks=2 zero=1", "--zero 1: leave it out: each stage is on one rank alone"),
    ("ddp ranks=2 zero=2 gradient_buckets=0", "--zero 2: use --zero 1: with --gradient-buckets=0 gradients stay whole"),
    ("fsdp ranks=2 zero=1", "--parallel fsdp is --zero 3; got --zero 1: use --parallel ddp"),
    ("async ranks=2 zero=1", "--zero 1: leave it out: a parameter server has the only optimizer"),
    ("ddp ranks=2 stages=2 cuts=fc", "--stages is about a model split", "--cuts is about"),
    ("ranks=4 stages=3", "--stages must be 2 or more and divide the number of ranks, 4; got 3"),
    ("batch=4 microbatches=5", "--microbatches must be 1 to --batch 4; got 5"),
    ("memory=16G", "--memory takes a size such as 512MiB or 16GiB; got '16G'"),
    (
        "ranks=2 stages=2 cuts=fc recompute=stage zero=1 compile",
        *("--cuts is about", "--recompute stage is about", "--compile is about", "leave --zero 1 out"),
    ),
    ("stream=0", "--stream takes none, auto or the side of boxes in px, such as 512; got '0'"),
    ("stream=512 recompute=block ranks=2", "with --recompute block", "--stream 512 is not for --parallel auto"),
    ("stream=auto 1f1b ranks=2 memory=1GiB", "--stream auto is planned for --parallel single, ddp and spatial"),
    (
        "stream=512 zero-bubble ranks=2 norm_statistics=deferred",
        *("incompatible with --norm-statistics deferred", "--stream 512 is not for --parallel zero-bubble"),
    ),
    ("pipedream ranks=4 stages=2", f"{DELAYED} data-parallel"),
    ("pipedream ranks=2 stream=512", f"{DELAYED} --stream 512"),
    ("pipedream ranks=4 grid=2x1", f"{DELAYED} --grid"),
    (
        "pipedream ranks=2 offload=overlap offload_state=optimizer norm_statistics=deferred compile",
        *(f"{DELAYED} {what}" for what in ("--compile", "--norm-stat", "--offload overlap", "--offload")),
    ),
    ("recompute=block recompute_runs=conv1:relu", "--recompute-runs goes with --recompute optimal"),
    ("recompute=optimal offload=overlap memory=1GiB", "use --recompute block"),
    (f"1f1b ranks=2 recompute=optimal schedule={__file__}", "planned for the schedule of --parallel; got --schedule"),
    ("single recompute=optimal recompute_runs=conv1:relu,layer1", "--recompute-runs takes pairs of layers"),
    ("ranks=2 recompute=optimal recompute_runs=conv1:relu", "leave --recompute-runs conv1:relu out, or name"),
    ("offload=overlap offload_ahead=some offload_host=-1GiB", "--offload-ahead takes a size", "--offload-host takes"),
    ("offload_ahead=1MiB offload_host=1GiB", "--offload-ahead is about --offload overlap", "--offload-host is about"),
    (
        "fsdp ranks=2 recompute=block offload=overlap offload_state=parameters",
        *("--offload overlap is not for --parallel fsdp", "--offload-state=parameters is not for --parallel fsdp"),
    ),
    *((f"spatial ranks=2 grid={text}", f"ROWSxCOLUMNS of members, as 2x1 or 2x2; got {text!r}") for text in NO_GRIDS),
    ("spatial ranks=2 grid=2_x_1", "got '2 x 1'"),
    ("1f1b ranks=4 grid=2x1,1x1", "got '2x1,1x1'"),
    (f"{TEAMS} schedule={__file__}", "--grid 2x1: a schedule file is of single ranks"),
    ("spatial", "--parallel spatial divides each tile among 2 ranks or more; got --ranks 1"),
    ("spatial ranks=2 grid=1x1", "--grid 1x1 divides nothing"),
    ("spatial ranks=3 grid=2x2", "--grid 2x2 takes 4 ranks for a team, or a multiple; got 3"),
    ("spatial ranks=3 grid=2x1", "--grid 2x1 takes 2 ranks for a team, or a multiple; got 3: give --ranks 2, or"),
    ("spatial ranks=4 grid=2x1 batch=1", "each of 2 groups of 2 ranks needs a microbatch"),
    (f"{SPATIAL} stages=2", "--stages 2 is about a model split into stages"),
    (f"{SPATIAL} cuts=fc", "--cuts=fc is about a model split into stages"),
    ("auto ranks=2 grid=2x1", "--grid is of a strategy that is named"),
    ("ddp ranks=2 grid=2x1", "of a team, which --parallel ddp does not have: use --parallel spatial"),
    ("fsdp ranks=2 grid=2x1", "of a team, which --parallel fsdp does not have"),
    ("single grid=2x1", "of a team, which --parallel single does not have"),
    (f"{SPATIAL} compile", "--grid 2x1: compiled stages cannot exchange"),
    (f"{SPATIAL} norm_statistics=deferred", "--grid 2x1: deferred statistics are not of teams"),
    (f"{SPATIAL} offload_state=parameters", "--grid 2x1: parameters on the host are not of teams"),
    (f"{SPATIAL} zero=3", "--zero 3 divides a model that each rank computes whole: got --parallel spatial, use ddp"),
    ("1f1b ranks=4 grid=2x2", "2 teams or more; got --grid 2x2 and 4 ranks"),
    (f"{TEAMS} stages=3", "--grid 2x1 takes 6 ranks for 3 teams, or a multiple; got 4: give --ranks 6, or"),
    ("zero-bubble ranks=4 grid=2x1", "--grid 2x1: zero-bubble splits the backward pass"),
    (f"{TEAMS} stream=auto", "--stream auto is planned for --parallel single, ddp and spatial"),
    (f"{TEAMS} stream=16 recompute=block", "incompatible with --recompute block"),
    (f"{TEAMS} stream=16 offload=overlap", "incompatible with --offload overlap"),
    *((f"ddp ranks=3 device=mixed cpu_ranks={n}", f"1 to 2 of the 3 ranks of a machine; got {n}") for n in (0, 3, -1)),
    ("ddp device=mixed cpu_ranks=1", "got 1 rank: use --ranks 2 or more"),
    *((f"{name} {RANKS}", "--device mixed is for --parallel ddp") for name in ("fsdp", "auto", "gpipe stages=3")),
    (f"ddp {RANKS} recompute=optimal", "--device mixed is not planned for"),
    (f"ddp {RANKS} precision=bf16", "--precision bf16 rounds differently on a CPU and on a GPU"),
    (f"ddp {RANKS} precision=tf32", "--precision tf32 rounds differently on a CPU and on a GPU"),
    (f"ddp {RANKS} offload_state=optimizer", "--offload-state=optimizer is for ranks that are all on a GPU"),
    ("ddp ranks=3 cpu_ranks=1 device=cuda", "--cpu-ranks is for --device mixed; got 1 with --device cuda"),
    ("ddp ranks=3 mixed_sums=host", "--mixed-sums is for --device mixed; got host with --device auto"),
    ("ddp ranks=2 gradient_buckets=25_MB", "--gradient-buckets takes a size such as 4MiB, or 0; got '25 MB'"),
    ("ddp ranks=2 gradient_buckets=none", "--gradient-buckets takes a size"),
    ("ddp ranks=2 gradient_buckets=", "--gradient-buckets takes a size"),
    ("single gradient_buckets=4MiB", "--parallel single on 1 rank sums none so: leave it out"),
    ("gpipe ranks=2 gradient_buckets=4MiB", "--parallel gpipe on 2 ranks sums none so: leave it out"),
    ("fsdp ranks=2 gradient_buckets=4MiB", "sums those of a unit at once: leave it out"),
    ("async ranks=2 batch=6 microbatches=4", "--batch 6 is no multiple of --microbatches 4"),
    ("async ranks=2 staleness=-1", "--staleness must be at least 0; got -1"),
    ("async ranks=2 device=cuda", "--parallel async computes on CPUs; got --device cuda"),
    ("async ranks=2 recompute=optimal memory=1GiB", "--parallel async is not planned for"),
    ("async ranks=2 offload_state=optimizer", "--offload-state=optimizer is not for --parallel async"),
    ("async ranks=2 norm_statistics=deferred", "--norm-statistics deferred is about the batch of one update"),
    ("async ranks=2 compile", "--compile is about a model split into stages"),
    ("ddp ranks=2 staleness=1", "--staleness is for --parallel async; got --parallel ddp"),
    ("ddp ranks=2 push_rate=staleness", "--push-rate is for --parallel async"),
    ("ddp ranks=2 replay=x.csv", "--replay is for --parallel async"),
]


@pytest.mark.parametrize(("asked", "words"), [pytest.param(asked, words, id=asked) for asked, *words in FAULTS])
def test_each_fault_is_named(asked, words):
    found = strategy_errors(settings_of(asked))
    assert len(found) == len(words), found
    for word, fault in zip(words, found, strict=True):
        assert word in fault


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ddp ranks=2 shares=3,1 microbatches=6", "gives 4 microbatches, and --microbatches is 6"),
        ("ddp ranks=2 shares=2,1,1", "is of 3 shares, and there are 2 ranks"),
        ("ddp ranks=2 shares=4,0", "every group computes a microbatch at least"),
        ("ddp ranks=2 shares=nowhere.csv", "there is no file nowhere.csv"),
        ("ddp ranks=2 shares=tickets", "equal, auto, counts such as 3,1, or a CSV file; there is no file tickets"),
        ("fsdp ranks=2 shares=3,1", "takes no --shares 3,1: use ddp"),
        ("auto ranks=2 shares=3,1", "of a strategy that nothing is planned for"),
        ("mast ranks=4 stages=2 shares=1,3", "2 microbatches per group; got --shares 1,3"),
        ("mast ranks=4 stages=2 shares=auto", "2 microbatches per group, whatever its"),
        ("1f1b ranks=2 shares=auto", "is between groups, and --parallel 1f1b has one of 2 ranks"),
        ("1f1b ranks=4 stages=2 shares=auto stream=64", "leave --shares auto out"),
        ("gpipe ranks=4 stages=2 shares=auto memory=1GiB", "exceeds --memory with"),
    ],
)
def test_shares_that_do_not_fit(given, said):
    assert any(said in fault for fault in strategy_errors(settings_of(given)))


MPI = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("launcher", "asked", "words"),
    [
        (MPI, "fsdp", ("--parallel fsdp is torch's own", "not MPI", "or use --parallel ddp")),
        (MPI, f"ddp {RANKS}", ("--device mixed talks over torch.distributed", "MPI launcher")),
        # Ranks of a machine count, and not those of the run.
        (TORCHRUN, "ddp device=mixed cpu_ranks=1", ()),
        (TORCHRUN, "ddp device=mixed cpu_ranks=2", ("--cpu-ranks is 1 to 1 of the 2 ranks of a machine",)),
        (TORCHRUN, "ddp ranks=4", ()),
        (TORCHRUN, "ddp ranks=3", ("--ranks 3 starts ranks, and a launcher has started 4: leave --ranks out, or add",)),
        # After a restart with fewer.
        (TORCHRUN | {"MEGATILE_RANK": "1"}, "ddp ranks=5", ()),
    ],
)
def test_a_launcher_decides_with(launcher, asked, words, monkeypatch):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    found = strategy_errors(settings_of(asked))
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


def test_a_verification_of_mixed_devices_is_of_processes():
    mixed = settings_of(f"ddp {RANKS}")
    assert (VerifyCommand(mixed).talks_over, VerifyCommand(mixed).validate()) == ("gloo", [])
    (fault,) = VerifyCommand(mixed, communicator="threads").validate()
    assert "ranks on GPUs are processes: leave --communicator threads out" in fault


HEAD = ",".join(Push._fields)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "log.csv is not a file"),
        ("step,loss\n0,1\n", f"its first line is {HEAD}; got step,loss"),
        (f"{HEAD}\n0,0,0,0,0,0\n", "a line is 7 numbers"),
        (f"{HEAD}\n0,0,0,0,0,0,x\n", "a line is 7 numbers"),
        (f"{HEAD}\n0,1,0,0,0,0,0.1\n", "pushes are logged in order, from step 0 on"),
        (f"{HEAD}\n0,0,0,0,1,0,0.1\n", "after what they pulled; got 0,0,0,0,1,0,0.1"),
        (f"{HEAD}\n", "it has no pushes"),
        (f"{HEAD}\n0,0,0,0,0,0,0.1\n", "--microbatches is 2: add --microbatches 1"),
    ],
)
def test_a_log_that_cannot_be_replayed_is_refused(text, fault, tmp_path):
    if text is not None:
        (tmp_path / "log.csv").write_text(text)
    (found,) = strategy_errors(settings_of(f"async microbatches=2 replay={tmp_path}/log.csv"))
    assert fault in found
    of_ranks = strategy_errors(settings_of(f"async ranks=2 microbatches=2 replay={tmp_path}/log.csv"))
    assert "--replay repeats all updates on one rank; got --ranks 2" in of_ranks[0]


CONFIG = RunConfig(DataSettings(Path("slides")))
RUN_FAULTS = [
    ({}, ()),
    ({"steps": 0}, ("--steps must be at least 1; got 0",)),
    ({"steps": 3, "epochs": 2.0}, ("--steps or --epochs, not both; got 3 and 2",)),
    ({"epochs": 0.0}, ("--epochs must be above 0",)),
    ({"epochs": math.inf}, ("--epochs must be above 0 and finite; got inf",)),
    ({"timeout_s": math.inf}, ("--timeout-s must be above 0 and finite; got inf",)),
    ({"memory": "infGiB"}, ("--memory",)),
    ({"parallel": "ddp", "ranks": 4, "batch": 2}, ("every rank needs a microbatch",)),
    ({"parallel": "single", "ranks": 2}, ("uses one process; got 2 ranks",)),
    ({"read_ahead": "lots"}, ("512MiB or 2GiB; got 'lots'",)),
    ({"read_ahead": "xMiB"}, ("got 'xMiB'",)),
    ({"lr": 0, "momentum": 1}, ("--lr must be above 0", "--momentum")),
    ({"loss": "focal", "label_smoothing": 0.1, "focal_gamma": 0.5}, ("--loss focal", "--focal-gamma must be at least")),
    ({"label_smoothing": 1}, ("--label-smoothing is a share",)),
    ({"top_k": 0}, ("--top-k must be at least 1; got 0",)),
    ({"slide_mpp": 1000, "validation": 0.6, "test": 0.6}, ("between 0.05 and 100 um/px; got 1000", "leave no slide")),
    ({"device_prefetch": -1}, ("--device-prefetch must be at least 0; got -1",)),
    ({"checkpoint_every": 0, "checkpoint_overhead": 1.0}, ()),
    ({"checkpoint_every": -1, "checkpoint_overhead": 0.0}, ("--checkpoint-every must be at least 1", "above 0 to 1")),
    ({"cache": Path("c"), "cache_bytes": "much"}, ("--cache-bytes takes a size such as 512MiB or 32GiB; got 'much'",)),
    ({"pictures": "resize", "cache": Path("c")}, ("--pictures resize",)),
    (WHOLE | {"parallel": "single", "batch": 1, "cache": Path("c")}, ("--cache keeps tiles of one",)),
    (WHOLE | {"parallel": "single", "batch": 4, "microbatches": 2}, ("--batch 4 needs --microbatches 4; got 2",)),
    (WHOLE | {"parallel": "fsdp", "ranks": 2, "batch": 2}, ("and not fsdp",)),
    (WHOLE | {"ranks": 2, "batch": 2}, ("got --parallel auto",)),
    (WHOLE | {"parallel": "single", "batch": 1, "augment": "cpu"}, ("--augment cpu varies tiles of one size",)),
    ({"folds": 1}, ("--folds is at least 2; got 1",)),
    ({"folds": 5}, ("--folds 5 needs --fold 0 to --fold 4; got None",)),
    ({"folds": 5, "fold": 5}, ("--folds 5 needs --fold 0 to --fold 4; got 5",)),
    ({"fold": 1}, ("--fold 1 needs --folds, or --splits FILE.json",)),
    ({"splits": Path("f"), "split_by": "site"}, ("--splits FILE decides alone",)),
    ({"patient_pattern": "("}, ("--patient-pattern is a regular expression",)),
    ({"folds": 5, "fold": 0, "validation": 0.3}, ("--folds says what validates: leave out --validation 0.3",)),
    ({"class_map": ("a",), "tile_label": "most"}, ("--class-map", "--tile-label")),
    ({"class_weights": "balanced", "sample": "slide"}, ()),
    ({"class_weights": "balanced", "sample": "class"}, ("--sample class both balance classes: leave one out",)),
    ({"class_weights": "balanced", "sample": "pixels"}, ("--sample pixels both balance classes",)),
]


@pytest.mark.parametrize(
    ("changed", "words"), [pytest.param(*row, id=" ".join(row[0]) or "defaults") for row in RUN_FAULTS]
)
def test_each_fault_of_a_run_is_named(changed, words):
    found = with_values(CONFIG, changed).validate()
    assert len(found) == len(words), found
    assert all(any(word in fault for fault in found) for word in words)


def test_wrong_usage_is_said_before_anything_is_read(tmp_path, capsys):
    words = ["--slides", str(tmp_path), "--out", str(tmp_path / "run"), "--norm-statistics=deferred", "--norm", "group"]
    assert main(words) == 2
    assert "--norm-statistics deferred is about --norm batch" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
