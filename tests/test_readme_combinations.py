"""The README shows the table of combinations that the code goes by."""

from __future__ import annotations

from helpers import ROOT

from graphkv.selection.create import render_combinations

BEGIN, END = "<!-- combinations -->", "<!-- /combinations -->"


def test_case_J7_the_readme_shows_the_table_that_is_checked() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    shown = text.split(BEGIN)[1].split(END)[0].strip()
    assert shown == render_combinations(), "paste what graphkv.selection.create.render_combinations() gives"
