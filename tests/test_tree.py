"""Tests of the source tree: layers, cycles, names, docstrings and exports."""

import ast
import re
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

import mooring

ROOT = Path(mooring.__file__).parent
SOURCES = ROOT.parent
IMPORT_PACKAGES = ("mooring", "mooring_lab", "mooring_paper")
"""Each may import those before it, and itself."""

MODULES = {
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__"): path
    for package in IMPORT_PACKAGES
    for path in (SOURCES / package).rglob("*.py")
}
PACKAGES = {module for module, path in MODULES.items() if path.name == "__init__.py"}
TESTS = Path(__file__).parent

STANDARD_LIBRARY = frozenset(sys.stdlib_module_names)
MAX_ROOT_MODULES = 8

SAME_CLASS_NAMES = {"MooringCallback"}
"""A user imports it from `mooring.integrations.transformers` or from `.lightning`, never both."""

_NAMES = "told found each mine some made rest past way NEAR MOST FEW CLOSE MANY LOOK"
RETIRED_NAMES = frozenset(_NAMES.split())
"""Identifiers that say nothing: write the noun."""

_WORDS = """aboard alike beside berth crew crews exam harbour heard hull kin laden ledger leg lesson logbook passage
rehearsal rehearse rehearsed rehearsing sail sailed sailing sails settled spending told twin twins uncollected
undisturbed voyage watcher"""
RETIRED_WORDS = frozenset(_WORDS.split())
"""Words that no identifier contains."""


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a file as a syntax tree, which is read once for all tests."""
    return ast.parse(path.read_text())


def import_names(path: Path) -> list[str]:
    """Return the dotted name of every import of a file, wherever it stands, function bodies included."""
    names: list[str] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import: write the full module name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported_modules(module: str) -> set[str]:
    """Return the modules of the three packages that a module imports."""
    imported = set()
    for name in import_names(MODULES[module]):
        while name not in MODULES and "." in name:
            name = name.rpartition(".")[0]
        if name in MODULES and name != module:
            imported.add(name)
    return imported


def node_of(module: str) -> str:
    """Return a package, with all modules directly in it; a module at the root of an import package stands alone."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    return package if "." in package else module


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of a cycle of imports, the first one again at the end; empty if there is none."""
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        cycles = (visit(name, (*path, node)) for name in sorted(graph.get(node, ())) if node not in done)
        cycle = next(filter(None, cycles), [])
        done.add(node)
        return cycle

    return next(filter(None, (visit(node, ()) for node in sorted(graph))), [])


def test_import_packages_import_only_those_below_them_also_in_function_bodies():
    backwards = [
        f"{module} -> {name}"
        for module in MODULES
        for name in imported_modules(module)
        if IMPORT_PACKAGES.index(name.partition(".")[0]) > IMPORT_PACKAGES.index(module.partition(".")[0])
    ]
    assert not backwards


def test_only_the_command_table_names_the_paper_package_as_text():
    """`mooring paper` loads the reproduction by name, because the command line is below it."""
    named = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and re.fullmatch(r"mooring_paper[\w.:]*", str(node.value))
    }
    assert {module for module in named if not module.startswith("mooring_paper")} == {"mooring_lab.cli.app"}


def test_no_packages_import_each_other_in_a_circle():
    """A package and a package inside it are two nodes, so they do not import each other either."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        for name in imported_modules(module):
            importer, imported = node_of(module), node_of(name)
            if importer != imported and importer.partition(".")[0] == imported.partition(".")[0]:
                graph[importer].add(imported)
    assert graph["mooring.backends"] >= {"mooring.backends.kernels", "mooring.rules"}  # the graph has its edges
    assert " -> ".join(find_cycle(graph)) == ""


def test_cycles_between_a_package_and_its_child_are_found():
    assert node_of("mooring.backends.eager") == node_of("mooring.backends") == "mooring.backends"
    assert node_of("mooring.backends.kernels.codegen") == "mooring.backends.kernels"
    assert node_of("mooring.step") == "mooring.step"
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_library_imports_only_torch_and_the_standard_library_also_in_function_bodies():
    for module, path in MODULES.items():
        apart = ("mooring.integrations", "mooring.testing")  # beside the library: they import what they are for
        if module.partition(".")[0] != "mooring" or module.startswith(apart):
            continue
        allowed = {"torch", "mooring", *STANDARD_LIBRARY}
        if module.startswith("mooring.backends.kernels"):
            allowed.add("triton")
        assert {name.partition(".")[0] for name in import_names(path)} <= allowed, module


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("library", {"mooring_lab", "mooring_paper", "laboratory", "paper", "pages"}),
        ("laboratory", {"mooring_paper", "paper", "pages"}),
        ("paper", {"pages"}),
    ],
)
def test_tests_import_nothing_that_their_package_does_not(folder, forbidden):
    for path in (TESTS / folder).rglob("*.py"):
        imported = {name.partition(".")[0] for name in import_names(path)}
        assert not imported & forbidden, (path.name, imported & forbidden)


def test_root_holds_few_modules():
    modules = [path.stem for path in ROOT.glob("*.py") if not path.stem.startswith("__")]
    assert len(modules) <= MAX_ROOT_MODULES, modules


def test_no_two_modules_share_a_name():
    names = Counter(path.stem for path in MODULES.values() if not path.stem.startswith("__"))
    assert not [name for name, count in names.items() if count > 1]


def test_no_two_classes_share_a_name():
    names = Counter(
        node.name for path in MODULES.values() for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == SAME_CLASS_NAMES


def identifiers(tree: ast.AST) -> set[str]:
    """Return every name that a module defines, binds or uses."""
    names: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg | ast.keyword):
            names.add(node.arg)
    return {name for name in names if name}


def test_retired_words_stay_out_of_identifiers():
    tests = {str(path.relative_to(TESTS)): path for path in TESTS.rglob("*.py")}
    for module, path in {**MODULES, **tests}.items():
        for name in identifiers(tree_of(path)) | {path.stem}:
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
            assert name not in RETIRED_NAMES, f"{module}: {name}"
            assert not words & RETIRED_WORDS, f"{module}: {name}"


def test_every_module_has_a_one_sentence_summary_and_a_specific_name():
    for module, path in MODULES.items():
        docstring = ast.get_docstring(tree_of(path)) or ""
        assert docstring.partition("\n")[0].endswith((".", "?")), f"{module}: {docstring!r}"
        assert path.stem not in ("utils", "util", "helpers", "misc", "common"), module


def test_every_exported_name_is_defined():
    for module, path in MODULES.items():
        tree = tree_of(path)
        named = [n for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"]
        if not named:
            continue
        exported = ast.literal_eval(named[0].value)
        defined = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        defined |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        defined |= {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert set(exported) <= defined, (module, set(exported) - defined)
        assert len(exported) == len(set(exported)), module


def test_contributing_names_files_that_exist():
    page = Path(__file__).parent.parent / "CONTRIBUTING.md"
    table = re.findall(r"^\| (`.*?) \|", page.read_text(), re.MULTILINE)
    assert len(table) > 20
    for row in table:
        for name in re.findall(r"`([\w/.]+)`", row):
            assert (ROOT.parent / name).exists(), name
