"""The tree is what DESIGN says: imports point one way and have no cycle, files are short and say what they are for."""

import ast
import re
from pathlib import Path

import mooring

ROOT = Path(mooring.__file__).parent
MODULES = {
    ".".join(("mooring", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
LAYERS = ("core", "lab", "report", "paper", "cli")
"""Each may import what stands before it."""

STANDARD = frozenset(__import__("sys").stdlib_module_names)


def layer(module: str) -> str:
    part = module.split(".")[1] if "." in module else ""
    return "cli" if part == "__main__" else part if part in LAYERS else "core"


def imported(module: str, *, later: bool) -> set[str]:
    """The modules of this package that a module imports; `later`: also within functions."""
    tree = ast.parse(MODULES[module].read_text())
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    nodes = list(ast.walk(tree)) if later else _at_once(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relative to {package}: name the module whole"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name not in MODULES and "." in name:
                name = name.rpartition(".")[0]
            if name in MODULES and name != module:
                found.add(name)
    return found


def _at_once(tree: ast.AST) -> list[ast.AST]:
    """What runs when a module is imported: nothing within functions, nothing for type checkers alone."""
    found: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found += [node, *_at_once(node)]
    return found


def test_imports_point_one_way():
    backwards = [
        f"{module} -> {name}"
        for module in MODULES
        for name in imported(module, later=True)
        if LAYERS.index(layer(name)) > LAYERS.index(layer(module))
    ]
    assert not backwards


def test_imports_have_no_cycle():
    graph = {module: imported(module, later=False) for module in MODULES}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        if module in way:
            raise AssertionError(" -> ".join((*way[way.index(module) :], module)))
        if module in done:
            return
        for name in sorted(graph[module]):
            visit(name, (*way, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_the_core_imports_torch_and_the_standard_library_alone_wherever_the_import_stands():
    allowed = {"torch", "mooring", *STANDARD}
    exempt = ("mooring.integrations", "mooring.testing")
    for module, path in MODULES.items():
        if layer(module) != "core" or module.startswith(exempt):
            continue
        for node in _at_once(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            strange = {name.partition(".")[0] for name in names} - allowed
            assert not strange - ({"triton"} if module.startswith("mooring.kernels") else set()), (module, strange)


def test_every_module_says_what_it_is_for_and_is_short():
    for module, path in MODULES.items():
        text = path.read_text()
        assert len(text.splitlines()) <= 350, module
        told = ast.get_docstring(ast.parse(text)) or ""
        first = told.splitlines()[0] if told else ""
        assert first.endswith((".", "?")), f"{module}: {first!r}"
        assert path.stem not in ("utils", "util", "helpers", "misc", "common"), module


def test_every_name_that_a_module_exports_is_there():
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


def test_contributors_are_led_to_files_that_exist():
    page = Path(__file__).parent.parent / "CONTRIBUTING.md"
    table = re.findall(r"^\| (`.*?) \|", page.read_text(), re.MULTILINE)
    assert len(table) > 20
    for row in table:
        folder = ROOT
        for name in re.findall(r"`([\w/.]+)`", row):
            path = ROOT / name if (ROOT / name).exists() else folder / name  # a bare name stands beside the one before
            assert path.exists(), name
            folder = path.parent
