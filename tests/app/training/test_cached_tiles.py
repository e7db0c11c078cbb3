"""``--cache`` from end to end: the same run with and without it, also when resumed, and what it tells."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from app.launch.rank_guard import Interrupt
from app.settings.run import DataSettings, RunConfig, StreamSettings
from app.settings.strategy import StrategySettings
from pipelines.tiles.index_settings import IndexSettings
from tests.app.conftest import QUICK, Train, summary_of
from tests.app.test_train import equal, model_of


@pytest.mark.long
def test_a_run_is_the_same_with_a_cache_and_resumed_with_a_full_one(
    classify_slides: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--slides", classify_slides, *QUICK, "--mpp", "1", "--steps", "6")
    assert train(*common, "--out", tmp_path / "plain").returncode == 0
    assert summary_of(tmp_path / "plain")["tile_cache"] is None
    (tmp_path / "cached").mkdir()
    shutil.copy(tmp_path / "plain" / "tiles.parquet", tmp_path / "cached")
    cached = (*common, "--cache", tmp_path / "cache", "--out", tmp_path / "cached")
    asked = iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Interrupt, "requested", property(lambda _: next(asked), lambda _, value: None), raising=False)
        done = train(*cached)
    assert (done.returncode, summary_of(tmp_path / "cached")["steps"]) == (0, 2), done.stderr
    first = summary_of(tmp_path / "cached")["tile_cache"]
    assert (first["stored"], first["damaged"]) == (36, 0), "every tile of the training slides, once"
    assert first["hits"] > 0 < first["slide_s"]
    done = train(*cached, "--cache-bytes", "1KiB", "--resume")
    assert done.returncode == 0, done.stderr
    assert equal(model_of(tmp_path / "cached"), model_of(tmp_path / "plain"))
    last = summary_of(tmp_path / "cached")["tile_cache"]
    assert last["hits"] > 0 == last["stored"]
    assert last["full"] == "it has its 1024 bytes"
    assert f"{last['hits']} of {last['hits'] + last['misses']} tiles read from it" in done.stdout
    report = (tmp_path / "cached" / "report.html").read_text()
    assert "Tiles read from the cache" in report
    assert "The cache takes no more tiles" in report
    assert json.dumps(summary_of(tmp_path / "plain")["metrics"]) == json.dumps(
        summary_of(tmp_path / "cached")["metrics"]
    )


def test_wrong_sizes_and_whole_slides_are_refused() -> None:
    asked = RunConfig(DataSettings(Path("slides")), stream=StreamSettings(cache=Path("c"), cache_bytes="much"))
    assert asked.validate() == ["--cache-bytes takes a size such as 512MiB or 32GiB; got 'much'"]
    whole = RunConfig(
        DataSettings(Path("slides")),
        IndexSettings(tile="slide"),
        stream=StreamSettings(cache=Path("c")),
        strategy=StrategySettings(batch=1, microbatches=1, parallel="single"),
    )
    refused = "--cache keeps tiles of one size, which those of {} are not: leave it out"
    assert whole.validate() == [refused.format("--tile slide")]
    pictures = RunConfig(DataSettings(Path("slides")), IndexSettings(pictures="resize"), stream=whole.stream)
    assert pictures.validate() == [refused.format("--pictures resize")]
