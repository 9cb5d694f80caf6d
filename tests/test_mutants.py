"""The mutants still fit the source, and a handful of them is found. All of them take half an hour: docs/mutants.md."""

import re
from pathlib import Path

import pytest

from tests.mutants.__main__ import main
from tests.mutants.detectors import DETECTORS, DIED, Found, detect, examine
from tests.mutants.results import Results, cell, holes, table
from tests.mutants.table import MUTANTS
from tests.mutants.tree import ROOT, BadMutant, Mutant, copied, digest, mutated

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


@pytest.mark.parametrize(
    "arguments", [["no-such"], ["--seeds", "-1"], ["--by", "nobody"], ["--json", "."], ["--table", f"{__file__}/x"]]
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["reservation-off", *arguments])
    except SystemExit as refused:
        code = refused.code
    printed = capsys.readouterr()
    assert code == 2 and not printed.out
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1


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
    assert found.found and not found.how.startswith((DIED, "crash ImportError")), found


def test_without_a_mutant_nothing_is_found_and_what_is_never_loaded_is_not_judged() -> None:
    with copied(None) as tree:
        assert not detect(tree, None, "explorer", 1).found
        assert detect(tree, BY_NAME["epoch-unchecked"], "verifier").blind


def test_the_table_says_what_found_each_and_names_the_holes(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    kept = Results(file, "this tree")
    found, missed, unseen = MUTANTS[:3]
    nothing = Found(False)
    for mutant in (found, missed):
        for detector in DETECTORS:
            kept.put(mutant, detector, nothing._replace(found=mutant is found and detector == "unit", how="test_x"))
    kept.put(None, "unit", nothing)
    again = Results(file, "this tree")
    assert again.of(found) == kept.of(found)
    assert again.of(found._replace(new="something else")) == {}
    assert holes([found, missed, unseen], again) == [missed.name]
    assert cell("unit", again.of(found)["unit"]) == "yes"
    page = table([found, missed, unseen], again)
    assert f"Found by nobody: {missed.name}. Still to be found: {unseen.name}." in page
    assert "Without a mutant, which the runner tries first: unit -, property ?" in page


def test_the_unchanged_packages_are_judged_anew_when_anything_in_them_has_changed(tmp_path: Path) -> None:
    """Or a test that fails by itself would find every mutant."""
    with copied(None) as tree:
        before = digest(tree)
        kept = Results(tmp_path / "results.json", before)
        kept.put(None, "unit", Found(False))
        (tree / "docs/mutants.md").write_text("another page")
        assert digest(tree) == before
        (tree / "tests/test_planner.py").write_text("assert False")
        assert digest(tree) != before
        assert Results(tmp_path / "results.json", before).of(None)
        assert not Results(tmp_path / "results.json", digest(tree)).of(None)


def test_every_mutant_is_in_the_published_table_and_was_found_unless_the_page_says_that_it_was_not_yet() -> None:
    page = (ROOT / "docs/mutants.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| .*? \| (.*) \|$", page, re.M))
    assert list(rows) == [mutant.name for mutant in MUTANTS]
    [missed, unseen] = re.findall(r"Found by nobody: (.*?)\. Still to be found: (.*?)\.", page)[0]
    assert missed == "none"
    by_somebody = re.compile(r"\b(yes|broken|stuck|crash|hung|[1-9]\d*/\d+)\b")
    nobody = [name for name, cells in rows.items() if not by_somebody.search(cells)]
    assert nobody == ([] if unseen == "none" else unseen.split(", "))
