"""What is mutated, and the tests that are to notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """``sources``: files, as globs from the root. ``tests``: those that run in this process, of which
    the ones that execute a mutated line judge it. ``further``: tests that start processes of their own,
    whose lines nobody sees; they all judge what those before let pass."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    further: tuple[str, ...] = ()

    def files(self, root: Path) -> list[str]:
        """The sources, by path from the root."""
        found = {path for pattern in self.sources for path in root.glob(pattern)}
        return sorted(str(path.relative_to(root)) for path in found if path.stat().st_size)


MODULES = {
    "planner": Module(
        ("mkernel/plan/*.py",),
        (
            "tests/unit/plan",
            "tests/unit/streams/test_streams_plans.py",
            "tests/unit/hopper/test_hopper_schedule.py",
            "tests/unit/ascend/test_ascend_plans.py",
        ),
    ),
    "topology": Module(
        ("topology/*.py", "topology/sources/*.py"), ("tests/unit/topology", "tests/unit/plan")
    ),
    "protocol": Module(
        (
            "mkernel/world/a*.py",
            "mkernel/world/b*.py",
            "mkernel/world/exchange.py",
            "mkernel/world/process_group.py",
            "mkernel/world/h*.py",
            "mkernel/world/identity.py",
            "mkernel/world/order.py",
            "mkernel/world/sealing.py",
            "backends/nics/provider.py",
            "backends/nics/report.py",
            "backends/runtime/fd_exchange.py",
            "mkernel/harness/protocol.py",
        ),
        (
            "tests/unit/world",
            "tests/unit/nics",
            "tests/unit/test_fd_exchange.py",
            "tests/unit/harness/test_bench_protocol.py",
        ),
    ),
    "ops": Module(
        ("mkernel/ops/*.py",),
        (
            "tests/unit/ops",
            "tests/unit/test_plain.py",
            "tests/unit/plan",
            "tests/unit/cases",
            "tests/unit/test_tensor_signature.py",
            "tests/unit/test_zigzag.py",
        ),
        ("tests/torch/test_registered_ops.py", "tests/multiprocess/test_unusable_tensors.py"),
    ),
    "world": Module(
        ("mkernel/world/*.py",),
        (
            "tests/unit/world",
            "tests/unit/nics",
            "tests/unit/ops",
            "tests/unit/test_selection.py",
            "tests/unit/test_settings.py",
        ),
        ("tests/torch/test_groups.py", "tests/multiprocess/test_launch.py"),
    ),
}
