"""The common part of the three GEMM ops: checks of arguments, the plan, the call, the registration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import Unpack

from mkernel.errors import ArgumentError, DtypeError, ShapeError
from mkernel.ops import around, flops, validate
from mkernel.ops.around import (
    Normed,
    Scaled,
    check_scaled,
    refuse_gradients,
    scale_strides,
)
from mkernel.ops.common import Done, Execution, engine_for, planned, plans_for
from mkernel.ops.plain import local, plain, untraced
from mkernel.ops.prefetch import check_prefetch
from mkernel.ops.registration import called, native_op, ops, register
from mkernel.ops.steps import Steps
from mkernel.plan.arguments import (
    RESULTS,
    Around,
    Stored,
    Strides,
    copied,
    rows_of,
    scale_sizes,
    stored,
)
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import E4M3, DtypeName, LaunchPlan, PathChoice
from mkernel.plan.planner import Plans
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current
from mkernel.world.torch_state import dispatch_modes
from mkernel.world.world import World

GROUP = "str? invariant=None, str group"
"""The last arguments of schemas of ops that keep the promise of invariant results."""
_ARGUMENTS = (
    "a", "b", "bias", "out", "gathered", "residual", "norm_weight", "a_scale", "b_scale",
    "prefetch",
)  # fmt: skip


def _differ(a: Tensor, b: Tensor) -> ShapeError:
    return ShapeError(
        "b",
        validate.describe(b),
        f"[K, N] with K = {a.shape[-1]}, the last dimension of a",
        why=f"K differs: a has {a.shape[-1]}, b has {b.shape[0]}",
    )


class GemmCall(NamedTuple):
    """The arguments of a call of a GEMM op.

    Attributes:
        dim: of ``a``, along which ranks share rows.
        gathered: whether the gathered A is wanted, or the tensor to write it to.
        path: instead of the setting's.
        invariant: as registered ops take it (:func:`mkernel.plan.invariance.encoded`).
        shards: of rows, as :func:`mkernel.plan.mixed.encoded` returns them.
        products: columns of all B that the gathered A is multiplied with.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    dim: int = 0
    out: Tensor | None = None
    out_dtype: torch.dtype | None = None
    gathered: bool | Tensor = False
    chunk: int | None = None
    path: PathChoice | None = None
    products: tuple[int, ...] = ()
    norm: Normed | None = None
    scaled: Scaled | None = None
    prefetch: Tensor | None = None
    invariant: str | None = None
    shards: str | None = None
    group: Group = None

    def plain(self, op: str) -> GemmCall:
        """Return the call with its tensors examined. Raises as :func:`mkernel.ops.plain.plain`."""
        norm, scaled = self.norm, self.scaled
        residual, weight = (None, None) if norm is None else (norm.residual, norm.weight)
        a_scale, b_scale = (None, None) if scaled is None else (scaled.a, scaled.b)
        given = (
            self.a, self.b, self.bias, self.out, self.gathered, residual, weight, a_scale, b_scale,
            self.prefetch,
        )  # fmt: skip
        found = plain(op, _ARGUMENTS, given)
        if found is given:
            return self
        a, b, bias, out, gathered, residual, weight, a_scale, b_scale, prefetch = found
        return self._replace(
            a=a,
            b=b,
            bias=bias,
            out=out,
            gathered=gathered,
            norm=None if norm is None else norm._replace(residual=residual, weight=weight),
            scaled=None if scaled is None else scaled._replace(a=a_scale, b=b_scale),
            prefetch=prefetch,
        )


class Checked(NamedTuple):
    """The findings of the checks of a call.

    Attributes:
        plan: of the call. dtype: of the output.
        dim: of a and out that ranks share, counted from the first.
        lead: sizes of out's other dimensions than its last, ``dim`` first; of a's, ``whole``, as
            gathered.
        plans: of calls that differ from this one by their number of rows alone.
    """

    plan: LaunchPlan
    dtype: torch.dtype
    dim: int
    lead: tuple[int, ...]
    whole: tuple[int, ...]
    plans: Plans


@dataclass(frozen=True)
class GemmOp:
    """One of the GEMM ops: how the planned M and the output's rows follow from a's rows.

    ``gathers``: M counts all ranks' rows of a. ``scatters``: each rank keeps M/W rows of C.
    """

    name: str
    gathers: bool = False
    scatters: bool = False

    @property
    def dim(self) -> str | None:
        """Return the argument that names the dimension of activations along which ranks share rows."""
        return "gather_dim" if self.gathers else "scatter_dim" if self.scatters else None

    @property
    def arguments(self) -> str:
        """Return the arguments with which the schema of the registered op begins."""
        dim = "" if self.dim is None else f"int {self.dim}=0, "
        options = f"{dim}ScalarType? out_dtype=None, int? chunk=None, {self._prefetch}{GROUP}"
        return f"Tensor a, Tensor b, Tensor? bias=None, *, {options}"

    @property
    def _prefetch(self) -> str:
        """Return the argument of a tensor to prefetch, where the op takes one."""
        return "" if self.gathers or self.scatters else "Tensor? prefetch=None, "

    def lead(self, a: Tensor, dim: int, ranks: int) -> tuple[int, ...]:
        """Return the sizes of an output's dimensions but its last, ``dim`` first. ShapeError."""
        first, *rest = a.shape[dim : dim + 1] + a.shape[:dim] + a.shape[dim + 1 : -1]
        if self.gathers:
            first = first * ranks
        elif self.scatters:
            if rest and first % ranks:  # of a matrix the planner says it
                raise ShapeError(
                    "a", validate.describe(a), f"a multiple of {ranks} ranks along {self.dim}={dim}"
                )
            first = first // ranks
        return (first, *rest)

    def check(self, world: World, call: GemmCall) -> Checked:
        """Check the arguments of a call, and plan it."""
        a, b, bias, dim, out, out_dtype, gathered, *_ = call
        norm, scaled = call.norm, call.scaled
        device = world.accelerator.device
        validate.activation("a", a)
        validate.matrix("b", b)
        validate.on_device("a", a, device)
        validate.on_device("b", b, device)
        dim = validate.dimension(self.dim or "dim", dim, a)
        scales = None if scaled is None else check_scaled(a, b, scaled, device)
        given = str(a.dtype).removeprefix("torch.")
        capabilities = engine_for(world, self.name, {}, given, scales).claims
        dtype = E4M3 if scales is not None else _dtype_of(a, b, capabilities)
        wanted = out_dtype or (out.dtype if out is not None else result_dtype(a))
        out_name = validate.dtype_name("out_dtype", wanted, capabilities.out_dtypes)
        beside = a.dtype if scales is None else wanted
        k, n = b.shape
        if a.shape[-1] != k:
            raise _differ(a, b)
        if bias is not None:
            validate.vector("bias", bias, n, beside)
            validate.on_device("bias", bias, device)
        if norm is not None:
            like = "a" if scales is None else "the result"
            around.check_norm(norm, (*a.shape[:-1], n), beside, wanted, device, like=like)
        if call.prefetch is not None:
            check_prefetch(call.prefetch, device)
        lead, whole, parts = self._shared(world, a, dim, call.shards)
        rows = prod(whole if self.gathers else a.shape[:-1])
        outputs = [("out", out, lead, n, wanted)]
        if isinstance(gathered, Tensor):
            outputs.append(("gathered", gathered, whole, k, a.dtype))
        strides: dict[str, Strides] = {
            name: "packed" if output.movedim(dim, 0).is_contiguous() else "scattered"
            for name, output, *_ in outputs
            if output is not None and output.dim() == a.dim()
        }
        outermost = a.movedim(dim, 0)
        step = max(1, capabilities.alignment_bytes // a.element_size())
        strides["a"] = rows_of(outermost.shape, outermost.stride(), step)
        layout, strides["b"] = _readable(b, step, capabilities)
        if scaled is not None:
            strides |= scale_strides(scaled, dim)
        if bias is not None and capabilities.adds_bias:
            strides["bias"] = "packed" if bias.is_contiguous() else "scattered"
        steps = Around(
            copied(strides, capabilities.takes_pitched(self.name)),
            bias is not None,
            call.products,
            None if norm is None else norm.planned,
            scales,
        )
        whole_sizes: dict[str, Any] = {"m": rows, "n": n, "k": k}
        whole_sizes |= {"rows": parts} if parts else {}
        plans = plans_for(
            world, self.name, whole_sizes, dtype, out_name,
            b_layout=layout, around=steps, path=call.path, invariant=call.invariant,
        )  # fmt: skip
        plan = planned(world, plans, whole_sizes, call.chunk)
        for name, output, sizes, width, output_dtype in outputs:
            if output is not None:
                _check_output(name, output, sizes, width, output_dtype, dim, device)
        return Checked(plan, wanted, dim, lead, whole, plans)

    def _shared(
        self, world: World, a: Tensor, dim: int, shards: str | None
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return a call's ``lead`` and ``whole``, as :class:`Checked` has them, and a rank's rows by
        node; none where ranks share them evenly. ShapeError, ArgumentError, Unsupported."""
        if shards is None:
            return self.lead(a, dim, world.size), _whole(a, dim, world.size), ()
        wanted: Any = shards if shards == "speed" else [*map(int, shards.split())]
        if self.gathers and shards == "speed":
            legal = "rows of a rank by node, such as mkernel.world().shares(M, 'speed')"
            raise ArgumentError("shards", repr(shards), legal, why="a rank does not know M")
        me, size = world.identity, a.shape[dim]
        parts = world.shares(me.ranks_per_node * sum(wanted) if self.gathers else size, wanted)
        own, total = parts[me.node], me.ranks_per_node * sum(parts)
        if self.gathers and size != own:
            legal = f"{own} along {self.dim}={dim}, as shards={wanted} has it"
            raise ShapeError("a", validate.describe(a), legal)
        rest = self.lead(a, dim, 1)[1:]
        rows = tuple(part * prod(rest) for part in parts)
        return (total if self.gathers else own, *rest), (total, *rest), rows

    def known(self, world: World, call: GemmCall, family: bytes | None) -> Checked:
        """Return what :meth:`check` finds, which is asked where no call of the family was made."""
        like, a = None if family is None else world.families[family], call.a
        if like is not None and a.shape[0] > 1:
            lead, whole = self.lead(a, like.dim, world.size), _whole(a, like.dim, world.size)
            k, n = call.b.shape
            sizes = {"m": prod(whole if self.gathers else a.shape[:-1]), "n": n, "k": k}
            plan = planned(world, like.plans, sizes, call.chunk)
            return Checked(plan, like.dtype, like.dim, lead, whole, like.plans)
        found = self.check(world, call)
        if family is not None and a.shape[0] > 1:  # one row has no pitch
            world.families[family] = found
        return found

    @untraced
    def call(
        self, given: GemmCall, steps: Steps | None = None, **execution: Unpack[Execution]
    ) -> Done:
        """Run one call in its group's world. Outputs: ``out``, and ``gathered`` if asked; with a norm
        ``residual_out``, and where that quantises ``quantised`` and ``quantised_scale``; with scales
        ``gathered_scale`` beside ``gathered``, as a launch has it."""
        world, steps = current(given.group), steps or Steps()
        given = given.plain(self.name)
        known = self.known(world, given, steps.family)
        a, b, bias, _, out, _, gathered, *_ = given
        plan, dim, norm, scaled = known.plan, known.dim, given.norm, given.scaled
        overwritten = [each for each in (out, gathered) if isinstance(each, Tensor)]
        if overwritten:
            read = {"a": a, "b": b, "bias": bias, **({} if norm is None else norm.given)}
            read |= {} if scaled is None else {"a_scale": scaled.a, "b_scale": scaled.b}
            first, rows = world.rank * a.shape[dim], plan.gemm.rows
            first = world.part(rows).start // prod(known.lead[1:]) if rows else first
            _check_apart(read, out, gathered, dim, first)
        outputs = _outputs(steps, world, known, a, out, gathered)
        tensors = {"a": a, "b": b}
        if bias is not None and plan.bias == "launch":
            tensors["bias"] = bias
        if norm is not None:
            outputs |= norm.outputs(steps, outputs["out"])
        of_norm = around.of_norm(plan)
        if norm is not None and of_norm:
            tensors |= norm.given
        if scaled is not None:
            tensors |= {"a_scale": scaled.a, "b_scale": scaled.b}
        tensors |= outputs
        behind = {"residual_out", "quantised", "quantised_scale"}.difference(of_norm)
        taken = {name: x for name, x in tensors.items() if name not in behind}
        launched = around.before(steps, plan, taken, dim)
        if given.prefetch is not None and self.name in known.plans.capabilities.prefetch_ops:
            launched["prefetch"] = given.prefetch
        record = steps.launch(world, plan, launched, **execution)
        around.after(steps, plan, launched, tensors, dim, bias, norm)
        around.quantise(steps, plan, outputs)
        if overwritten:  # autograd may have saved them for a backward, and must hear of it
            increment_version(overwritten)
            steps.wrote(overwritten)
        return Done(plan, record, outputs)

    def outputs(
        self,
        *,
        steps: Steps,
        a_scale: Tensor | None = None,
        b_scale: Tensor | None = None,
        use_fast_accum: bool = False,
        **given: Any,
    ) -> Mapping[str, Tensor]:
        """Run one call by the arguments of a registered op, and return its outputs."""
        scaled = around.scaled(a_scale, b_scale, use_fast_accum)
        fields = {"dim" if name == self.dim else name: each for name, each in given.items()}
        return self.call(GemmCall(**fields, scaled=scaled), steps).outputs

    def result(self, call: GemmCall) -> Tensor:
        """Run one call, through torch's dispatcher where torch has to see it, and return its output.
        ArgumentError: a tensor beside scales that requires grad; and what :meth:`call` raises."""
        registered, named = called(call.group)
        a, b, bias, dim, out, out_dtype, _, chunk, *_ = call
        if registered is not ops:
            a, b, bias = self.local(a, b, bias, dim, call.group)
        options: dict[str, Any] = {} if self.dim is None else {self.dim: dim}
        options |= {"chunk": chunk, "invariant": call.invariant, "group": named}
        options |= {"prefetch": call.prefetch} if self._prefetch else {}
        name, scaled = self.name, call.scaled
        tensors: tuple[Any, ...] = (a, b, bias)
        if scaled is not None:
            given = {"a_scale": scaled.a, "b_scale": scaled.b, "bias": bias, "out": out}
            refuse_gradients(self.name, a=a, b=b, **given)
            name, tensors = f"{self.name}_scaled", (a, b, scaled.a, scaled.b, bias)
            options["use_fast_accum"] = scaled.use_fast_accum
        op = getattr(registered, name)
        result: Tensor
        if call.shards is None and out is None:
            result = op(*tensors, out_dtype=out_dtype, **options)
        elif out is not None and call.shards is None and traced_outputs(out, *tensors):
            found = op(*tensors, out_dtype=out_dtype or out.dtype, **options)
            result = copied_to("out", out, found, dim)
        else:
            of_a, of_b, fast = scaled or (None, None, False)
            result, _ = self.into(
                a, b, bias, out, None, of_a, of_b, fast, dim, out_dtype, chunk, None, call.group,
                call.prefetch, call.invariant, call.shards,
            )  # fmt: skip
        return result

    @cached_property
    def into(self) -> Any:
        """Return the native op of calls that write to tensors of the caller's: it returns ``out`` and
        ``gathered``."""
        names = (
            "a", "b", "bias", "out", "gathered", "a_scale", "b_scale", "use_fast_accum", "dim",
            "out_dtype", "chunk", "path", "group", "prefetch", "invariant", "shards",
        )  # fmt: skip

        def kernel(**given: Any) -> tuple[Tensor, Tensor | None]:
            outputs = self.outputs(**given)
            return outputs["out"], outputs.get("gathered")

        return native_op(
            f"{self.name}_into",
            names,
            (None, None, None),
            kernel,
            range_name=self.name,
            local=self.localised,
        )

    def localised(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a native op that are DTensors as this rank's parts. ArgumentError."""
        dim = given.get("dim", self.dim_of(given))
        own = self.local(given["a"], given["b"], given.get("bias"), dim, given["group"])
        names = [name for name in ("a", "b", "bias") if name in given]
        return dict(zip(names, own, strict=False))

    def local(self, a: Any, b: Any, bias: Any, dim: int, group: Group) -> tuple[Any, Any, Any]:
        """Return the arguments on this rank; a DTensor's part where it is sharded as the op takes it.
        ArgumentError."""
        return (
            local("a", a, dim if self.gathers else -1, group),
            local("b", b, 1 if self.gathers else 0, group),
            local("bias", bias, 0 if self.gathers else None, group),
        )

    def register(self, save: Callable[..., None], backward: Callable[..., Any]) -> None:
        """Make it known to torch as ``torch.ops.mkernel.NAME``, and with scales as ``NAME_scaled``,
        which has no derivative: a tensor that requires grad is refused there by its name.

        Args:
            save, backward: its derivative (:mod:`mkernel.ops.derivatives`).
        """

        _ = self.into  # files of plans find it by its name

        def kernel(**given: Any) -> Tensor:
            return self.outputs(**given)["out"]

        def fake(
            a: Tensor,
            b: Tensor,
            bias: Tensor | None = None,
            *,
            out_dtype: torch.dtype | None = None,
            group: str,
            **options: Any,
        ) -> Tensor:
            return self.fake(a, b, self.dim_of(options), out_dtype, current(group).size)

        def scaled_fake(
            a: Tensor,
            b: Tensor,
            a_scale: Tensor,
            b_scale: Tensor,
            bias: Tensor | None = None,
            *,
            use_fast_accum: bool = False,
            **options: Any,
        ) -> Tensor:
            return fake(a, b, bias, **options)

        register(
            f"{self.name}({self.arguments}) -> Tensor", kernel, fake, save, backward,
            flops=self.flops, local=self.localised, family=("a",),
        )  # fmt: skip
        dim = "" if self.dim is None else f"int {self.dim}=0, "
        register(
            f"{self.name}_scaled(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, "
            f"Tensor? bias=None, *, {dim}ScalarType? out_dtype=None, bool use_fast_accum=False, "
            f"int? chunk=None, {self._prefetch}{GROUP}) -> Tensor",
            kernel,
            scaled_fake,
            flops=self.flops,
            range_name=self.name,
            local=self.localised,
        )

    @property
    def flops(self) -> Callable[..., int]:
        """Return the function that counts the operations of the op's product."""
        return flops.gather if self.gathers else flops.own_rows

    def dim_of(self, options: dict[str, int]) -> int:
        """Return the dimension that a registered op was given; torch leaves the default out."""
        return options.get(self.dim or "", 0)

    def fake(
        self, a: Tensor, b: Tensor, dim: int, out_dtype: torch.dtype | None, ranks: int
    ) -> Tensor:
        """Make an output without data, of a call on tensors that may be without."""
        validate.activation("a", a)
        validate.matrix("b", b)
        if a.shape[-1] != b.shape[0]:
            raise _differ(a, b)
        dim = validate.dimension(self.dim or "dim", dim, a)
        lead = self.lead(a, dim, ranks)
        made = a.new_empty((*lead, b.shape[1]), dtype=out_dtype or result_dtype(a))
        return around.shaped(made, lead, dim)

    def fake_gathered(self, a: Tensor, dim: int, ranks: int) -> Tensor:
        """Make the gathered A, likewise."""
        dim = validate.dimension(self.dim or "dim", dim, a)
        lead = _whole(a, dim, ranks)
        return around.shaped(a.new_empty((*lead, a.shape[-1])), lead, dim)


def traced_outputs(out: Tensor | None, *inputs: Tensor | None) -> bool:
    """Return whether the registered op is to be called and its result copied into an output of the
    caller's: in compiled functions and modes of torch, which see registered ops alone, and torch's
    effectful ops, whose order compilers keep, may not write to their arguments. Not where a gradient
    would go into it, which the call refuses."""
    if out is None or not (torch.compiler.is_compiling() or dispatch_modes()):
        return False
    return not torch.is_grad_enabled() or not any(
        each is not None and each.requires_grad for each in inputs
    )


def copied_to(name: str, out: Tensor, result: Tensor, dim: int) -> Tensor:
    """Copy a result into a caller's output, and return that. ShapeError, DtypeError, LayoutError."""
    validate.output(name, out, tuple(result.shape), result.dtype, dim)
    return out.copy_(result)


def _whole(a: Tensor, dim: int, ranks: int) -> tuple[int, ...]:
    """Return the sizes of the gathered A's dimensions but its last, ``dim`` first."""
    return (a.shape[dim] * ranks, *a.shape[:dim], *a.shape[dim + 1 : -1])


def _outputs(
    steps: Steps,
    world: World,
    known: Checked,
    a: Tensor,
    out: Tensor | None,
    gathered: bool | Tensor,
) -> dict[str, Tensor]:
    """Return the outputs that a call writes to: the caller's, or new ones. ``gathered``: False where
    it is not wanted."""
    plan = known.plan
    if out is None:
        rows = steps.output(world, plan, (prod(known.lead), plan.gemm.n), a, known.dtype)
        out = around.from_rows(steps, rows, known.lead, known.dim)
    outputs = {"out": out}
    if gathered is not False and gathered is not None:
        if gathered is True:
            rows = steps.empty((plan.gemm.m, plan.gemm.k), a, a.dtype)
            gathered = around.from_rows(steps, rows, known.whole, known.dim)
        outputs["gathered"] = gathered
        if plan.scales is not None:
            outputs["gathered_scale"] = steps.empty(_gathered_scale(plan), a, torch.float32)
    return outputs


def _check_output(
    name: str,
    output: Tensor,
    sizes: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    dim: int,
    device: str,
) -> None:
    """Check a caller's output. ``sizes``: of its dimensions but the last, ``dim`` first."""
    shape = (*sizes[1 : dim + 1], sizes[0], *sizes[dim + 1 :], width)
    validate.on_device(name, output, device)
    validate.output(name, output, shape, dtype, dim)


def _check_apart(
    read: dict[str, Any], out: Tensor | None, gathered: bool | Tensor, dim: int, first: int
) -> None:
    """Raise ArgumentError where outputs of the caller's share memory with inputs or each other; but
    ``a`` may be this rank's rows of ``gathered``, from ``first`` on."""
    validate.apart({"out": out}, read)
    if isinstance(gathered, Tensor):
        a: Tensor = read["a"]
        own = gathered.narrow(dim, first, a.shape[dim])
        if own.data_ptr() == a.data_ptr() and own.stride() == a.stride():
            read = {name: each for name, each in read.items() if name != "a"}
        validate.apart({"gathered": gathered}, {**read, "out": out})


def _dtype_of(a: Tensor, b: Tensor, capabilities: AcceleratorCapabilities) -> DtypeName:
    """Check operands without scales, and return their dtype. DtypeError."""
    if a.dtype == torch.float8_e4m3fn:
        legal = "one of " + ", ".join(capabilities.dtypes)
        raise DtypeError("a.dtype", a.dtype, legal, why="e4m3 operands need a_scale and b_scale")
    found = validate.dtype_name("a.dtype", a.dtype, capabilities.dtypes)
    validate.same_dtype("b.dtype", b, "a", a)
    return found


def result_dtype(a: Tensor) -> torch.dtype:
    """Return the dtype of a result whose dtype the caller leaves open."""
    return validate.DTYPES[RESULTS[0]] if a.dtype == torch.float8_e4m3fn else a.dtype


def _gathered_scale(plan: LaunchPlan) -> tuple[int, int]:
    """Return the shape of the scales of all ranks' rows; one a rank, where they are one for all of its
    rows."""
    assert plan.scales is not None
    mode = plan.scales.mode
    rows = plan.world_size if mode == "tensor" else plan.gemm.m
    return rows, scale_sizes(mode, rows, plan.gemm.n, plan.gemm.k)[0][1]


def _readable(b: Tensor, step: int, capabilities: AcceleratorCapabilities) -> Stored:
    """Return the layout of b, or the one that it will have when it has been copied into one that the
    backend reads. What is e4m3 and not column-major stays as it is, to be refused."""
    found = stored(b.shape, b.stride(), step)
    if b.dtype == torch.float8_e4m3fn:
        by_columns = rows_of(b.shape[::-1], b.stride()[::-1], step)
        return found if by_columns == "scattered" else Stored("column", by_columns)
    if found.layout in capabilities.b_layouts:
        return found
    return Stored(capabilities.b_layouts[0], "scattered")
