"""The command-line surface, the list of files and the tables of results are what they are made from."""

from __future__ import annotations

import re

from tests.golden.regenerate import (
    DEVELOPER,
    FILES,
    FLAGS,
    RESULTS,
    TABLE,
    flags,
    page_with_developer_settings,
    page_with_results,
    page_with_tree,
)


def test_no_flag_appears_or_vanishes_unseen() -> None:
    assert flags() == FLAGS.read_text(), "a flag or a default changed: run `make golden` and look at the diff"


def test_developer_settings_are_told() -> None:
    text = DEVELOPER.read_text()
    assert page_with_developer_settings(text) == text, "a developer setting changed: run `make golden`"


def test_list_of_files_is_todays() -> None:
    text = FILES.read_text()
    assert page_with_tree(text) == text, "files or their first lines changed: run `make golden`"


def test_results_are_those_of_the_benchmarks() -> None:
    text = RESULTS.read_text()
    assert page_with_results(text) == text, (
        "a benchmark was run again: run `make golden`, and read what stands above it"
    )


def test_every_result_has_its_date_machine_command_and_rows() -> None:
    sections = re.split(r"^### ", RESULTS.read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) > 20
    for section in sections:
        name, text = section.split("\n", 1)
        above, _, table = text.partition(f"<!-- table of {name} -->")
        assert re.search(r"\d+ November 2026, .*(EPYC|Xeon)", above), name
        assert f"`python -m benchmarks.{name}." in above, name
        assert table.count("\n|") > 2, f"{name} has no table"


def test_results_that_are_quoted_in_short_are_there() -> None:
    quoted = set(re.findall(r"\]\(#([\w-]+)\)", RESULTS.read_text()))
    assert len(quoted) > 20
    assert quoted <= set(TABLE.findall(RESULTS.read_text()))
