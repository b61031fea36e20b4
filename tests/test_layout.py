"""The layout: imports between packages run one way, and planning stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import gplan

ROOT = Path(__file__).parent.parent

# A package may import from itself and from packages before it.
PACKAGES = (
    "gplan.core",
    "gplan.schedules",
    "gplan.files",
    "gplan.graph",
    "gplan.corrections",
    "gplan.cost",
    "gplan.simulation",
    "gplan.partition",
    "gplan.strategy_search",
    "gplan.evaluate",
    "gplan_profiler",
    "gplan.interop",
    "gplan.runtime",
    "gplan.reporting",
    "gplan.api",
    "gplan",
    "gplan.cli",
    "gplan.__main__",
)
TORCH_PACKAGES = {"gplan_profiler", "gplan.runtime"}
DRAWING_PACKAGES = {"gplan.reporting"}


@cache
def modules() -> tuple[tuple[str, Path], ...]:
    packages = (ROOT / "gplan", ROOT / "profiler" / "gplan_profiler")
    files = [(f.relative_to(package.parent), f) for package in packages for f in package.glob("**/*.py")]
    return tuple((".".join(name.with_suffix("").parts).removesuffix(".__init__"), f) for name, f in files)


def package_of(module: str) -> str:
    found = [package for package in PACKAGES if module == package or module.startswith(package + ".")]
    assert found, f"{module} belongs to no package; name its package in tests/test_layout.py and ARCHITECTURE.md"
    longest = max(found, key=len)
    assert longest != "gplan" or module == "gplan", f"{module} belongs to no package"
    return longest


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Modules imported anywhere in a file; `from gplan import files` counts as gplan.files.json_files."""
    found, known = list[str](), {name for name, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [x if x in known else node.module for x in inner]
    return tuple(found)


def test_no_arrow_runs_back_up_the_rooms() -> None:
    backwards = [
        f"{module} imports {name}, a package below it"
        for module, path in modules()
        for name in imports_of(path)
        if name.split(".")[0] in ("gplan", "gplan_profiler")
        and PACKAGES.index(package_of(name)) > PACKAGES.index(package_of(module))
    ]
    assert not backwards


def test_torch_and_matplotlib_stay_in_their_rooms() -> None:
    libraries = {module: {name.split(".")[0] for name in imports_of(path)} for module, path in modules()}
    users = {name: {x for x, found in libraries.items() if name in found} for name in ("torch", "matplotlib", "pandas")}
    assert {package_of(x) for x in users["torch"] - {"gplan.api"}} == TORCH_PACKAGES
    assert {package_of(x) for x in users["matplotlib"]} == DRAWING_PACKAGES
    assert users["pandas"] == {"gplan.reporting.report_folder"}


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def uses_of_torchs_insides(text: str) -> list[str]:
    """Private names of torch, patches of it, and questions for its version, in the source of a module."""
    tree, of_torch, found = ast.parse(text), set[str](), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            of_torch |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            of_torch |= {"torch"} if names else set()
        else:
            continue
        found += [x for x in names if _is_private(x)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _root(node) in of_torch and _is_private(node.attr):
            found += [x for x in [ast.unparse(node)] if not x.startswith("torch.ops.")]  # names of operators
        is_patch = isinstance(node, ast.Call) and ast.unparse(node.func) in ("replaced", "setattr", "patch.object")
        if is_patch and node.args and _root(node.args[0]) in of_torch:
            found.append(ast.unparse(node))
        targets = node.targets if isinstance(node, ast.Assign) else []
        found += [ast.unparse(x) for x in targets if isinstance(x, ast.Attribute) and _root(x) in of_torch]
        found += [ast.unparse(x) for x in targets if isinstance(x, ast.Subscript) and _root_of_vars(x) in of_torch]
        if isinstance(node, ast.Compare) and "__version__" in ast.unparse(node):
            found.append(ast.unparse(node))
    return found


def _root_of_vars(target: ast.Subscript) -> str:
    call = target.value
    return _root(call.args[0]) if isinstance(call, ast.Call) and ast.unparse(call.func) == "vars" else ""


def test_what_counts_as_torchs_insides() -> None:
    wrong = (
        "import torch._dynamo",
        "from torch.utils import _pytree as pytree",
        "from torch._ops import OpOverload",
        "import torch\ntorch._C._nn._parse_to()",
        "from torch import nn\nwith replaced(nn.Module, to=f): pass",
        "import torch\ntorch.Tensor.grad_dtype = property(f)",
        "from torch.nn.utils import clip_grad\nvars(clip_grad)['x'] = f",
        "import torch\nif torch.__version__ < '2.12': pass",
    )
    assert all(uses_of_torchs_insides(x) for x in wrong)
    assert not uses_of_torchs_insides("import torch\nx = torch.ones(1)\nx.grad = None\nself._kept = torch.__version__")


def test_torchs_insides_are_used_in_one_module() -> None:
    found = {module: uses_of_torchs_insides(path.read_text()) for module, path in modules()}
    assert {module for module, uses in found.items() if uses} == {"gplan_profiler.torch_compat"}
    assert not [module for module, path in modules() if any("distributed.pipelining" in x for x in imports_of(path))]


def test_only_milp_imports_the_solver() -> None:
    users = [module for module, path in modules() if any(x.split(".")[0] == "pulp" for x in imports_of(path))]
    assert users == ["gplan.partition.milp"]


PLANNING = """
import sys
import gplan
from pathlib import Path
profile = gplan.load(Path(sys.argv[1]))
plan = gplan.balance(profile, num_devices=2, num_microbatches=4)
timeline = gplan.simulate(plan)
heavy = sorted({"torch", "matplotlib", "pandas", "pulp", "networkx"} & set(sys.modules))
print(heavy, timeline.step_s)
"""


def test_planning_imports_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    from tests.made import make_profile

    gplan.save(make_profile([1.0, 2.0, 3.0]), tmp_path / "p.json")
    done = subprocess.run(
        [sys.executable, "-c", PLANNING, str(tmp_path / "p.json")], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("[] ")


def test_the_public_names_are_these() -> None:
    assert sorted(gplan.__all__) == [
        "Device", "FileError", "GplanError", "Link", "ModelError", "NoPlanError", "Plan", "PlanRequest", "Profile", "Run", "RunError",
        "Timeline", "UsageError", "Verification", "balance",
        "compare", "import_plan", "import_trace", "load", "pipeline", "plan", "profile", "report", "run", "save", "simulate", "verify",
    ]  # fmt: skip
    for name in gplan.__all__:
        assert getattr(gplan, name).__doc__, f"gplan.{name} has no docstring"
