"""Imports point down, torch stays out of the book-keeping, peft and modelling code stay out altogether.

One checker reads source text, so an import inside a function or under TYPE_CHECKING counts. The other imports modules
in a fresh interpreter where torch cannot be found. Both are themselves tested here, on made-up sources.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src"
PACKAGE = "interleaf"

# Highest first; the same line stands in CONTRIBUTING.md and docs/architecture.md. A new room is added to all three.
DIAGRAM = (
    "cli, sim -> server -> engine -> scheduler -> (attention, model, weights, adapters)"
    " -> (kernels, parallel, memory) -> core, errors, config, stats"
)
LEVEL = {
    room: -depth
    for depth, group in enumerate(DIAGRAM.split(" -> "))
    for room in group.strip("()").replace(" ", "").split(",")
} | {"__main__": 0}
ACROSS = {("model", "attention"), ("__main__", "cli"), ("core", "errors"), ("config", "errors"), ("stats", "errors")}

MODELLING = re.compile(
    r"models|modeling_\w+|masking_utils|cache_utils|generation|pipelines?|\*"  # modules, and everything at once
    r"|AutoModel\w*|\w+Model|\w+For[A-Z]\w+|\w*Cache"  # classes
)


# --- the checker of source text ---------------------------------------------------------------------------------------


def _absolute(name: str, level: int, module: str, is_package: bool) -> str:
    """Resolve `name`, written with `level` leading dots inside `module`, to a dotted name from the top."""
    if level == 0:
        return name
    parts = module.split(".")
    base = parts[: len(parts) - level + is_package]
    return ".".join([*base, name] if name else base)


def _imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything imported anywhere in `tree`; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node.module or "", node.level, module, is_package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function, name = ast.unparse(node.func), node.args[0].value
            if function.split(".")[-1] in {"import_module", "__import__"} and isinstance(name, str):
                stem = name.lstrip(".")
                yield node.lineno, _absolute(stem, len(name) - len(stem), module, is_package)


def _transformers_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, transformers.name) for every `transformers.name` that is used, under whatever alias."""
    aliases = {
        alias.asname or "transformers"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "transformers"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield node.lineno, f"transformers.{node.attr}"


def _room_problem(room: str, target: str) -> str | None:
    """Say why `room` may not import `target`, a dotted name inside the package; None if it may."""
    other = target.split(".")[1] if "." in target else ""
    if other == "__version__":
        return None
    if other not in LEVEL:
        return f"{room} imports {target}: name a room, not the package's public names"
    if other == room or LEVEL[other] < LEVEL[room] or (room, other) in ACROSS:
        return None
    return f"{room} imports {target}: {other} is {'above' if LEVEL[other] > LEVEL[room] else 'beside'} {room}"


def check_source(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """List what is wrong with the imports of one file, each as 'line: reason'. `module` is its dotted name."""
    tree = ast.parse(source)
    room = module.split(".")[1] if "." in module else None  # None: the package's own __init__, which may name any room
    problems = set()
    if room is not None and room not in LEVEL:
        problems.add((1, f"{room} is not a room of the diagram"))
    imports = list(_imports(tree, module, is_package))
    for line, target in imports:
        top, _, rest = target.partition(".")
        if top == "peft":
            problems.add((line, f"{module} imports peft"))
        if top == PACKAGE and room in LEVEL and (problem := _room_problem(room, target)):
            problems.add((line, problem))
        if top == "transformers" and any(MODELLING.fullmatch(part) for part in rest.split(".")):
            problems.add((line, f"{module} imports {target}: modelling code"))
    for line, target in _transformers_attributes(tree):
        if MODELLING.fullmatch(target.partition(".")[2]):
            problems.add((line, f"{module} uses {target}: modelling code"))
    return [f"{line}: {problem}" for line, problem in sorted(problems)]


def modules_below(source_root: Path) -> dict[str, Path]:
    """Map the dotted name of every module of the package to its file."""
    found = {}
    for path in sorted((source_root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(source_root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def check_tree(source_root: Path) -> list[str]:
    """List what is wrong with the imports of every file, each as 'path:line: reason'."""
    return [
        f"{path.relative_to(source_root)}:{problem}"
        for module, path in modules_below(source_root).items()
        for problem in check_source(path.read_text("utf-8"), module, is_package=path.name == "__init__.py")
    ]


# --- the checker that imports -----------------------------------------------------------------------------------------

PROBE = """
import importlib, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "flashinfer"):
            asked.append(name)
            raise ModuleNotFoundError(f"{name} is blocked here", name=name)

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, sys.argv[1])
problems = {}
for module in json.loads(sys.argv[2]):
    asked = []
    try:
        importlib.import_module(module)
    except Exception as error:
        problems[module] = f"{type(error).__name__}: {error}"
    if asked:
        problems[module] = f"asks for {asked[0]}"
print(json.dumps(problems))
"""


def import_without_torch(source_root: Path, modules: Iterable[str]) -> dict[str, str]:
    """Import `modules` where there is no torch; map each that fails, or only asks for it, to what went wrong."""
    command = [sys.executable, "-c", PROBE, str(source_root), json.dumps(list(modules))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def torch_free_modules(source_root: Path) -> list[str]:
    """Name the modules, of those that exist, that must work without torch."""
    rule = re.compile(
        rf"{PACKAGE}\.((core|config|errors|stats|scheduler)(\..+)?|memory(\.(?!pool$).+)?|adapters\.(registry|residency))"
    )
    return [module for module in modules_below(source_root) if rule.fullmatch(module)]


# --- the rules --------------------------------------------------------------------------------------------------------


def test_every_import_points_down():
    assert modules_below(SOURCE), f"no source below {SOURCE / PACKAGE}"
    assert check_tree(SOURCE) == []


def test_the_rooms_of_the_diagram_are_those_that_exist():
    package = SOURCE / PACKAGE
    found = {path.parent.name for path in package.glob("*/__init__.py")} | {path.stem for path in package.glob("*.py")}
    assert found - {"__init__"} == set(LEVEL)


def test_the_documents_show_the_diagram_and_name_no_other_room():
    pages = {name: (REPOSITORY / name).read_text("utf-8") for name in ("CONTRIBUTING.md", "docs/architecture.md")}
    for name, text in pages.items():
        assert f"\n{DIAGRAM}\n" in text, name
    table = re.search(r"\n\| Room \|.*?\n\n", pages["docs/architecture.md"], re.DOTALL)
    rooms = [room for row in table[0].strip().splitlines()[2:] for room in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(rooms) == sorted(set(LEVEL) - {"__main__"})


def test_every_file_that_the_recipes_name_exists():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
    rooms = "|".join(sorted(set(LEVEL) - {"__main__"}))
    below_package = {f"src/{PACKAGE}/{path}" for path in re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", text)}
    named = below_package | set(re.findall(r"`((?:src|tests|docs|bench|scripts|examples)/[\w./-]+)`", text))
    assert len(named) > 15
    assert [path for path in sorted(named) if not (REPOSITORY / path).exists()] == []


def test_the_book_keeping_never_imports_torch():
    modules = torch_free_modules(SOURCE)
    assert f"{PACKAGE}.errors" in modules
    assert import_without_torch(SOURCE, modules) == {}


def test_importing_the_package_alone_does_not_import_torch():
    assert import_without_torch(SOURCE, [PACKAGE]) == {}


@pytest.mark.parametrize("module", ["server.api", "server.start", "engine.worker", "engine.roles"])
def test_processes_that_speak_http_or_watch_others_have_no_torch(module):
    """Torch is at hand here: transformers looks whether it is, and must leave it at that."""
    code = f"import sys, {PACKAGE}.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(SOURCE)}).returncode == 0


def test_contributing_shows_the_diagram_that_is_enforced():
    assert DIAGRAM in (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8").splitlines()


# --- the checkers are checked -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("interleaf.engine.engine", "from interleaf.scheduler.scheduler import Scheduler"),
        ("interleaf.engine.engine", "from interleaf.engine.runner import Runner\nfrom .inputs import Inputs"),
        ("interleaf.memory.pool", "import torch\nimport interleaf.core as core\nfrom .geometry import Geometry"),
        ("interleaf.memory.pool", "from ..errors import OutOfPages\nfrom .. import config"),
        ("interleaf.model.transformer", "from interleaf.attention import Attention\nfrom interleaf.kernels import ops"),
        ("interleaf.core.request", "from interleaf.errors import InterleafError"),
        ("interleaf.cli", "from interleaf import __version__\nfrom interleaf import engine, server"),
        ("interleaf.__main__", "from interleaf.cli import main"),
        ("interleaf", "from interleaf.engine.llm import LLM"),
        (
            "interleaf.engine.tokenizer",
            "from transformers import AutoTokenizer, PreTrainedTokenizerFast\nimport tokenizers.models",
        ),
        ("interleaf.adapters.peft", "import interleaf.adapters.peft"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert check_source(source, module) == []


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("interleaf.scheduler.queue", "from interleaf.engine import Engine", "engine is above scheduler"),
        ("interleaf.scheduler.queue", "import interleaf.engine.runner", "engine is above scheduler"),
        ("interleaf.scheduler.queue", "from interleaf import engine", "engine is above scheduler"),
        ("interleaf.scheduler.queue", "from ..engine import Engine", "engine is above scheduler"),
        ("interleaf.scheduler.queue", "from .. import engine", "engine is above scheduler"),
        ("interleaf.scheduler.queue", "import importlib\nimportlib.import_module('interleaf.engine')", "is above"),
        ("interleaf.scheduler.queue", "from importlib import import_module\nimport_module('..engine')", "is above"),
        ("interleaf.scheduler.queue", "__import__('interleaf.engine')", "engine is above"),
        ("interleaf.scheduler.queue", "from interleaf import LLM", "name a room"),
        ("interleaf.scheduler.queue", "from interleaf import *", "name a room"),
        ("interleaf.scheduler.queue", "import interleaf", "name a room"),
        ("interleaf.memory.eviction", "def f():\n    from interleaf.adapters import registry", "is above memory"),
        (
            "interleaf.memory.eviction",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from interleaf.scheduler import Scheduler",
            "scheduler is above memory",
        ),
        ("interleaf.attention.base", "from interleaf.model import spec", "model is beside attention"),
        ("interleaf.weights.gguf", "from interleaf.model.spec import read", "model is beside weights"),
        ("interleaf.kernels.ops", "from interleaf.memory import geometry", "memory is beside kernels"),
        ("interleaf.core.plan", "from interleaf.config import Config", "config is beside core"),
        ("interleaf.errors", "from interleaf.core import AdapterUid", "core is beside errors"),
        ("interleaf.utils.misc", "import os", "utils is not a room"),
        ("interleaf.adapters.peft", "import peft", "imports peft"),
        ("interleaf", "from peft.utils import load_peft_weights", "imports peft"),
        ("interleaf.model.layers", "from transformers import LlamaForCausalLM", "modelling code"),
        ("interleaf.model.layers", "from transformers import AutoModel", "modelling code"),
        ("interleaf.model.layers", "from transformers import DynamicCache", "modelling code"),
        ("interleaf.model.layers", "from transformers import *", "modelling code"),
        ("interleaf.model.layers", "from transformers.models.llama.modeling_llama import LlamaMLP", "modelling code"),
        ("interleaf.model.layers", "from transformers.modeling_utils import PreTrainedModel", "modelling code"),
        ("interleaf.model.layers", "import transformers as t\nt.AutoModelForCausalLM", "modelling code"),
        ("interleaf.model.layers", "import transformers\ntransformers.models.llama", "modelling code"),
    ],
)
def test_a_forbidden_import_is_named(module, source, reason):
    (problem,) = check_source(source, module)
    assert reason in problem


def test_a_relative_import_inside_a_packages_init_is_resolved_from_the_package():
    allowed = "from .geometry import Geometry\nfrom ..core import ModelSpec"
    assert check_source(allowed, "interleaf.memory", is_package=True) == []
    (problem,) = check_source("from ..engine import Engine", "interleaf.memory", is_package=True)
    assert "engine is above memory" in problem


def _write(source_root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = source_root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def test_a_violation_in_a_tree_is_found_with_its_file_and_line(tmp_path):
    _write(
        tmp_path,
        {
            "__init__.py": "",
            "core/__init__.py": "",
            "memory/__init__.py": "from .pool import Pool",
            "memory/pool.py": "import os\nfrom interleaf.model import layers\n",
        },
    )
    (problem,) = check_tree(tmp_path)
    assert problem == "interleaf/memory/pool.py:2: memory imports interleaf.model.layers: model is above memory"


def test_torch_is_noticed_however_it_is_imported(tmp_path):
    _write(
        tmp_path,
        {
            "__init__.py": "",
            "errors.py": "import json",
            "stats.py": "def f():\n    import torch",
            "config.py": "try:\n    import torch\nexcept ImportError:\n    torch = None",
            "scheduler/__init__.py": "",
            "scheduler/queue.py": "from interleaf.kernels import ops",
            "scheduler/policy.py": "import no_such_module",
            "kernels/__init__.py": "",
            "kernels/ops.py": "import torch.nn",
            "memory/__init__.py": "",
            "memory/pool.py": "import torch",
            "adapters/__init__.py": "",
            "adapters/registry.py": "",
            "adapters/copy.py": "import torch",
        },
    )
    modules = torch_free_modules(tmp_path)
    assert "interleaf.memory.pool" not in modules
    assert "interleaf.adapters.copy" not in modules
    assert import_without_torch(tmp_path, modules) == {
        "interleaf.config": "asks for torch",
        "interleaf.scheduler.policy": "ModuleNotFoundError: No module named 'no_such_module'",
        "interleaf.scheduler.queue": "asks for torch",
    }


def test_a_package_whose_init_brings_torch_is_noticed(tmp_path):
    _write(tmp_path, {"__init__.py": "from .kernels import ops", "kernels/__init__.py": "import torch"})
    assert import_without_torch(tmp_path, [PACKAGE]) == {"interleaf": "asks for torch"}
