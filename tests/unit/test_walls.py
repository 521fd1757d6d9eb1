"""The walls of the house: who may import whom, no vendor's name in the core, no cycle of imports.

Imports are read from the source, also those inside functions. What each test forbids is planted on a
copy of the tree, and found there.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "mkernel": "mkernel",
    "mkernel.backends": "backends",
    "mkernel.topology": "topology",
}
"""Packages and where they lie; two of them are links in ``mkernel``."""

LEAVES = {
    "mkernel.errors",
    "mkernel.failure_record",
    "mkernel.host_limits",
    "mkernel.installed",
    "mkernel.log",
    "mkernel.printable",
    "mkernel.schema_version",
    "mkernel.tabular",
    "mkernel.user_files",
    "mkernel.version",
}
CONTRACT = {
    *LEAVES,
    "mkernel.settings",
    "mkernel.topology",
    "mkernel.plan",
    "mkernel.backends.contracts",
}
BACKEND = {*CONTRACT, "mkernel.backends.runtime", "mkernel.backends.transport"}
WORLD = {
    *BACKEND,
    "mkernel.backends.registry",
    "mkernel.machine",
    "mkernel.selection",
    "mkernel.world.identity",
}
OPS = {*WORLD, "mkernel.world"}
API = {*OPS, "mkernel", "mkernel.api", "mkernel.launch", "mkernel.fork_server", "mkernel.ops"}
HARNESS = {*API, "mkernel.cases"}

MAY_IMPORT: dict[str, set[str]] = {
    "mkernel.errors": {"mkernel.printable"},
    "mkernel.installed": set(),
    "mkernel.log": set(),
    "mkernel.printable": set(),
    "mkernel.schema_version": {"mkernel.printable", "mkernel.version"},
    "mkernel.tabular": set(),
    "mkernel.version": set(),
    "mkernel.user_files": LEAVES,
    "mkernel.failure_record": LEAVES,
    "mkernel.host_limits": LEAVES,
    "mkernel.headers": LEAVES,
    "mkernel.unbuilt": {"mkernel.errors"},
    "mkernel.topology": LEAVES,
    "mkernel.settings": {*LEAVES, "mkernel.topology"},
    "mkernel.plan": {*LEAVES, "mkernel.topology"},
    "mkernel.probe": {*LEAVES, "mkernel.topology", "mkernel.plan"},
    "mkernel.backends": set(),
    "mkernel.backends.accelerators": set(),
    "mkernel.backends.contracts": CONTRACT,
    "mkernel.backends.runtime": {*CONTRACT, "mkernel.backends.transport"},
    "mkernel.backends.transport": CONTRACT,
    "mkernel.backends.registry": CONTRACT,
    "mkernel.backends.nics": BACKEND,
    "mkernel.backends.accelerators.cuda": BACKEND,
    "mkernel.backends.accelerators.ascend": BACKEND,
    "mkernel.backends.accelerators.hopper": {*BACKEND, "mkernel.backends.accelerators.cuda"},
    "mkernel.backends.accelerators.streams": {*BACKEND, "mkernel.backends.accelerators.cuda"},
    "mkernel.world.identity": set(),
    "mkernel.machine": WORLD,
    "mkernel.selection": WORLD,
    "mkernel.doctor": WORLD,
    "mkernel.bug_report": {*WORLD, "mkernel", "mkernel.doctor"},
    "mkernel.world": WORLD,
    "mkernel.ops": OPS,
    "mkernel.async_tensor_parallel": {*OPS, "mkernel.ops"},
    "mkernel.nn": {*OPS, "mkernel.ops"},
    "mkernel.cases": {*OPS, "mkernel.ops"},
    "mkernel.launch": API,
    "mkernel.fork_server": API,
    "mkernel.before_imports": set(),
    "mkernel.before_fork": {"mkernel.backends.registry", "mkernel.installed"},
    "mkernel.api": API,
    "mkernel": {
        *API,
        "mkernel.async_tensor_parallel",
        "mkernel.backends",
        "mkernel.conformance",
        "mkernel.headers",
        "mkernel.nn",
        "mkernel.unbuilt",
    },
    "mkernel.harness": HARNESS,
    "mkernel.measure": {*HARNESS, "mkernel.harness"},
    "mkernel.conformance": {*HARNESS, "mkernel.harness"},
    "mkernel.cli": {
        *HARNESS,
        "mkernel.harness",
        "mkernel.conformance",
        "mkernel.bug_report",
        "mkernel.doctor",
        "mkernel.headers",
        "mkernel.measure",
        "mkernel.probe",
    },
    "mkernel.__main__": {"mkernel.cli"},
}
"""Whom each room may import, beside itself. A module belongs to the room with the longest name that its
own begins with. A backend knows the contracts, and nobody but the registry finds it."""

OUTER = {"mkernel", "mkernel.backends", "mkernel.backends.accelerators"}
"""Packages of rooms: what lies in them beside the rooms belongs to none."""

THROUGH_THE_WALL = {
    ("mkernel.cli.bench", "mkernel.backends.accelerators.ascend"),
    ("mkernel.conformance.nic_faults", "mkernel.backends.nics"),
    ("mkernel.conformance.nic_faults.flags", "mkernel.backends.nics"),
    ("mkernel.conformance.nic_faults.wrappers", "mkernel.backends.nics"),
    ("mkernel.harness.modelled", "mkernel.backends.accelerators.ascend"),
    ("mkernel.harness.queue", "mkernel.backends.accelerators.cuda"),
}
"""Modules that import a room in spite of the table. The list only shrinks."""

VENDOR = re.compile(
    r"(?<![a-z])(hopper|ascend|huawei|nvidia|cuda|npu|cann|davinci|rocm|hip|amd|cx7?|connectx|mellanox|efa|"
    r"amazon|nvlink|nvls|nvml|nccl|hccl|hccs|xgmi|[ahb][1238]00|sm_\d+)(?![a-z])",
    re.IGNORECASE,
)
VENDORS_ALLOWED = {
    "mkernel/cli/bench.py": {"ascend"},  # --model-only
    "mkernel/conformance/faults/__init__.py": {"ascend"},
    "mkernel/conformance/nic_faults/__init__.py": {"cx7", "efa"},
    "mkernel/conformance/nic_faults/wrappers.py": {"cx", "cx7"},
    "mkernel/harness/conditions.py": {"nccl", "nvls"},
    "mkernel/harness/contenders/__init__.py": {"nccl"},
    "mkernel/harness/contenders/library.py": {"cuda", "nccl"},
    "mkernel/harness/contenders/products.py": {"cuda"},
    "mkernel/harness/modelled.py": {"ascend"},
    "mkernel/harness/numbers.py": {"cuda", "nccl"},
    "mkernel/harness/plot.py": {"nccl"},
    "mkernel/harness/protocol.py": {"cuda"},
    "mkernel/harness/provenance.py": {"cuda", "nccl"},
    "mkernel/harness/queue.py": {"cuda"},
    "mkernel/harness/rank.py": {"cuda", "nccl"},
    "mkernel/harness/bench_run.py": {"cuda"},
    "mkernel/harness/spec.py": {"cuda"},
    "mkernel/harness/contenders/nccl_windows.py": {"cuda", "nccl"},
    "mkernel/harness/contenders/symm_mem.py": {"cuda", "nccl", "nvls"},
    "mkernel/harness/work.py": {"cuda"},
}
"""Files of the core whose code names vendors all the same, and which. The list only shrinks."""

CIRCLES_OF_TYPES = {("mkernel", "mkernel.launch")}
"""Imports for type checkers alone without which nothing would be imported in a circle. The list only
shrinks."""


class Import(NamedTuple):
    """``now``: when the module is loaded, not inside a function. ``types``: for type checkers alone."""

    module: str
    imported: str
    now: bool
    types: bool


_parsed = cache(ast.parse)


def modules(root: Path) -> dict[str, Path]:
    """Every module of the tree by its name."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in (root / folder).rglob("*.py"):
            parts = file.relative_to(root / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            if package != "mkernel" or not name.startswith(tuple(FOLDERS)[1:]):
                found[name] = file
    return found


def imports(root: Path) -> list[Import]:
    """Of modules of the tree by modules of the tree."""
    known = modules(root)
    return [
        Import(module, imported, now, types)
        for module, file in known.items()
        for imported, now, types in _imports(_parsed(file.read_text()).body, known)
        if imported != module
    ]


def _imports(
    body: Iterable[ast.stmt], known: dict[str, Path], now: bool = True, types: bool = False
) -> Iterator[tuple[str, bool, bool]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, now, types) for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                outer, inner = str(node.module), f"{node.module}.{alias.name}"
                if outer not in known:
                    continue
                native = known[outer].stem == "__init__" and re.match(r"_[a-z]", alias.name)
                yield (inner if inner in known or native else outer), now, types
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                deeper = getattr(node, name, [])
                if name in ("handlers", "cases"):
                    deeper = [each for part in deeper for each in part.body]
                yield from _imports(
                    deeper, known, now and not inside, types or (for_types and name == "body")
                )


def room(module: str) -> str:
    """The room that a module belongs to; itself where there is none."""
    fitting = [name for name in MAY_IMPORT if module == name or module.startswith(f"{name}.")]
    longest = max(fitting, key=len, default=module)
    return module if longest in OUTER and longest != module else longest


def through_walls(root: Path) -> set[tuple[str, str]]:
    """(module, room that it may not import), in spite of the table."""
    return {
        (each.module, room(each.imported))
        for each in imports(root)
        if room(each.imported) != room(each.module)
        and room(each.imported) not in MAY_IMPORT.get(room(each.module), set())
    }


def vendors(root: Path) -> dict[str, set[str]]:
    """By file of the core: vendors' words in its code. Prose (comments, docstrings) may name them."""
    found: dict[str, set[str]] = {}
    for name, file in modules(root).items():
        if name.startswith(("mkernel.backends", "mkernel.topology.sources")):
            continue
        words = {match[1].lower() for text in _texts(file) for match in VENDOR.finditer(text)}
        if words:
            found[str(file.relative_to(root))] = words
    return found


def _texts(file: Path) -> Iterator[str]:
    """Names and strings of a file's code."""
    prose = set()
    tree = _parsed(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.add(node.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield node.value
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(text := getattr(node, field, None), str):
                yield text


def circle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Modules of which each is imported by the next, the last one by the first; none: no circle."""
    order: TopologicalSorter[str] = TopologicalSorter()
    for module, imported in edges:
        order.add(module, imported)
    try:
        order.prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def loads(root: Path) -> set[tuple[str, str]]:
    """What is imported when a module is loaded, the packages that it lies in included (but ``mkernel``,
    which is the users' and imports most of the rest when it is asked for it)."""
    known = modules(root)
    edges = set()
    for each in imports(root):
        if each.now and not each.types:
            edges.add((each.module, each.imported))
            parts = each.imported.split(".")
            parents = (".".join(parts[:n]) for n in range(2, len(parts)))
            edges |= {
                (each.module, parent)
                for parent in parents
                if parent in known and not f"{each.module}.".startswith(f"{parent}.")
            }
    return edges


def runs(root: Path) -> set[tuple[str, str]]:
    """Return the imports of modules at any time, inside functions too."""
    return {(each.module, each.imported) for each in imports(root) if not each.types}


def types(root: Path) -> set[tuple[str, str]]:
    """Return the imports at the top of modules, for type checkers too."""
    return {(each.module, each.imported) for each in imports(root) if each.now}


# ---- the tree as it is ---------------------------------------------------------------------------


def test_every_module_has_a_room() -> None:
    assert not [name for name in modules(ROOT) if room(name) not in MAY_IMPORT]


def test_imports_follow_the_arrows() -> None:
    found = through_walls(ROOT)
    assert not found - THROUGH_THE_WALL, "imports against the arrows"
    assert not THROUGH_THE_WALL - found, "exceptions that nothing needs any more"


def test_rooms_do_not_import_in_circles() -> None:
    known = {*MAY_IMPORT}
    used = {(room(each.module), room(each.imported)) for each in imports(ROOT)}
    users = {
        "mkernel",
        "mkernel.fork_server",
    }  # the package itself, which rank processes import first
    edges = {(one, other) for one, other in used if one != other and not {one, other} & users}
    assert {name for edge in edges for name in edge} <= known
    assert circle(edges) == []


def test_no_vendor_is_named_in_the_core() -> None:
    found = vendors(ROOT)
    files = found.keys() | VENDORS_ALLOWED.keys()
    new = {file: found.get(file, set()) - VENDORS_ALLOWED.get(file, set()) for file in files}
    old = {file: VENDORS_ALLOWED.get(file, set()) - found.get(file, set()) for file in files}
    assert not {file: words for file, words in new.items() if words}, "vendors' names"
    assert not {file: words for file, words in old.items() if words}, "exceptions without need"


def test_modules_do_not_import_in_circles() -> None:
    assert circle(loads(ROOT)) == []
    assert circle(runs(ROOT)) == [], "an import inside a function that closes a circle"
    edges = types(ROOT)
    assert circle(edges - CIRCLES_OF_TYPES) == []
    assert edges >= CIRCLES_OF_TYPES, "exceptions without need"
    for each in CIRCLES_OF_TYPES:
        assert circle((edges - CIRCLES_OF_TYPES) | {each}), f"exception without need: {each}"


# ---- what would be found -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("walls")
    for file in modules(ROOT).values():
        target = root / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return root


PLANTED: list[tuple[str, str, Callable[[Path], object]]] = [
    ("topology/model.py", "from mkernel.backends import registry", through_walls),
    ("backends/contracts/memory.py", "def f():\n    import mkernel.world.world", through_walls),
    ("backends/nics/session.py", "from mkernel.cli import main", through_walls),
    (
        "backends/accelerators/streams/backend.py",
        "from mkernel.backends.accelerators.hopper.gemm import fused as gemm",
        through_walls,
    ),
    (
        "mkernel/plan/planner.py",
        "if TYPE_CHECKING:\n    from mkernel.backends.contracts.accelerator import Call",
        through_walls,
    ),
    ("mkernel/ops/gemm.py", "from mkernel.harness import bench_run", through_walls),
    ("mkernel/machine.py", "def on_cuda(): ...", vendors),
    ("topology/routing.py", "RATES = {'H100': 450}", vendors),
    ("mkernel/plan/planner.py", "x = torch.npu.synchronize", vendors),
    ("mkernel/world/world.py", "import nvidia_ml", vendors),
    (
        "topology/model.py",
        "from mkernel.topology import placement",
        lambda root: circle(loads(root)),
    ),
    (
        "mkernel/conformance/accelerator_subject.py",
        "def f():\n    from mkernel.conformance import checks",
        lambda root: circle(runs(root)),
    ),
    (
        "mkernel/plan/model.py",
        "if TYPE_CHECKING:\n    from mkernel.plan.planner import Planned",
        lambda root: circle(types(root) - CIRCLES_OF_TYPES),
    ),
]


@pytest.mark.parametrize(("file", "line", "seen"), PLANTED)
def test_what_is_planted_is_found(
    file: str, line: str, seen: Callable[[Path], object], copy: Path
) -> None:
    before, planted = seen(copy), copy / file
    text = planted.read_text()
    planted.write_text(f"{text}\n{line}\n")
    try:
        assert seen(copy) != before
    finally:
        planted.write_text(text)
