"""What tests of registered ops share: tensors that every process can draw, ops called on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import kept_ranks
import torch
from torch import Tensor
from torch.library import opcheck

import mkernel

SCALED_MM = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")
"""Whether this torch multiplies e4m3 on CPUs; that of 2.6 does not."""


def operand(name: str, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that every process can draw of any rank's."""
    seed = 1000 * rank + sum(map(ord, name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def drawn_ids(routing: str, rank: int, experts: int, tokens: int, top_k: int) -> Tensor:
    """Expert numbers [tokens, top_k] that every process can draw of any rank's: uniform, or with a
    flaw that ``routing`` names."""
    chance = torch.Generator().manual_seed(rank)
    ids = torch.randint(experts, (tokens, top_k), generator=chance)
    if routing == "one expert":  # all ranks but one have no rows
        ids = torch.full_like(ids, 4)
    elif routing == "duplicates":
        ids[::2, 1] = ids[::2, 0]
    elif routing == "padded":
        ids[:, 1] = -1
        ids[rank::4] = -1
    return ids


def on_ranks(
    check: Callable[..., Any], *arguments: Any, ranks: int = 2, accelerator: str = "streams"
) -> list[Any]:
    """Return what ``check`` returns on each rank, in processes that are kept."""
    return kept_ranks.run(check, *arguments, ranks_per_node=ranks, accelerator=accelerator)


def checked(
    op: Any, arguments: Iterable[Any], *, tests: Sequence[str] | None = None, **options: Any
) -> dict[str, str]:
    """Findings of torch.library.opcheck of an op in the world; all ranks check in lock-step. ``tests``:
    those of its tests; None: all."""
    group = {"group": mkernel.world().name}
    some = {} if tests is None else {"test_utils": tuple(tests)}
    found = opcheck(
        op.default, tuple(arguments), {**options, **group}, raise_exception=False, **some
    )
    return {name: str(outcome) for name, outcome in found.items() if outcome != "SUCCESS"}


def close(found: Any, wanted: Any, tolerance: float, what: str = "") -> None:
    """Fail where a result is not the float64 one."""
    assert found.shape == wanted.shape, what
    error = float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
    assert error <= tolerance, f"{what}: relative error {error:.2e}"
