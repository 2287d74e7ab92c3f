"""The tree keeps its own rules: short files, complete docstrings with shapes, tests whose names read as sentences."""

import ast
import importlib
import inspect
import re
from collections import Counter
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("graphrt", "graphrt.capture", "graphrt.testing")
# Called by nobody here: a name of the system whose contract this project keeps, which its engine calls.
OF_THE_CONTRACT = {"commit_f32"}
PUBLIC = [
    pytest.param(package, name, id=f"{package}.{name}")
    for package in PACKAGES
    for name in importlib.import_module(package).__all__
]


def package_files():
    """Every Python file that is installed."""
    return sorted(path for folder in ("graphrt", "kernels", "capture") for path in (ROOT / folder).rglob("*.py"))


def files_of_tests():
    """Every file of tests."""
    return sorted((ROOT / "tests").rglob("test_*.py"))


def documented_in_source(module, name):
    """The string below the assignment to `name`."""
    for statement, following in pairwise(ast.parse(inspect.getsource(module)).body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if name in [target.id for target in targets if isinstance(target, ast.Name)]:
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            return following.value.value if is_text else ""
    return ""


def public_members(cls):
    """Methods and properties that a class of ours has in the open, those of its bases of ours included."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("graphrt")]
    members = {name: member for base in reversed(bases) for name, member in vars(base).items()}
    for name, member in members.items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function, isinstance(member, property)


def tensor_parameters(function):
    """Names of the parameters that take tensors."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if re.search(r"\bTensor\b", str(p.annotation)) and "Mapping" not in str(p)]


def test_no_file_of_the_package_or_the_tools_is_longer_than_400_lines():
    """Longer ones hold more than one idea."""
    files = [*package_files(), *(ROOT / "tools").rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > 50
    assert {name: n for name, n in lengths.items() if n > 400} == {}


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_every_public_name_is_documented(package, name):
    """Functions, classes and their open methods by a docstring; constants and types by the string behind them."""
    thing = getattr(importlib.import_module(package), name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        # A dataclass without a docstring gets its signature as one.
        assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), f"{name} has no docstring"
    else:
        modules = [importlib.import_module(f"graphrt.{part}") for part in ("sentinels", "capture.step")]
        assert any(documented_in_source(module, name) for module in modules), f"{name} is not documented"
    if inspect.isclass(thing):
        bare = [member for member, function, _ in public_members(thing) if not function.__doc__]
        assert bare == [], f"{name}: no docstring on {bare}"


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_every_public_tensor_has_its_shape_in_words(package, name):
    """A docstring names each tensor argument and has shapes in brackets; that of a class has a line for each field."""
    thing = getattr(importlib.import_module(package), name)
    functions = [(name, thing)] if inspect.isfunction(thing) else []
    if inspect.isclass(thing):
        functions += [(f"{name}.{m}", f) for m, f, is_property in public_members(thing) if not is_property]
        for field, annotation in inspect.get_annotations(thing).items():
            if not field.startswith("_") and "Tensor" in str(annotation):
                line = re.search(rf"^(\w+, )*{field}\b.*\[", inspect.getdoc(thing), flags=re.MULTILINE)
                assert line, f"{name}.{field}: no shape in the docstring of the class, where help() shows it"
    for label, function in functions:
        text = inspect.getdoc(function) or ""
        elsewhere = re.search(r"\b[Aa]s `", text)
        for parameter in tensor_parameters(function):
            assert elsewhere or re.search(rf"\b{parameter}\b", text), f"{label}: nothing about {parameter}"
            assert elsewhere or "[" in text, f"{label}: no shape"


def test_names_of_tests_read_as_sentences():
    """At least three words behind `test_`, all lower case, none twice in a file."""
    for path in files_of_tests():
        names = [
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        short = [name for name in names if len(name.split("_")) < 4]
        assert short == [], f"{path.name}: {short}"
        assert len(names) == len(set(names)), f"{path.name}: a name stands twice, so one test never runs"


def test_nothing_in_the_package_asserts_or_writes_to_standard_output():
    """User errors are raised in words; output belongs to the command line, notes to standard error or the log."""
    for path in package_files():
        tree = ast.parse(path.read_text())
        found = [f"assert in line {node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        found += [
            f"print in line {node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if "file" not in [keyword.arg for keyword in node.keywords]
        ]
        assert found == [], f"{path.relative_to(ROOT)}: {found}"


def names_defined_in(tree):
    """Functions, methods and classes anywhere, and what a module assigns at its top."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_every_name_of_the_package_is_used_or_documented():
    """A name that stands once in package, tools and documents is dead code. Hooks of Python are called by Python."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    texts = {path: path.read_text() for path in [*package_files(), *(ROOT / "tools").glob("*.py"), *documents]}
    count = Counter(word for text in texts.values() for word in re.findall(r"\w+", text))
    defined = {name for path in package_files() for name in names_defined_in(ast.parse(texts[path]))}
    once = {name for name in defined if count[name] == 1 and not name.startswith("__")}
    assert once - OF_THE_CONTRACT == set()


def test_imports_of_the_package_run_one_way():
    """No file imports, at its top, one that imports it in turn, over however many others."""
    modules = {module_name(path): path for path in package_files()}
    graph = {name: set(imports_of(name, path, modules)) for name, path in modules.items()}
    assert sum(map(len, graph.values())) > 100
    list(TopologicalSorter(graph).static_order())


def module_name(path):
    """As it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "graphrt" else ("graphrt", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(name, path, modules):
    """The modules of the package that one of them imports when it is loaded."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            found = next((m for m in (f"{source}.{alias.name}", source) if m in modules), None)
            if found is not None and found != name:
                yield found
