"""Tests of the source tree: layers, cycles, names, docstrings and exports."""

import ast
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import mooring

ROOT = Path(mooring.__file__).parent
MODULES = {
    ".".join(("mooring", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
LAYERS = ("core", "lab", "report", "paper", "cli")
"""Each layer may import the layers before it."""

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


def layer_of(module: str) -> str:
    part = module.split(".")[1] if "." in module else ""
    return "cli" if part == "__main__" else part if part in LAYERS else "core"


def import_names(path: Path) -> list[str]:
    """Return the dotted name of every import of a file, wherever it stands, function bodies included."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import: write the full module name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported_modules(module: str) -> set[str]:
    """Return the modules of this package that a module imports."""
    found = set()
    for name in import_names(MODULES[module]):
        while name not in MODULES and "." in name:
            name = name.rpartition(".")[0]
        if name in MODULES and name != module:
            found.add(name)
    return found


def siblings(importer: str, imported: str) -> tuple[str, str]:
    """Return the packages or modules below the closest common parent through which one module imports another."""
    left, right = importer.split("."), imported.split(".")
    common = next((k for k, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return ".".join(left[: common + 1]), ".".join(right[: common + 1])


def test_layers_import_only_the_layers_below_them():
    backwards = [
        f"{module} -> {name}"
        for module in MODULES
        for name in imported_modules(module)
        if LAYERS.index(layer_of(name)) > LAYERS.index(layer_of(module))
    ]
    assert not backwards


def test_no_package_or_module_imports_in_a_circle():
    graph: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        for name in imported_modules(module):
            importer, imported = siblings(module, name)
            if importer != imported:
                graph[importer].add(imported)
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> None:
        if node in path:
            raise AssertionError(" -> ".join((*path[path.index(node) :], node)))
        if node not in done:
            for name in sorted(graph[node]):
                visit(name, (*path, node))
            done.add(node)

    for node in sorted(graph):
        visit(node, ())


def test_core_imports_only_torch_and_the_standard_library_also_in_function_bodies():
    for module, path in MODULES.items():
        if layer_of(module) != "core" or module.startswith(("mooring.integrations", "mooring.testing")):
            continue
        allowed = {"torch", "mooring", *STANDARD_LIBRARY}
        if module.startswith("mooring.backends.kernels"):
            allowed.add("triton")
        assert {name.partition(".")[0] for name in import_names(path)} <= allowed, module


def test_only_the_paper_command_imports_the_paper_package():
    importers = {m for m in MODULES for name in imported_modules(m) if name.startswith("mooring_paper")}
    outside = {m for m in importers if not m.startswith("mooring_paper")}
    assert outside == {"mooring_lab.cli.paper_command"}


def test_root_holds_few_modules():
    modules = [path.stem for path in ROOT.glob("*.py") if not path.stem.startswith("__")]
    assert len(modules) <= MAX_ROOT_MODULES, modules


def test_no_two_modules_share_a_name():
    aliases = {MODULES["mooring.drift"], MODULES["mooring.stability"]}  # public paths of modules in mooring.diagnose
    names = Counter(path.stem for path in {*MODULES.values()} - aliases if not path.stem.startswith("__"))
    assert not [name for name, count in names.items() if count > 1]


def test_no_two_classes_share_a_name():
    names = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
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
    for module, path in MODULES.items():
        for name in identifiers(ast.parse(path.read_text())) | {path.stem}:
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
            assert name not in RETIRED_NAMES, f"{module}: {name}"
            assert not words & RETIRED_WORDS, f"{module}: {name}"


def test_every_module_has_a_one_sentence_summary_and_a_specific_name():
    for module, path in MODULES.items():
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert docstring.partition("\n")[0].endswith((".", "?")), f"{module}: {docstring!r}"
        assert path.stem not in ("utils", "util", "helpers", "misc", "common"), module


def test_every_exported_name_is_defined():
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
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
