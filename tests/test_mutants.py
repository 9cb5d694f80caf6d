"""The mutants still fit the source, and a handful of them is found. All of them take an hour: docs/mutants.md."""

import re

import pytest

from tests.mutants.detectors import DETECTORS, Found, detect, examine
from tests.mutants.results import Results, cell, holes, table
from tests.mutants.table import MUTANTS
from tests.mutants.tree import ROOT, BadMutant, Mutant, copied, mutated

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
SEEDS = 2
"""Of the explorer; these mutants are found in nearly every seed."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_exactly_once_and_compiles(mutant: Mutant) -> None:
    assert mutated(mutant) != (ROOT / mutant.file).read_text(encoding="utf-8")


def test_there_are_enough_mutants_and_each_has_a_name_of_its_own_and_a_guarantee() -> None:
    assert len(BY_NAME) == len(MUTANTS) >= 32
    rules = re.compile(r"\b[SL]\d\b|^Fairness")
    assert [mutant.name for mutant in MUTANTS if not rules.search(mutant.breaks)] == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("no such text", "", "0 times"), ("return", "pass", "times"), ("NS_PER_S =", "NS_PER_S (", "compile")],
)
def test_a_mutant_that_does_not_fit_is_an_error_of_the_table(old: str, new: str, said: str) -> None:
    with pytest.raises(BadMutant, match=said):
        mutated(Mutant("wrong", "core/units.py", old, new, "nothing"))


def test_only_the_copy_is_changed_and_it_is_gone_afterwards() -> None:
    mutant = BY_NAME["reservation-off"]
    before = (ROOT / mutant.file).read_text(encoding="utf-8")
    with copied(mutant) as tree:
        assert (tree / mutant.file).read_text(encoding="utf-8") == mutated(mutant) != before
    assert not tree.exists()
    assert (ROOT / mutant.file).read_text(encoding="utf-8") == before


@pytest.mark.parametrize(
    ("name", "detector"),
    [
        ("demand-consumed-by-grant", "verifier"),
        ("confirmation-skipped", "verifier"),
        ("freed-gpu-credited-twice", "explorer"),
        ("rounding-floored", "unit"),
    ],
)
def test_a_mutant_is_found(name: str, detector: str) -> None:
    found = examine(BY_NAME[name], detector, SEEDS)
    assert found.found and not found.how.startswith(("the detector", "crash ImportError")), found


def test_without_a_mutant_nothing_is_found_and_what_is_never_loaded_is_not_judged() -> None:
    with copied(None) as tree:
        assert not detect(tree, None, "explorer", 1).found
        assert detect(tree, BY_NAME["epoch-unchecked"], "verifier").blind


def test_the_table_says_what_found_each_and_names_the_holes(tmp_path) -> None:
    file = tmp_path / "results.json"
    kept = Results(file)
    some = list(MUTANTS[:2])
    nothing = Found(False)
    for mutant in some:
        for detector in DETECTORS:
            kept.put(mutant, detector, nothing._replace(found=mutant is some[0] and detector == "unit", how="test_x"))
    again = Results(file)
    assert again.of(some[0]) == kept.of(some[0])
    assert again.of(some[0]._replace(new="something else")) == {}
    assert holes(some, again) == [some[1].name]
    assert cell("unit", again.of(some[0])["unit"]) == "yes"
    assert f"Found by nobody: {some[1].name}." in table(some, again)


def test_every_mutant_is_in_the_published_table_and_none_was_missed() -> None:
    page = (ROOT / "docs/mutants.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \|", page, re.M) == [mutant.name for mutant in MUTANTS]
    assert "Found by nobody: none." in page
