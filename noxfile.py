"""Developer sessions: `./dev nox` runs the default ones, `./dev nox -l` lists all."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["tests", "migration", "integration", "lint", "types"]

PACKAGES = sorted(p.parent.name for p in Path("packages").glob("*/pyproject.toml"))
MAX_WHEEL_BYTES = 20 * 10**6

# Run where only the recipe is installed.
ALONE = """
from importlib.util import find_spec
from deepseek_recipe import PromptTokenizer, convert, parse, render
brought = [name for name in ("torch", "deepinfer_core") if find_spec(name)]
assert not brought, f"the recipe brings {brought}"
body = {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "Hi"}]}
converted = convert(parse("chat", body))
print(PromptTokenizer.packaged().encode(render(converted.conversation, converted.profile))[-4:])
"""


def sync(session: nox.Session, *args: str) -> None:
    """Make the session's environment hold exactly what the lock file says for these arguments."""
    session.run_install(
        "uv",
        "sync",
        "--locked",
        "--quiet",
        "--no-default-groups",
        *args,
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
    )


def pytest(session: nox.Session, folder: str) -> None:
    """Run a folder's tests, one process a core. More threads than cores wait for one another."""
    threads = {"OMP_NUM_THREADS": "1"}
    session.run("pytest", "-q", "-n", "auto", folder, *session.posargs, env=threads)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """One member's tests against that member and its declared dependencies only."""
    sync(session, "--package", package, "--group", "test")
    pytest(session, f"packages/{package}/tests")


@nox.session
def migration(session: nox.Session) -> None:
    """The planner's tests that need its extra `torch`: experts move between processes."""
    sync(session, "--package", "deepinfer-eplb", "--extra", "torch", "--group", "test")
    pytest(session, "packages/deepinfer-eplb/tests/migration")


@nox.session
def integration(session: nox.Session) -> None:
    """Tests that need two packages or the whole repository: architecture rules, end to end."""
    sync(session, "--all-packages", "--group", "test")
    pytest(session, "tests")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting of every Python file."""
    sync(session, "--only-group", "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over the sources of all members and the training code."""
    sync(session, "--all-packages", "--group", "lint")
    sources = [f"packages/{package}/src" for package in PACKAGES]
    session.run("mypy", *sources, "packages/deepinfer-core/nano")


@nox.session(reuse_venv=False)
def build(session: nox.Session) -> None:
    """Build every distribution, install the wheels into an empty environment, run the demo."""
    tmp = Path(session.create_tmp()).resolve()
    dist = tmp / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run_install("uv", "build", "--all-packages", "--quiet", "--out-dir", str(dist))
    wheels = sorted(dist.glob("*.whl"))
    # The root is a distribution too: a meta-package without code.
    if len(wheels) != len(PACKAGES) + 1:
        session.error(f"expected {len(PACKAGES) + 1} wheels, got {[w.name for w in wheels]}")
    for wheel in wheels:
        size = wheel.stat().st_size
        session.log(f"{wheel.name}: {size / 1e6:.2f} MB")
        if size > MAX_WHEEL_BYTES:
            session.error(f"{wheel.name} is larger than {MAX_WHEEL_BYTES / 1e6:.0f} MB")
    session.install("--quiet", *map(str, wheels))
    # Away from the checkout and without PYTHONPATH, so that only what was installed is found.
    session.chdir(tmp)
    for command in (
        ("deepinfer", "--help"),
        ("python", "-m", "deepinfer_core", "--help"),
        ("deepinfer", "demo"),
        ("deepseek-recipe", "defaults", "--profile", "v41"),
        ("deepinfer-specdec", "simulate", "--rows", "4", "--steps", "20", "--ranks", "2"),
        ("deepinfer-eplb", "simulate", "--regimes", "drift", "--layers", "1", "--intervals", "4"),
    ):
        session.run(*command, env={"PYTHONPATH": None})
    alone(session, next(wheel for wheel in wheels if wheel.name.startswith("deepseek_recipe-")))


def alone(session: nox.Session, wheel: Path) -> None:
    """Install the recipe into an environment of its own: it needs no engine and no torch."""
    folder = wheel.parent.parent / "alone"
    session.run_install("uv", "venv", "--quiet", "--clear", str(folder))
    python = str(folder / "bin" / "python")
    session.run_install(
        "uv", "pip", "install", "--quiet", "--python", python, f"{wheel}[tokenizer]"
    )
    session.run(python, "-c", ALONE, external=True)
    session.run(str(folder / "bin" / "deepseek-recipe"), "defaults", "--profile=v4", external=True)
