"""The table of `features.py`: whole, and every test that it names exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from features import FEATURES, Feature

TESTS = Path(__file__).parent


def functions_of(file: str) -> set[str]:
    """Names of the functions, and of the methods of classes, at the top of a test file."""
    body = ast.parse((TESTS / file).read_text()).body
    inside = [item for node in body if isinstance(node, ast.ClassDef) for item in node.body]
    return {node.name for node in (*body, *inside) if isinstance(node, ast.FunctionDef)}


def test_every_number_is_there_once() -> None:
    assert [feature.number for feature in FEATURES] == list(range(1, 67))


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: f"F{feature.number}")
def test_a_feature_is_shown_by_tests_or_says_why_not(feature: Feature) -> None:
    assert bool(feature.tests) != bool(feature.why_not)
    for test in feature.tests:
        file, name = test.split("::")
        assert name.startswith("test_"), f"{name} would not be collected"
        assert name in functions_of(file), f"{file} has no {name}"


CASES = {"A": 6, "B": 3, "C": 4, "D": 3, "E": 4, "F": 3, "H": 5, "I": 3, "J": 7}
"""Real faults of other caches, by kind: so many of each are held as small conditions, `test_case_<kind><n>_...`."""
DRAFT_CASES = {"G3", "G4"}


def test_every_case_is_held_by_a_test() -> None:
    names = {name for file in TESTS.glob("test_*.py") for name in functions_of(file.name)}
    held = {name.split("_")[2].rstrip("abc") for name in names if name.startswith("test_case_")}
    assert held >= DRAFT_CASES | {f"{kind}{n}" for kind, count in CASES.items() for n in range(1, count + 1)}
