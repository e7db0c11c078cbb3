"""The page of a run, and of several runs side by side."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
import yaml

from app.pages.run_page import write_comparison, write_report
from app.report import main
from tests.helpers.run_folder import add_examples, write_csv, write_run, write_summary

CACHE = {"hits": 5, "misses": 1, "stored": 1, "damaged": 0, "full": None, "hit_s": 1.0, "slide_s": 1.0, "store_s": 1.0}
LIMIT = {"memory_limit_bytes": 1000, "recompute": "none", "offload": "none"}


def root_of(html):
    return ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))


class Page:
    """What a reader sees of a page."""

    def __init__(self, run):
        self.run = run
        self.html = write_report(run).read_text()
        self.root = root_of(self.html)
        self.text = " ".join(" ".join(self.root.itertext()).split())
        images = [(image.get("alt", ""), image.get("src", "")) for image in self.root.iter("img")]
        self.charts = {
            alt: base64.b64decode(source.partition("svg+xml;base64,")[2]).decode()
            for alt, source in images
            if "svg+xml" in source
        }
        self.pictures = [alt for alt, source in images if "image/jpeg" in source]

    def headings(self, level):
        return ["".join(heading.itertext()) for heading in self.root.iter(level)]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of a finished run, for tests that change nothing."""
    return Page(write_run(tmp_path_factory.mktemp("page") / "run"))


def test_page_needs_nothing_but_itself_and_is_light_and_dark(page):
    assert "http" not in page.html
    assert not re.search(r"<(script|link|iframe|object)\b|@import|url\(", page.html)
    sources = re.findall(r'src="([^,"]*),[^"]*"', page.html)
    assert sources == ["data:image/svg+xml;base64"] * 5 + ["data:image/jpeg;base64"] * 2
    assert '<meta name="color-scheme" content="light dark"/>' in page.html
    light, dark = page.html.split("prefers-color-scheme: dark", 1)
    for colour in set(re.findall(r"var\((--\w+)\)", page.html)) - {"--series"}:
        assert f"{colour}:" in light
        assert f"{colour}:" in dark


def test_page_says_what_the_run_was_and_gave(page):
    for part in (
        "completed",
        "resnet18 · classification · 1024 px tiles · 0.5 µm/px · ddp on 2 ranks",
        "Tile AUC 0.9123 best 0.9456 at step 20",
        "15.9 images/s 16 fed from memory",
        "Data wait 1.23 %",
        "3 GiB largest rank",
        "Peak memory, by rank 3 GiB, 2 GiB",
        "Pixels trained on 16.64 Mpx/s",
        "Duration 1 h 06 min",
        "Slide AUC undefined",
        "broken-7 open cut short, at 50 %",
        f"python -m app.train --config {page.run}/config.yaml --out {page.run}-again",
        "packages torch 2.15.0",
        "the last line of the log",
        "tumour <3> 2 1 50 % 1 1",  # 2 slides, 1 right, 1 said normal, 1 said tumour
        "train 8 4 4 4",  # slides, patients, of each class
    ):
        assert part in page.text, part
    assert page.text.index("slide-b") < page.text.index("slide-a")  # the wrong one first
    assert page.headings("h3") == ["Loss", "Validation scores", "Throughput", "Time of a step", "Learning rate"]
    assert list(page.charts) == page.headings("h3")
    legend = page.charts["Validation scores"]
    assert "Tile AUC" in legend
    assert not any(undefined in legend for undefined in ("Slide AUC", "Dice"))


def test_segmentation_shows_dice_of_classes_and_slides(run):
    rows = [("slide-a", "val", 0.9, 0.8), ("slide-b", "val", 0.7, 0.4), ("slide-c", "val", 0.5, "")]
    write_csv(run / "predictions.csv", ("slide", "split", "dice_background", "dice_gland"), rows)
    text = Page(run).text
    assert "gland 2 0.600 0.600 0.400 0.800" in text
    assert "slide-c val 0.500 –" in text


@pytest.mark.parametrize("missing", ["env.json", "summary.json", "metrics.csv", "predictions.csv", "all"])
def test_each_file_but_the_settings_may_be_missing(run, missing):
    rest = ["run.log", "tissue", "splits.csv", "failed_slides.csv", "validation.csv"]
    names = {
        "all": [path.name for path in run.iterdir() if path.name != "config.yaml"],
        "env.json": ["env.json", *rest],
    }
    for name in names.get(missing, [missing]):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = Page(run)
    assert "Settings" in page.headings("h2")
    if missing == "all":
        assert page.headings("h2") == ["Run it again", "Settings"]
        assert "no summary" in page.text


def test_one_step_without_validation(tmp_path):
    run = write_run(tmp_path / "run", steps=1, validations=1, pictures=0)
    (run / "validation.csv").unlink()
    page = Page(run)
    assert page.headings("h3") == ["Loss", "Throughput", "Time of a step", "Learning rate"]
    assert not re.search(r"\b(nan|inf)\b", " ".join([page.text, *page.charts.values()]))


def test_values_that_are_no_numbers_leave_gaps(run):
    lines = (run / "metrics.csv").read_text().splitlines()
    lines[3] = lines[3].replace(lines[3].split(",")[3], "nan", 1)
    lines[5] = "5,0.5,40,inf,0.001,0.5,,16"
    lines[-1] = lines[-1][:7]  # cut while it was written
    (run / "metrics.csv").write_text("\n".join(lines))
    paths = [path for svg in Page(run).charts.values() for path in re.findall(r'<path d="([^"]*)" clip-path', svg)]
    assert not any("nan" in path or "inf" in path for path in paths)
    assert max(path.count("M") for path in paths) >= 2


TORCHRUN = "torchrun --nproc-per-node 2"
NODES = "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 1"


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ({"started_by": None}, "python"),
        ({"started_by": "torchrun"}, TORCHRUN),
        ({"started_by": "torchrun", "variables": {"LOCAL_WORLD_SIZE": "2"}}, TORCHRUN),
        ({"started_by": "torchrun", "variables": {"LOCAL_WORLD_SIZE": "1"}}, NODES),
        ({"started_by": "mpi"}, "mpirun -n 2 python"),
        ({"started_by": "slurm"}, "srun -n 2 python"),
    ],
)
def test_an_end_with_an_error_shows_it_and_how_to_go_on_under_its_launcher(run, launcher, command):
    write_summary(run, status="failed", error="step 17: the loss is nan & void")
    text = Page(run).text
    assert "step 17: the loss is nan & void" in text
    (run / "env.json").write_text(json.dumps({"launcher": launcher}))
    assert f"checkpoint {command} -m app.train --config {run}/config.yaml --out {run} --resume" in Page(run).text


def test_a_long_run_with_many_pictures_stays_small(tmp_path):
    run = write_run(tmp_path / "run", steps=20_000, validations=200, pictures=31)
    (run / "tissue" / "slide-00.png").write_bytes(b"not a picture")
    page = Page(run)
    assert len(page.pictures) == 11  # of twelve, one cannot be decoded
    assert len(re.sub(r'src="data:image/jpeg[^"]*"', "", page.html)) < 500_000
    assert len(page.html) < 2_000_000
    assert Page(run).html == page.html


@pytest.mark.parametrize(
    "content",
    ['{"status": ', "[1]", '{"metrics": 3}', '{"best": "x"}', '{"tile_cache": {"a": 1}}', '{"pixels_per_second": []}'],
)
def test_command_names_the_summary_it_cannot_read(run, content, capsys):
    other = write_run(run.parent / "other")
    (run / "summary.json").write_text(content)
    for asked in ([str(run)], [str(other), str(run), "--out", str(run / "compare.html")]):
        assert main(asked) == 1
        assert str(run / "summary.json") in capsys.readouterr().err


@pytest.mark.process
def test_report_needs_no_torch_and_no_home(run):
    """Where nothing can be kept in the user's folder, as on nodes of a cluster, nothing is said of it."""
    code = f"import sys; from app.report import main; main([{str(run)!r}]); sys.exit('torch' in sys.modules)"
    known = {key: value for key, value in os.environ.items() if not key.startswith(("XDG", "MPL"))}
    told = subprocess.run(
        [sys.executable, "-c", code], check=True, env={**known, "HOME": "/dev/null"}, capture_output=True, text=True
    )
    assert (told.stdout.strip(), told.stderr) == (str(run / "report.html"), "")


def test_tiles_of_the_last_validation(run):
    add_examples(run)
    page = Page(run)
    for part in (
        "✗ wrong normal, predicted tumour <3> with 0.875; slide-0 at 0, 0",
        "✓ right normal, predicted with 0.875; slide-1 at 512, 0",
        "Dice 0.875; slide-2 at 1024, 0",
    ):
        assert part in page.text, part
    assert len(page.pictures) == 2 + 3
    (run / "examples" / "1.jpg").unlink()
    assert len(Page(run).pictures) == 2 + 2


def test_a_script_in_the_picture_of_a_step_does_not_run(run):
    picture = '<svg xmlns="http://www.w3.org/2000/svg"><text>µs</text><script>alert("from others")</script></svg>'
    (run / "schedule.svg").write_text(picture)
    page = Page(run)
    assert "One step, by rank" in page.headings("h2")
    assert "<script" not in page.html
    (source,) = (image.get("src") for image in page.root.iter("img") if "one step" in image.get("alt"))
    assert unquote(source) == f"data:image/svg+xml;charset=utf-8,{picture}"


def write_plan(run, **changed):
    plan = {"strategy": "ddp", "images_per_second": 20.0, "peak_memory_bytes": [3 << 30, 2 << 30]}
    plan |= {"cost_source": "calibration", "expected_error": 0.1}
    (run / "plan.json").write_text(json.dumps(plan | changed))


def test_the_forecast_stands_beside_the_measurement(run, page):
    assert "Forecast" not in page.text
    write_plan(run)
    write_summary(run, device_bytes=[2 << 30, 3 << 29], memory_limit_bytes=60 << 20)
    text = Page(run).text
    for part in (
        "images/s, reading included 20 15.87 −21 %",
        "images/s, fed from memory 20 16.02 −20 %",
        "tensors on the fullest rank 3 GiB 2 GiB −33 %",
        "Times of the plan: calibration; a layer's time is expected to be within 10 %.",
        "Memory that a rank may take 60 MiB",
        "Tensors on the device at most, by rank 2 GiB, 1.5 GiB",
    ):
        assert part in text
    assert "stage" not in text.partition("Forecast and measurement")[2].partition("Curves")[0]
    write_plan(run, stage_seconds=[0.25, 0.5], bubble=0.2)
    write_summary(run, device_bytes=[2 << 30, 3 << 29], stage_seconds=[0.3, 0.5], bubble=0.25)
    text = Page(run).text
    assert "stage 0, a microbatch 250 ms 300 ms +20 %" in text
    assert "stage 1, a microbatch 500 ms 500 ms +0 %" in text
    assert "waiting for other stages 20 % 25 % +5 points" in text
    write_plan(run, strategy="gpipe")  # the run was resumed with another strategy
    assert "Forecast" not in Page(run).text


FULL = LIMIT | {"device_bytes": [950], "microbatches": 8}
WAITS = {"data_wait_fraction": 0.31}
MAST = {"parallel": "mast", "strategy": "mast"}
SAVES = {"recompute": "block", "offload": "overlap"}


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ({}, None),
        (WAITS, "31.00 % of the step time waited for tiles. Try --cache DIR"),
        (WAITS | {"tile_cache": CACHE | {"full": "32 GiB"}}, "raise --cache-bytes"),
        (WAITS | {"tile_cache": CACHE | {"misses": 9}}, "a second epoch"),
        (WAITS | {"tile_cache": CACHE}, "put --cache on a faster disk"),
        (WAITS | {"tile_px": "slide"}, "--read-ahead=4GiB"),
        ({"idle_fraction": [0.0, 0.4]}, "try --parallel ddp --shares auto --microbatches 8."),
        ({"idle_fraction": [0.4, 0.4]}, None),
        ({"idle_fraction": [0.0, 0.4], **MAST}, None),
        ({"bubble": 0.5}, "try --microbatches 4, which fills more of it, or --parallel auto."),
        ({"bubble": 0.5, **MAST}, "try --parallel auto."),
        ({"bubble": 0.5, "microbatches": 8}, None),
        (
            {"status": "failed", "error": "out of memory on cuda:0: lower"},
            "Try --microbatches 8, then --recompute block;",
        ),
        ({"status": "failed", "error": "the loss is nan"}, None),
        (FULL | {"device_bytes": [950, 10]}, "95.00 % of 1000 B: for larger tiles"),
        (FULL | MAST | {"microbatches": 2}, "try --recompute block, then --offload overlap."),
        (FULL | {"parallel": "auto"}, "try --recompute block, then --offload overlap."),
        (FULL | {"recompute": "block"}, "try --offload overlap, then --ranks 4."),
        (FULL | SAVES | {"parallel": "single", "ranks": 1}, "try --parallel auto on more ranks."),
        (FULL | {"parallel": "fsdp", "strategy": "fsdp"}, "try --recompute block, then --ranks 4."),
        (FULL | {"stream_px": 512, "stream": "512"}, "try --stream 256, then --ranks 4."),
        (LIMIT | {"device_bytes": [400], "recompute": "block"}, None),
    ],
)
def test_what_to_try_next(run, summary, said, monkeypatch):
    config = {name: summary[name] for name in ("parallel", "recompute", "offload", "stream") if name in summary}
    (run / "config.yaml").write_text(yaml.safe_dump({"slides": "slides", "parallel": "ddp", **config}))
    monkeypatch.setattr("app.pages.run_page.curves", lambda *_: [])
    write_summary(run, **summary)
    page = Page(run)
    assert ("What to try next" in page.headings("h2")) == (said is not None)
    assert said is None or said in page.text


@pytest.mark.parametrize(("batch", "launcher", "advised"), [(8, None, True), (2, None, False), (8, "torchrun", False)])
def test_more_ranks_are_advised_inside_a_rank_as_later(run, batch, launcher, advised, monkeypatch):
    """A rank held twice its ranks against a batch for as many as there are."""
    config = {"slides": "slides", "parallel": "ddp", "batch": batch, **SAVES}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "env.json").write_text(json.dumps({"launcher": {"started_by": launcher}}))
    write_summary(run, **FULL | SAVES | {"global_batch": batch, "microbatches": batch})
    monkeypatch.setattr("app.pages.run_page.curves", lambda *_: [])
    later = Page(run).text
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for name in ("RANK", "LOCAL_RANK", "MEGATILE_RANK"):
        monkeypatch.setenv(name, "0")
    assert ("--ranks 4" in later) == ("--ranks 4" in Page(run).text) == advised


@pytest.fixture
def runs(tmp_path):
    found = [write_run(tmp_path / name) for name in ("first", "second & <last>")]
    (found[1] / "config.yaml").write_text(yaml.safe_dump({"slides": "slides", "model": "unet", "out": "elsewhere"}))
    (found[1] / "env.json").write_text(json.dumps({"python": "3.12.1", "packages": {"torch": "2.15.0"}, "gpus": []}))
    write_summary(found[1], strategy="master", images_per_second=7.5, metrics={"tile_auc": 0.95}, bubble=0.125)
    return found


def cells(root, title):
    """Cells under a heading."""
    section = next(one for one in root.iter("section") if (one.findtext("h2") or "") == title)
    return [["".join(cell.itertext()) for cell in line] for line in section.iter("tr")]


def test_runs_are_compared_by_what_differs_and_by_their_figures(runs, tmp_path):
    html = write_comparison(runs, tmp_path / "c.html").read_text()
    assert "http" not in html
    assert not re.search(r"<(script|link|iframe|object|img)\b|@import|url\(|src=|href=\"(?!#)", html)
    assert "<last>" not in html
    root, head = root_of(html), ["", "first", "second & <last>"]
    assert cells(root, "Settings that differ") == [head, ["model", "resnet18", "unet"]]
    assert cells(root, "Environment that differs") == [head, ["python", "3.11.7", "3.12.1"]]
    found = {name: values for name, *values in cells(root, "Figures")}
    assert found["Strategy"] == ["ddp", "master"]
    assert found["Speed, data loading included"] == ["15.87 images/s", "7.5 images/s"]
    assert found["Bubble of the last step"] == ["–", "12.50 %"]
    assert found["Tile AUC"] == ["0.9123", "0.95"]
    assert found["Peak memory, by rank"] == ["3 GiB, 2 GiB"] * 2
    assert found["Slide AUC"] == ["undefined", "–"]
    for name in ("metrics.csv", "validation.csv", "summary.json"):  # a run without a step
        (runs[1] / name).unlink()
    root = root_of(write_comparison(runs, tmp_path / "c.html").read_text())
    assert ["Strategy", "ddp", "–"] in cells(root, "Figures")
    assert f"tensorboard --logdir {tmp_path}" in [pre.text for pre in root.iter("pre")]


def test_command_compares_several_or_says_why_not(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*map(str, runs)]) == 0
    assert capsys.readouterr().out.strip() == "compare.html"
    assert main([*map(str, runs), "--out", "new/page.html"]) == 0
    assert (tmp_path / "new" / "page.html").is_file()
    assert not list(tmp_path.glob("*.tmp"))
    (runs[1] / "bench.json").write_text("{}")
    capsys.readouterr()
    for asked, code, message in (
        ((runs[0], runs[0]), 2, "each run once"),
        ((runs[0], tmp_path / "nowhere"), 1, "does not exist"),
        (runs, 2, "a benchmark is reported alone"),
    ):
        assert main([*map(str, asked), "--out", "c.html"]) == code
        assert message in capsys.readouterr().err
    assert not (tmp_path / "c.html").exists()
