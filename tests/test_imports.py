"""Imports point one way, and what is optional is loaded only where it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import clearhead

ROOT = Path(clearhead.__file__).parent
# From the ground up; what stands in one line does not know of each other.
FLOORS = [
    ["errors", "_files", "_format", "_palette", "_progress", "_version", "_plain", "_tables", "reference"],
    ["_checks", "_config", "_measuring", "_watch"],
    ["cost", "masks"],
    ["scores"],
    ["kernels"],
    ["maps"],
    ["functional"],
    ["nn"],
    ["models"],
    ["recording", "zoo", "tokens", "projections", "saving"],
    ["heads"],
    ["page"],
    ["view"],
    ["views"],
    ["looking"],
    ["bench", "plots", "testing"],
    ["learn"],
    ["arguments", "terminal"],
    ["heads.atlas_commands", "heads.commands", "importance_command", "models.commands"],
    ["cli"],
    ["__main__", ""],
]
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
        yield name, path


NAMES = {name for name, _ in modules()}


def room_of(module: str) -> str:
    """The longest entry of FLOORS that the module stands in."""
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        if ".".join(parts[:n]) in LEVEL:
            return ".".join(parts[:n])
    raise AssertionError(f"clearhead.{module} stands on no floor: add it to FLOORS")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of clearhead that a file imports, inside functions too, but not those for type checking."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "clearhead":
            inside = (node.module or "").removeprefix("clearhead").lstrip(".")
            for alias in node.names:
                whole = f"{inside}.{alias.name}".lstrip(".")
                yield (whole if whole in NAMES else inside), node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "clearhead":
                    yield alias.name.removeprefix("clearhead").lstrip("."), node.lineno


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda part: str(part) if isinstance(part, str) else "")
def test_imports_point_downward(name: str, path: Path) -> None:
    here = room_of(name) if name else ""
    for target, line in imports(path):
        there = room_of(target) if target else ""
        assert there == here or LEVEL[there] < LEVEL[here], (
            f"{path.name}:{line}: clearhead.{name} imports clearhead.{target}, which does not stand below it"
        )


def test_the_direction_is_really_checked(tmp_path: Path) -> None:
    file = tmp_path / "masks.py"
    file.write_text("def f():\n    from clearhead import cli\n    import clearhead.maps.base\n")
    assert list(imports(file)) == [("cli", 2), ("maps.base", 3)]
    assert LEVEL["cli"] > LEVEL["masks"]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OPTIONAL = [
    "transformers",
    "matplotlib",
    "pandas",
    "IPython",
    "anywidget",
    "ipywidgets",
    "gguf",
    "tokenizers",
    "rich",
    "typer",
    "platformdirs",
    "hypothesis",
    "safetensors",
    "starlette",
    "uvicorn",
    "pandas",
]


def test_optional_dependencies_are_lazy() -> None:
    """The core works where none of them can be imported."""
    code = f"""
import sys
for name in {OPTIONAL}:
    sys.modules[name] = None  # every import of it raises ImportError
import torch, clearhead
from clearhead import masks, scores, maps, functional, testing
x = torch.eye(3)[None]
out, attn = clearhead.scaled_dot_product_attention(x, x, x, is_causal=True)
attn.statistics(), repr(attn)
try:
    attn.draw()
except ImportError as error:
    print(error)
"""
    assert run(code) == 'attn.draw() needs matplotlib: pip install "clearhead[plot]"'


def test_importing_clearhead_loads_nothing_else() -> None:
    code = f"""
import sys
import clearhead
print([name for name in {[*OPTIONAL, "torch", "numpy", "numba"]} if name in sys.modules])
clearhead.SoftmaxMap
print([name for name in {OPTIONAL} if name in sys.modules])
"""
    assert run(code).splitlines()[-1] == "[]"
    assert run(code).splitlines()[0] == "[]"


def test_reference_shares_no_code_with_what_it_judges() -> None:
    assert list(imports(ROOT / "reference.py")) == []
    tree = ast.parse((ROOT / "reference.py").read_text())
    outside = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    outside |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert outside == {"__future__", "collections.abc", "math", "torch"}
