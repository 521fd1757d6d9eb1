"""AllReduce on one rank, in one of three ways.

  mail        one kernel: x ──▶ every peer's mail ──▶ sums ──▶ norm ──▶ out
              (``kernels/collectives/sum_rows.hpp``)
  two_shot    a collective: x ──▶ owners ──▶ sums ──▶ every rank's out
              (``kernels/collectives/collectives.hpp``); where there is a norm, a kernel behind it
  mail_twice  the same, by mail (``kernels/collectives/mail.hpp``); symmetric outs as two_shot. Where
              there is a norm, one kernel as of mail, in which each rank normalises the sums that come
Invariant results are added by one tree, in the order of ranks, in the first two ways; in the third the
two terms of two ranks are added, which is the same.
All views run alike, except compute_only, in which the sum has only this rank's terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.collectives import mail
from mkernel.backends.accelerators.cuda.collectives.landing import outputs_of, wanted
from mkernel.backends.accelerators.cuda.collectives.norm import (
    check_tree,
    normalise,
    rows_of,
    sum_by_mail,
)
from mkernel.backends.accelerators.cuda.device_world import (
    NO_DATA,
    DispatchContext,
    call_id,
    device_world,
    one_node,
)
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.prefetch import prefetch_of
from mkernel.backends.accelerators.cuda.schedule import SumSchedule
from mkernel.backends.accelerators.cuda.starters import normalises, summed_rows
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.errors import Unsupported
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class SumExecutor:
    """The executor of one plan's AllReduce calls in a world, into ``out``."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        made, how = native(), call.plan.part(SumSchedule)
        self._plan, self._context = call.plan, context
        self._by_mail = _keeps_rows(call.plan)
        self._world = device_world(call, context)
        self._alone: _kernels.DeviceWorld = made.DeviceWorld(
            [call.workspace], 0, context.control, call.timeout_s, call_id(call)
        )
        self._together: _kernels.Collective = made.Collective(
            self._world,
            _staging(call.plan),
            blocks=2 * how.blocks,
            by_mail=how.way == "mail_twice",
            tree=_by_tree(call.plan),
        )
        self._outputs = outputs_of(call.plan, context) if how.way == "two_shot" else made.Outputs()

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that a plan needs. Unsupported."""
        world, how, made = one_node(plan), plan.part(SumSchedule), native()
        twice = how.way == "mail_twice"
        check_tree(plan, twice=twice)
        if _keeps_rows(plan):
            try:
                made.check_sum_rows(world, rows_of(plan, how.blocks, twice=twice))
            except ValueError as error:  # too many bytes, or rows too long to keep
                raise Unsupported(f"{plan.op} of {plan.summed}: {error}") from None
        elif twice and (sent := _mail(plan)) > mail.MAIL_BYTES:
            raise Unsupported(
                f"{plan.op} of {plan.summed}: the ranks send {sent} bytes; a call by mail may have "
                f"{mail.MAIL_BYTES}"
            )
        if world == 1:
            return Workspace((NO_DATA,))
        outputs = wanted(plan) if how.way == "two_shot" else 0
        return Workspace((made.DATA_OFFSET + _staging(plan),), outputs=outputs)

    def start(self, call: Call, stream: int) -> None:
        """Queue one call on a stream."""
        if self._by_mail:
            world = self._alone if call.view == "compute_only" else self._world
            how = call.plan.part(SumSchedule)
            twice, terms = how.way == "mail_twice", aligned(call.tensors["x"])
            sum_by_mail(call, world, terms, how.blocks, stream, twice, _by_tree(call.plan))
            return
        if call.view == "compute_only":
            call.tensors["out"].copy_(call.tensors["x"])
        else:
            self._two_shot(call, stream)
        normalise(call, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object:
        """Return a starter of calls whose ``out`` has the same place."""
        plan, context, made = self._plan, self._context, native()
        how = plan.part(SumSchedule)
        found: object = made.sum_starter(
            context.device,
            context.order,
            self._together,
            getattr(made.Element, plan.dtype),
            plan.summed.m * plan.summed.n,
            list(symmetric.get("out", ())),
            self._outputs,
            summed_rows(plan, how.blocks, how.way == "mail_twice", tree=_by_tree(plan)),
            self._by_mail,
        )
        return found

    def _two_shot(self, call: Call, stream: int) -> None:
        made, x, out = native(), call.tensors["x"], call.tensors["out"]
        outs = list(call.symmetric.get("out", ())) or [out.data_ptr()]
        landings = self._outputs.landings(out.data_ptr())
        together = self._together.of_call(
            call_id(call), call.timeout_s, landings, **prefetch_of(call)
        )
        element = getattr(made.Element, call.plan.dtype)
        made.all_reduce(together, element, x.data_ptr(), x.numel(), outs, made.Way.two_shot, stream)


def _by_tree(plan: LaunchPlan) -> bool:
    """Return whether kernels add by the tree; they add two terms as it does."""
    return plan.invariant is not None and plan.part(SumSchedule).way != "mail_twice"


def _keeps_rows(plan: LaunchPlan) -> bool:
    """Return whether one kernel sums rows by mail, and normalises them if the launch does."""
    way = plan.part(SumSchedule).way
    return way == "mail" or (way == "mail_twice" and normalises(plan))


def _mail(plan: LaunchPlan) -> int:
    """Return the bytes that two Lamport exchanges send."""
    elements, dtype = plan.summed.m * plan.summed.n, plan.dtype
    return mail.of_two_exchanges(elements, plan.world_size, dtype, dtype)


def _staging(plan: LaunchPlan) -> int:
    """Return the bytes of the data area that the collective needs; enough also if outs are not
    symmetric."""
    if plan.world_size == 1 or _keeps_rows(plan):
        return 0
    made, shape = native(), plan.summed
    element = getattr(made.Element, plan.dtype)
    needed: int = made.all_reduce_staging(
        plan.world_size, element, shape.m * shape.n, made.Way.two_shot, False
    )
    return needed
