"""The dependency rules of the design, read from every module's syntax tree and checked again by
importing in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jserve", "scheduler", "pallas_kernels")
GENERATED = "_pb2.py"
HARD_LIMIT_LINES, HARD_LIMIT_KERNEL_LINES = 400, 500
HARD_LIMIT_FUNCTION_LINES, HARD_LIMIT_KERNEL_BODY_LINES = 60, 150

# Per part: what it may import of ours (prefixes), and of others where the design limits that.
# A part is the longest prefix that fits a module; jserve's own leaves are open to all of jserve.
LEAVES = (
    *("jserve.errors", "jserve.config", "jserve.messages", "jserve.sampling_params"),
    *("jserve.structured", "jserve.json_pieces"),
)
OPENAI = (
    "embeddings",
    "fields",
    "format",
    "http",
    "logprobs",
    "response",
    "stream",
)  # of bodies, no jax
MAY_IMPORT = {
    "scheduler": ("scheduler",),
    "pallas_kernels": ("pallas_kernels",),
    "jserve.models": ("jserve.models", "pallas_kernels"),
    "jserve.checkpoint": ("jserve.checkpoint", "jserve.models"),
    "jserve.text": ("jserve.text",),
    "jserve.runner": ("jserve.runner", "jserve.models", "pallas_kernels", "scheduler"),
    "jserve.engine": ("jserve.engine", "jserve.text", "scheduler"),
    "jserve.server": (
        *("jserve.server", "jserve.engine", "jserve.text", "jserve.flags", "jserve.build"),
        *(f"jserve.openai_{name}" for name in OPENAI),
        "jserve.offline",  # for the form of a finished output
    ),
    "jserve.sim": (
        *("jserve.sim", "jserve.bench", "jserve.flags", "jserve.engine.step_log", "scheduler"),
        *("jserve.models.config", "jserve.models.families", "pallas_kernels.devices"),
    ),
    "jserve.doctor": (
        *("jserve.doctor", "jserve.batch.lines", "jserve.checkpoint", "jserve.flags"),
        *("jserve.text", "jserve.models.config"),
    ),
    "jserve.errors": (),
    "jserve.config": ("scheduler.config",),
    "jserve.sampling_params": (),
    "jserve.messages": (),
    "jserve.structured": (),
    "jserve.json_pieces": (),
}
RUNNER_SEES_OF_SCHEDULER = {"scheduler.packer", "scheduler.bucket"}
THIRD_PARTY = {
    "scheduler": {"numpy"},
    "pallas_kernels": {"numpy", "jax", "jaxtyping"},
    "jserve.errors": set(),
    "jserve.config": set(),
    "jserve.sampling_params": set(),
    "jserve.messages": {"numpy"},  # an embedding is an array
    "jserve.structured": set(),
    "jserve.json_pieces": set(),
}
ENTRY_POINTS = {"jserve.llm", "jserve.server.main", "jserve.batch.main"}  # may ask build.py
WITHOUT_JAX = (
    *("jserve", "jserve.config", "jserve.errors", "jserve.messages", "jserve.sampling_params"),
    *("jserve.llm", "jserve.offline", "jserve.flags", "jserve.openai_format", "jserve.client"),
    *("jserve.engine", "jserve.text", "jserve.server", "jserve.batch", "scheduler"),
    *("jserve.sim", "jserve.doctor", "jserve.openai_response", "jserve.openai_structured"),
    *("jserve.openai_http", "jserve.openai_stream"),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.name.endswith(GENERATED)
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports_of(name: str) -> set[str]:
    """Returns every module that `name` imports anywhere in it, functions included."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            found |= {
                full if (full := f"{node.module}.{alias.name}") in MODULES else str(node.module)
                for alias in node.names
            }
    return found


def root_of(module: str) -> str:
    return module.split(".")[0]


def is_within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def part_of(module: str) -> str | None:
    """The longest entry of MAY_IMPORT that holds `module`; None for what may import all."""
    return max((part for part in MAY_IMPORT if is_within(module, (part,))), key=len, default=None)


def violations() -> Iterator[str]:
    for name in MODULES:
        part = part_of(name)
        if part is None:
            continue
        allowed = MAY_IMPORT[part] + (LEAVES if root_of(name) == "jserve" else ())
        for imported in sorted(imports_of(name)):
            root = root_of(imported)
            if root in PACKAGES:
                is_legal = is_within(imported, allowed)
            else:
                others = THIRD_PARTY.get(part, {root})
                is_legal = root in sys.stdlib_module_names or root in others
            if not is_legal:
                yield f"{name} imports {imported}"


def test_every_import_follows_an_arrow_of_the_design():
    assert list(violations()) == []


def test_a_forbidden_import_would_be_found(monkeypatch):
    for name, line in {
        "jserve.models.layers": "from jserve.runner import step",
        "jserve.runner.step": "import jserve.engine.engine",
        "scheduler.packer": "import jax",
        "pallas_kernels.dispatch": "from scheduler.packer import Packer",
    }.items():
        with monkeypatch.context() as patch:
            patch.setitem(TREES, name, ast.parse(f"def f():\n    {line}"))
            [found] = violations()
        assert found.startswith(f"{name} imports ")


def test_the_runner_knows_the_packed_batch_only_of_the_scheduler():
    runner = [name for name in MODULES if is_within(name, ("jserve.runner",))]
    seen = {m for name in runner for m in imports_of(name) if root_of(m) == "scheduler"}
    assert seen <= RUNNER_SEES_OF_SCHEDULER


def test_only_the_composition_root_knows_both_engine_and_runner():
    both = [
        name
        for name in MODULES
        if any(is_within(m, ("jserve.runner",)) for m in imports_of(name))
        and any(is_within(m, ("jserve.engine",)) for m in imports_of(name))
    ]
    assert both == ["jserve.build"]


def test_only_entry_points_ask_for_the_composition_root():
    asking = {name for name in MODULES if "jserve.build" in imports_of(name)}
    assert asking <= ENTRY_POINTS


def imported_by(*modules: str) -> set[str]:
    """Returns the top-level packages that importing `modules` brings into a fresh interpreter."""
    code = (
        f"import sys\nfor name in {modules!r}: __import__(name)\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_host_side_packages_import_without_jax():
    modules = [name for name in MODULES if is_within(name, WITHOUT_JAX[1:]) or name == "jserve"]
    assert {"jserve.engine.engine", "jserve.server.main", "jserve.text.chat"} <= set(modules)
    assert imported_by(*modules) & {"jax", "jaxlib", "flax", "torch"} == set()


@pytest.mark.parametrize("package", ["scheduler", "pallas_kernels"])
def test_packages_of_primitives_import_without_the_runtime(package):
    modules = [name for name in MODULES if is_within(name, (package,))]
    loaded = imported_by(*modules)
    assert package in loaded
    assert loaded & (set(PACKAGES) - {package}) == set()
    if package == "scheduler":
        assert loaded & {"jax", "grpc", "tokenizers", "transformers"} == set()


@pytest.mark.parametrize("name", [n for n, path in MODULES.items() if path.stat().st_size])
def test_a_module_opens_with_its_duty(name):
    assert ast.get_docstring(TREES[name]), f"{name} has no docstring"


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts a function's lines, its docstring left out."""
    docstring = function.body[0] if ast.get_docstring(function) else None
    last = function.body[-1].end_lineno or 0
    skipped = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return last - function.lineno + 1 - skipped


def test_files_and_functions_keep_the_hard_limits():
    for name, path in MODULES.items():
        is_kernel = "mosaic" in path.name
        limit = HARD_LIMIT_KERNEL_LINES if is_kernel else HARD_LIMIT_LINES
        count = len(path.read_text().splitlines())
        assert count <= limit, f"{name} has {count} lines; the hard limit is {limit}"
        limit = HARD_LIMIT_KERNEL_BODY_LINES if is_kernel else HARD_LIMIT_FUNCTION_LINES
        for node in ast.walk(TREES[name]):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = lines_of(node)
                assert count <= limit, f"{name}.{node.name} has {count} lines; use {limit} at most"


def test_the_environment_is_no_configuration():
    """Ours, that is: libtpu takes its flags from there only, and one module passes them on."""
    for name, tree in TREES.items():
        if name == "jserve.runner.platform":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("environ", "getenv"), f"{name} reads the environment"
