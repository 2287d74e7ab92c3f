"""The faults of tools/mutants are still faults of this tree; whether the suite finds them is for tools/mutate.py."""

import ast
from pathlib import Path

import pytest
from mutants import MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_stands_in_the_code_once_and_is_code_itself(mutant):
    """One that the code has outgrown tests nothing, and one that does not parse is found by everything."""
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    ast.parse(text.replace(mutant.old, mutant.new))
    assert all((ROOT / name.partition("::")[0]).exists() for name in mutant.tests)


def test_no_two_mutants_have_one_name():
    """`--only` picks by name."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
