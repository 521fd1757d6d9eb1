"""What the three GEMM ops share: the checks of a and b, the plan, the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import Unpack

from mkernel.errors import ShapeError
from mkernel.ops import validate
from mkernel.ops.common import Done, Execution, checked, plan_for, tensor_signature
from mkernel.ops.plain import plain, seen_by_torch
from mkernel.ops.registration import group_name, register
from mkernel.ops.untraced import untraced
from mkernel.plan.model import LaunchPlan, PathChoice
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current
from mkernel.world.world import World

_ARGUMENTS = ("a", "b", "out", "gathered")
ARGUMENTS = "Tensor a, Tensor b, *, ScalarType? out_dtype=None, int? chunk=None, str group"
"""What the schemas of the registered ops begin with."""


def _differ(a: Tensor, b: Tensor) -> ShapeError:
    return ShapeError(
        "b",
        validate.describe(b),
        f"[K, N] with K = {a.shape[1]}, the number of columns of a",
        why=f"K differs: a has {a.shape[1]}, b has {b.shape[0]}",
    )


@dataclass(frozen=True)
class Checked:
    """What the checks of a call found: its plan; shape and dtype of the output."""

    plan: LaunchPlan
    shape: tuple[int, int]
    dtype: torch.dtype


@dataclass(frozen=True)
class GemmOp:
    """One of the GEMM ops: how the planned M and the output's rows follow from a's rows.

    ``gathers``: M counts all ranks' rows of a. ``scatters``: each rank keeps M/W rows of C.
    """

    name: str
    gathers: bool = False
    scatters: bool = False

    def check(
        self,
        world: World,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        gathered: bool | torch.Tensor,
        chunk: int | None,
        path: PathChoice | None,
    ) -> Checked:
        """Check the arguments of a call, and plan it."""
        capabilities = world.accelerator.capabilities()
        device = world.accelerator.device
        validate.matrix("a", a)
        validate.matrix("b", b)
        validate.on_device("a", a, device)
        validate.on_device("b", b, device)
        dtype = validate.dtype_name("a.dtype", a.dtype, capabilities.dtypes)
        validate.same_dtype("b.dtype", b, "a", a)
        wanted = out_dtype or (out.dtype if out is not None else a.dtype)
        out_name = validate.dtype_name("out_dtype", wanted, capabilities.out_dtypes)
        if a.shape[1] != b.shape[0]:
            raise _differ(a, b)
        validate.row_major("a", a)
        b_layout = validate.layout("b", b, capabilities)
        rows = a.shape[0] * (world.size if self.gathers else 1)
        plan = plan_for(
            world,
            self.name,
            {"m": rows, "n": b.shape[1], "k": a.shape[1]},
            dtype,
            out_name,
            b_layout=b_layout,
            chunk=chunk,
            path=path,
        )
        shape = (rows // world.size if self.scatters else rows, b.shape[1])
        if out is not None:
            validate.on_device("out", out, device)
            validate.output("out", out, shape, wanted)
        if not isinstance(gathered, bool):
            validate.on_device("gathered", gathered, device)
            validate.output("gathered", gathered, (rows, a.shape[1]), a.dtype)
        return Checked(plan, shape, wanted)

    @untraced
    def call(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        chunk: int | None = None,
        gathered: bool | torch.Tensor = False,
        path: PathChoice | None = None,
        group: Group = None,
        signature: bytes | None = None,
        **execution: Unpack[Execution],
    ) -> Done:
        """One call in a group's world. Outputs: ``out``, and ``gathered`` if asked.

        ``path``: instead of the setting's. ``signature``: as :meth:`_known` gave it.
        """
        world = current(group)
        a, b, out, gathered = plain(self.name, _ARGUMENTS, (a, b, out, gathered))
        known = checked(
            world,
            (
                self.name,
                tensor_signature(a),
                tensor_signature(b),
                tensor_signature(out),
                tensor_signature(gathered),
                out_dtype,
                repr(chunk),
                path,
            ),
            lambda: self.check(world, a, b, out, out_dtype, gathered, chunk, path),
        )
        plan = known.plan
        overwritten = []
        if out is None:
            out = torch.empty(known.shape, dtype=known.dtype, device=a.device)
        else:
            overwritten.append(out)
        outputs = {"out": out}
        if gathered is not False:
            if gathered is True:
                whole = (plan.gemm.m, plan.gemm.k)
                gathered = torch.empty(whole, dtype=a.dtype, device=a.device)
            else:
                overwritten.append(gathered)
            outputs["gathered"] = gathered
        record = world.run(plan, {"a": a, "b": b, **outputs}, signature=signature, **execution)
        if overwritten:  # autograd may have saved them for a backward, and must hear of it
            increment_version(overwritten)
        return Done(plan, record, outputs)

    def result(
        self,
        a: Tensor,
        b: Tensor,
        *,
        out: Tensor | None,
        out_dtype: torch.dtype | None,
        chunk: int | None,
        group: Group,
    ) -> Tensor:
        """The output of one call, through torch's dispatcher where torch has to see it."""
        found: Any = None
        if not torch.compiler.is_compiling():
            found = self._known(a, b, out, out_dtype, chunk, group)
            if isinstance(found, Tensor):
                return found
        if out is None and seen_by_torch(a, b):
            registered = getattr(torch.ops.mkernel, self.name)
            result: Tensor = registered(
                a, b, out_dtype=out_dtype, chunk=chunk, group=group_name(group)
            )
            return result
        return self._called(a, b, out, out_dtype, chunk, group, found)

    def _known(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor | None,
        out_dtype: torch.dtype | None,
        chunk: int | None,
        group: Group,
    ) -> Any:
        """The output of a call like one before, started without Python. Else the signature under which
        such calls may be known from the next on; or None."""
        known = current(group).known
        return None if known is None else known(self.name, a, b, out, out_dtype, chunk)

    def _called(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor | None,
        out_dtype: torch.dtype | None,
        chunk: int | None,
        group: Group,
        signature: bytes | None,
    ) -> Tensor:
        done = self.call(
            a, b, out=out, out_dtype=out_dtype, chunk=chunk, group=group, signature=signature
        )
        result: Tensor = done.outputs["out"]
        return result

    def register(self, save: Callable[..., None], backward: Callable[..., Any]) -> None:
        """Make it known to torch as ``torch.ops.mkernel.NAME``.

        Args:
            save, backward: its derivative (:mod:`mkernel.ops.derivatives`).
        """

        def kernel(
            a: Tensor,
            b: Tensor,
            *,
            out_dtype: torch.dtype | None = None,
            chunk: int | None = None,
            group: str,
        ) -> Tensor:
            found = self._known(a, b, None, out_dtype, chunk, group)
            if isinstance(found, Tensor):
                return found
            return self._called(a, b, None, out_dtype, chunk, group, found)

        def fake(
            a: Tensor,
            b: Tensor,
            *,
            out_dtype: torch.dtype | None = None,
            chunk: int | None = None,
            group: str,
        ) -> Tensor:
            return self.fake(a, b, out_dtype, current(group).size)

        register(f"{self.name}({ARGUMENTS}) -> Tensor", kernel, fake, save, backward)

    def fake(self, a: Tensor, b: Tensor, out_dtype: torch.dtype | None, ranks: int) -> Tensor:
        """An output without data, of a call on tensors that may be without."""
        validate.matrix("a", a)
        validate.matrix("b", b)
        if a.shape[1] != b.shape[0]:
            raise _differ(a, b)
        rows = a.shape[0]
        if self.gathers:
            rows = rows * ranks
        elif self.scatters:
            rows = rows // ranks
        return a.new_empty((rows, b.shape[1]), dtype=out_dtype or a.dtype)
