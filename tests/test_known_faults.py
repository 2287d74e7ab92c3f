"""Every fault that this field is known to have met is covered by a test that names it, or has a reason why not.

The ids are those of the project's list of known faults, by kind. A test covers one by naming it in its docstring.
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

KNOWN = {
    "FROZEN": "B01 B02 B04 B05 B06 B07 B08 B09 B10",
    "PAD": "B12 B13 B14 B15 B17 B18 B19 B20 B21 B22",
    "LIFE": "B23 B24 B26 B27 B28 B29 B30",
    "COUNT": "B31 B32 B33 B35 B36 B37 B38 B39",
    "EDGE": "B41 B42 B43 B44 B45 B46 B47",
    "MAP": "B50 B51",
    "ORDER": "B52 B53 B54 B55 B57 B58 B59 B60 B61 B62",
    "CAPTURE": "B63 B64 B65 B66 B67 B68 B69 B70 B71",
    "ADDR": "B72 B73 B74 B75 B76 B77",
    "RANGE": "B78 B79",
    "NUM": "B81 B82 B83 B85",
    "UNFLUSHED": "B87 B88 B89 B90 B91 B92",
    "BUILD": "B93 B94 B95",
    "COST": "B96 B97 B98 B99",
}

# Faults that cannot happen here, and why. None so far: where a part does not apply, the test's docstring says so.
CANNOT_APPLY: dict[str, str] = {}


def named_in_docstrings() -> dict[str, list[str]]:
    """Tests by the ids that their docstrings name; a docstring of a class or module covers nothing."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for fault in re.findall(r"\bB\d\d\b", ast.get_docstring(node) or ""):
                    found.setdefault(fault, []).append(f"{path.name}::{node.name}")
    return found


def known() -> set[str]:
    return {fault for faults in KNOWN.values() for fault in faults.split()}


@pytest.mark.parametrize("kind", KNOWN)
def test_every_known_fault_has_a_test_or_a_reason(kind):
    """A fault without either is a gap."""
    covered = named_in_docstrings()
    gaps = [fault for fault in KNOWN[kind].split() if fault not in covered and fault not in CANNOT_APPLY]
    assert gaps == []


def test_no_test_names_a_fault_that_is_not_known():
    """A mistyped id would cover nothing."""
    strangers = {fault: tests for fault, tests in named_in_docstrings().items() if fault not in known()}
    assert strangers == {}


def test_no_fault_has_both_a_test_and_a_reason_why_it_cannot_apply():
    """The table of reasons holds no leftovers."""
    assert sorted(set(CANNOT_APPLY) & set(named_in_docstrings())) == []
    assert set(CANNOT_APPLY) <= known()
