"""The command-line surface and the README's folder tree are what the code says they are."""

from __future__ import annotations

from tests.golden.regenerate import FLAGS, README, flags, readme_with_tree


def test_no_flag_appears_or_vanishes_unseen() -> None:
    assert flags() == FLAGS.read_text(), "a flag or a default changed: run `make golden` and look at the diff"


def test_folder_tree_of_the_readme_is_todays() -> None:
    text = README.read_text()
    assert readme_with_tree(text) == text, "files or their first lines changed: run `make golden`"
