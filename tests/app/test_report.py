from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from xml.etree import ElementTree

import pytest

from app.pages import run_files
from app.pages.run_page import write_report
from app.report import main
from tests.helpers.run_folder import add_examples, write_csv, write_run, write_summary

CACHE = {"hits": 5, "misses": 1, "stored": 1, "damaged": 0, "full": None, "hit_s": 1.0, "slide_s": 1.0, "store_s": 1.0}
LIMIT = {"memory_limit_bytes": 1000, "recompute": "none", "offload": "none"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def page(run: Path) -> ElementTree.Element:
    return ElementTree.fromstring(write_report(run).read_text().removeprefix("<!DOCTYPE html>"))


def text(run: Path) -> str:
    return " ".join(" ".join(page(run).itertext()).split())


def charts(run: Path) -> dict[str, str]:
    """SVG of each chart, by its title."""
    svgs = {
        image.get("alt", ""): image.get("src", "").partition("svg+xml;base64,")[2] for image in page(run).iter("img")
    }
    return {title: base64.b64decode(svg).decode() for title, svg in svgs.items() if svg}


def pictures(run: Path) -> list[str]:
    """Descriptions of the JPEG pictures."""
    return [image.get("alt", "") for image in page(run).iter("img") if "image/jpeg" in image.get("src", "")]


def headings(run: Path) -> list[str]:
    return ["".join(heading.itertext()) for heading in page(run).iter("h2")]


def titles(run: Path) -> list[str]:
    return ["".join(heading.itertext()) for heading in page(run).iter("h3")]


def test_page_needs_nothing_but_itself(run):
    html = write_report(run).read_text()
    assert "http" not in html
    assert not re.search(r"<(script|link|iframe|object)\b|@import|url\(", html)
    sources = re.findall(r'src="([^,"]*),[^"]*"', html)
    assert sources == ["data:image/svg+xml;base64"] * 5 + ["data:image/jpeg;base64"] * 2


def test_page_is_light_and_dark(run):
    html = write_report(run).read_text()
    assert "prefers-color-scheme: dark" in html
    assert '<meta name="color-scheme" content="light dark"/>' in html
    used = set(re.findall(r"var\((--\w+)\)", html)) - {"--series"}
    light, dark = html.split("prefers-color-scheme: dark", 1)
    for colour in used:
        assert f"{colour}:" in light
        assert f"{colour}:" in dark


def test_page_says_what_the_run_was_and_gave(run):
    told = text(run)
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
        "python -m app.train --config runs/demo/config.yaml --out runs/demo-again",
        "packages torch 2.15.0",
        "the last line of the log",
    ):
        assert part in told, part


def test_classes_and_slides_are_counted_from_the_predictions(run):
    told = text(run)
    assert "tumour <3> 2 1 50 % 1 1" in told  # 2 slides, 1 right, 1 said normal, 1 said tumour
    assert told.index("slide-b") < told.index("slide-a")  # the wrong one first
    assert "train 8 4 4 4" in told  # slides, patients, of each class


def test_segmentation_shows_dice_of_classes_and_slides(run):
    rows = [("slide-a", "val", 0.9, 0.8), ("slide-b", "val", 0.7, 0.4), ("slide-c", "val", 0.5, "")]
    write_csv(run / "predictions.csv", ("slide", "split", "dice_background", "dice_gland"), rows)
    told = text(run)
    assert "gland 2 0.600 0.600 0.400 0.800" in told
    assert "slide-c val 0.500 –" in told


def test_curves_of_a_whole_run(run):
    assert titles(run) == ["Loss", "Validation scores", "Throughput", "Time of a step", "Learning rate"]
    assert list(charts(run)) == titles(run)


def test_undefined_scores_are_left_out_of_the_curves(run):
    legend = charts(run)["Validation scores"]
    assert "Tile AUC" in legend
    assert "Slide AUC" not in legend
    assert "Dice" not in legend


@pytest.mark.parametrize(
    "missing",
    [
        "env.json",
        "run.log",
        "tissue",
        "splits.csv",
        "failed_slides.csv",
        "summary.json",
        "metrics.csv",
        "validation.csv",
        "predictions.csv",
    ],
)
def test_each_file_but_the_settings_may_be_missing(run, missing):
    path = run / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "Settings" in headings(run)


def test_only_the_settings(tmp_path):
    (tmp_path / "config.yaml").write_text("model: resnet18\n")
    assert headings(tmp_path) == ["Run it again", "Settings"]
    assert "no summary" in text(tmp_path)


def test_one_step_without_validation(tmp_path):
    run = write_run(tmp_path / "run", steps=1, validations=1, pictures=0)
    (run / "validation.csv").unlink()
    assert titles(run) == ["Loss", "Throughput", "Time of a step", "Learning rate"]
    assert not re.search(r"\b(nan|inf)\b", " ".join([text(run), *charts(run).values()]))


def test_values_that_are_no_numbers_leave_gaps(run):
    lines = (run / "metrics.csv").read_text().splitlines()
    lines[3] = lines[3].replace(lines[3].split(",")[3], "nan", 1)
    lines[5] = "5,0.5,40,inf,0.001,0.5,,16"
    lines[-1] = lines[-1][:7]  # cut while it was written
    (run / "metrics.csv").write_text("\n".join(lines))
    paths = [path for svg in charts(run).values() for path in re.findall(r'<path d="([^"]*)" clip-path', svg)]
    assert not any("nan" in path or "inf" in path for path in paths)
    assert max(path.count("M") for path in paths) >= 2


def test_an_end_with_an_error_shows_it_and_how_to_go_on(run):
    write_summary(run, status="failed", error="step 17: the loss is nan & void")
    told = text(run)
    assert "step 17: the loss is nan & void" in told
    assert "python -m app.train --config runs/demo/config.yaml --resume" in told


def test_rerun_under_torchrun_names_it(run):
    (run / "env.json").write_text('{"launcher": {"started_by": "torchrun"}}')
    assert "torchrun --nproc-per-node 2 -m app.train --config" in text(run)


def test_at_most_twelve_small_pictures(tmp_path):
    run = write_run(tmp_path / "run", pictures=31)
    (run / "tissue" / "slide-00.png").write_bytes(b"not a picture")
    assert len(pictures(run)) == 11  # of twelve, one cannot be decoded
    assert (run / "report.html").stat().st_size < 2_000_000


def test_a_long_run_stays_small(tmp_path):
    run = write_run(tmp_path / "run", steps=20_000, validations=200)
    assert write_report(run).stat().st_size < 500_000


def test_same_files_same_page(run):
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_command_prints_the_path(run, capsys):
    (run / "report.html").unlink(missing_ok=True)
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").exists()


def test_command_refuses_what_is_no_run_folder(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "config.yaml is missing" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "does not exist" in capsys.readouterr().err


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
    assert told.stderr == ""


def test_bytes_have_units(run):
    write_summary(run, device_bytes=[3 << 20, 5 << 20], memory_limit_bytes=60 << 20)
    told = text(run)
    assert "Memory that a rank may take 60 MiB" in told
    assert "Tensors on the device at most, by rank 3 MiB, 5 MiB" in told


def test_metrics_of_a_long_run_are_read_as_numbers(tmp_path):
    """8 bytes a number, and not a dictionary of texts for each step; a torn row is left out, a cut one has gaps."""
    write_run(tmp_path / "run")
    names = [f"column{k}" for k in range(7)]
    rows, table = 20_000, tmp_path / "run" / "metrics.csv"
    table.write_text(",".join(["step", *names]) + "\n" + "".join(f"{k}{',1.5' * 7}\n" for k in range(rows)) + "7,2\nx")
    tracemalloc.start()
    try:
        metrics = run_files.read_run(tmp_path / "run").metrics
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(metrics["step"]) == rows + 1
    assert metrics["column0"][-1] == 2.0
    assert math.isnan(metrics["column6"][-1])
    assert peak < 300 * rows


def test_tiles_of_the_last_validation(run):
    add_examples(run)
    told = text(run)
    for part in (
        "✗ wrong normal, predicted tumour <3> with 0.875; slide-0 at 0, 0",
        "✓ right normal, predicted with 0.875; slide-1 at 512, 0",
        "Dice 0.875; slide-2 at 1024, 0",
    ):
        assert part in told, part
    assert len(pictures(run)) == 2 + 3
    (run / "examples" / "1.jpg").unlink()
    assert len(pictures(run)) == 2 + 2


def write_plan(run, **changed):
    plan = {
        "strategy": "ddp",
        "images_per_second": 20.0,
        "peak_memory_bytes": [3 << 30, 2 << 30],
        "cost_source": "calibration",
        "expected_error": 0.1,
    }
    (run / "plan.json").write_text(json.dumps(plan | changed))


def test_the_forecast_stands_beside_the_measurement(run):
    assert "Forecast" not in text(run)
    write_plan(run)
    write_summary(run, device_bytes=[2 << 30, 3 << 29])
    told = text(run)
    assert "images/s, reading included 20 15.87 −21 %" in told
    assert "images/s, fed from memory 20 16.02 −20 %" in told
    assert "tensors on the fullest rank 3 GiB 2 GiB −33 %" in told
    assert "Times of the plan: calibration; a layer's time is expected to be within 10 %." in told
    assert "stage" not in told.partition("Forecast and measurement")[2].partition("Curves")[0]
    write_plan(run, stage_seconds=[0.25, 0.5], bubble=0.2)
    write_summary(run, device_bytes=[2 << 30, 3 << 29], stage_seconds=[0.3, 0.5], bubble=0.25)
    told = text(run)
    assert "stage 0, a microbatch 250 ms 300 ms +20 %" in told
    assert "stage 1, a microbatch 500 ms 500 ms +0 %" in told
    assert "waiting for other stages 20 % 25 % +5 points" in told
    write_plan(run, strategy="gpipe")  # the run was resumed with another strategy
    assert "Forecast" not in text(run)


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ({}, None),
        ({"data_wait_fraction": 0.31}, "31.00 % of the step time waited for tiles. Try --cache DIR"),
        ({"data_wait_fraction": 0.31, "tile_cache": CACHE | {"full": "32 GiB"}}, "raise --cache-bytes"),
        ({"data_wait_fraction": 0.31, "tile_cache": CACHE | {"misses": 9}}, "a second epoch"),
        ({"data_wait_fraction": 0.31, "tile_cache": CACHE}, "put --cache on a faster disk"),
        ({"data_wait_fraction": 0.31, "tile_px": "slide"}, "--read-ahead=4GiB"),
        ({"idle_fraction": [0.0, 0.4]}, "--shares auto with --microbatches 8"),
        ({"idle_fraction": [0.4, 0.4]}, None),
        ({"bubble": 0.5}, "--microbatches 4, which fills more of it"),
        ({"bubble": 0.5, "microbatches": 8}, None),
        (
            {"status": "failed", "error": "out of memory on cuda:0: lower"},
            "Try --microbatches 8, then --recompute block;",
        ),
        ({"status": "failed", "error": "the loss is nan"}, None),
        (LIMIT | {"device_bytes": [950, 10], "microbatches": 8}, "95.00 % of 1000 B: for larger tiles"),
        (
            LIMIT | {"device_bytes": [950], "recompute": "block", "microbatches": 8},
            "try --offload overlap, then --stream 512",
        ),
        (LIMIT | {"device_bytes": [950], "stream_px": 512, "microbatches": 8}, "try --stream 256, then --ranks 4"),
        (LIMIT | {"device_bytes": [400], "recompute": "block"}, "leave out --recompute"),
        (LIMIT | {"device_bytes": [700], "recompute": "block"}, None),
    ],
)
def test_what_to_try_next(run, summary, said):
    write_summary(run, **summary)
    assert ("What to try next" in headings(run)) == (said is not None)
    assert said is None or said in text(run)
