"""The table has a line for each part, and rules where the model is cut."""

from __future__ import annotations

import pytest

from parallel.draw.graph_text import graph_text
from parallel.draw.model_view import ModelView
from parallel.draw.text_width import fitted, text_width
from parallel.graph.partition import partition_at
from parallel.units import bytes_text, flops_text, seconds_text
from tests.helpers.graph_pictures import traced


def test_table_of_a_cut_unet() -> None:
    graph = traced("unet")
    seconds = [0.001] * len(graph.layers)
    text = graph_text(
        ModelView(graph, partition=partition_at(graph, ["down_2", "decoder.2"]), forward_s=seconds, title="U-Net")
    )
    lines = text.splitlines()
    assert lines[0] == "U-Net"
    assert lines[2].split() == ["#", "part", "kind", "takes", "gives", "params", "saved", "flops", "forward"]
    names = [line.split()[:2] for line in lines if "encoder." in line]
    assert names == [[str(k + 1), f"encoder.{k}"] for k in range(5)]
    decoder = next(line for line in lines if "decoder.3" in line)
    assert " 1, 8 " in decoder  # the first skip and the level below
    cuts = [k for k, line in enumerate(lines) if line.startswith("──── cut: ")]
    # Skips of two levels, and the value on its way: 64 + 32 + 16 MiB, then 64 + 32 + 16 from below.
    assert [lines[k].strip("─ ") for k in cuts] == ["cut: 3 values, 112 MiB", "cut: 3 values, 112 MiB"]
    assert [lines[k - 1].split(":")[0] for k in cuts] == ["stage 0", "stage 1"]
    assert lines[-1].startswith("stage 2: params ")
    assert lines[-1].endswith(f"forward {len(graph.layers) - graph.position['decoder_2_up']} ms")
    assert max(map(len, lines[2:])) <= 140


def test_table_of_a_whole_model() -> None:
    graph = traced("torchvision:densenet121")
    lines = graph_text(ModelView(graph, level="block")).splitlines()
    assert "cut" not in "".join(lines)
    assert lines[-1].startswith("all: params 26.5 MiB, saved ")
    last = next(line for line in lines if "denseblock1.denselayer6" in line)
    assert " 1-6 " in last
    assert len(graph_text(ModelView(graph, level="layer")).splitlines()) == len(graph.layers) + 4


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 << 19, "1.5 MiB"),
        (1023.9999 * 2**20, "1 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes(count: float, expected: str) -> None:
    assert bytes_text(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (3e-10, "0.3 ns"), (3.21e-5, "32.1 µs"), (0.0998, "99.8 ms"), (0.99996, "1 s"), (754, "754 s")],
)
def test_seconds(seconds: float, expected: str) -> None:
    assert seconds_text(seconds) == expected


@pytest.mark.parametrize(("flops", "expected"), [(0, "0"), (999.96, "1 k"), (4.12e9, "4.12 G"), (2e15, "2 P")])
def test_flops(flops: float, expected: str) -> None:
    assert flops_text(flops) == expected


def test_words_are_cut_to_fit() -> None:
    name = "features.denseblock3.denselayer24"
    assert fitted(name, 13, 1000) == name
    begin, end = fitted(name, 13, 120), fitted(name, 13, 120, keep_end=True)
    assert begin.endswith("…")
    assert end.endswith("layer24")
    assert all(80 < text_width(text, 13) <= 120 for text in (begin, end))
    assert text_width("WWW", 10) > 2 * text_width("iii", 10)
