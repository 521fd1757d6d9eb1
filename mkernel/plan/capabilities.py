"""The capabilities that an accelerator backend claims."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from typing_extensions import Self

from mkernel.errors import InputFileError
from mkernel.plan.model import Activation, AttentionLayout, AttentionShape, DtypeName, ScaleMode
from mkernel.plan.pipeline import Returns
from mkernel.topology.cost import MachineConstants, load_constants
from mkernel.topology.model import Accelerator, KindName, Model
from mkernel.topology.sources.chips import described, runs

_EVERY_WAY: tuple[Returns, ...] = get_args(Returns)


class AcceleratorCapabilities(Model):
    """The capabilities that an accelerator backend claims; the conformance kit holds it to exactly
    this."""

    ops: tuple[str, ...]
    dtypes: tuple[DtypeName, ...]
    out_dtypes: tuple[DtypeName, ...]
    mixed_dtypes: bool = True
    """Says that the output's dtype may differ from the inputs'."""
    rounded_partials: bool = False
    """Says that a sum over ranks may add results of single ranks that were rounded to the output's
    dtype, each once; else everything is float32 until the end."""
    b_layouts: tuple[Literal["row", "column"], ...]
    pitched: tuple[Literal["a", "b"], ...] = ()
    """Operands of GEMM ops that the backend takes with any distance, a multiple of
    ``alignment_bytes``, between rows (columns, if b is column-major). Other tensors whose elements
    are not packed are copied."""
    packed_shards: bool = False
    """Says that AllGather+GEMM does not take a pitched ``a``, which travels as it lies."""
    adds_bias: bool = False
    """Says that launches of GEMM ops add a bias before they round results. Else the op adds it to
    rounded results, and rounds again."""
    adds_norm: bool = False
    """Says that launches of GEMM+AllReduce and AllReduce add a residual and normalise rows. Else
    the op does both, on rounded sums."""
    quantises_norms: bool = False
    """Says that launches which normalise give the rows in e4m3 where these are wanted. Else the op
    quantises them."""
    scale_modes: tuple[ScaleMode, ...] = ()
    """Scale modes with which GEMM ops take e4m3 operands, whose B is column-major; empty: they take
    none. Results of such products have the dtypes in ``out_dtypes`` that
    :data:`mkernel.plan.arguments.RESULTS` lists."""
    fused_scale_modes: tuple[ScaleMode, ...] = ()
    """Scale modes that the backend's own kernels take beside a library, if products may be added
    with fewer bits (``use_fast_accum``) and the world has one node."""
    fused_float32_scale_modes: tuple[ScaleMode, ...] = ()
    """The same as ``fused_scale_modes``, if products are added in float32."""
    scaled_experts: bool = False
    """Says that dispatch+GEMM and GEMM+combine take e4m3 weights, column-major, with scales by blocks,
    and rows that are e4m3 with such scales, or in 16 bits and quantised by the launch; a dispatch alone
    takes such rows too."""
    why_no_scaled_experts: str = ""
    """The reason why it does not, for errors; empty: there is nothing to say."""
    alignment_bytes: int
    transfer_paths: tuple[str, ...]
    """Paths of transfers. ``p2p``: kernels write to peers of the node. ``nic``: they also push puts
    to ranks of other nodes. ``staged``: these rest in host memory where NICs do not reach the
    device's."""
    peer_access: bool
    multicast: bool = False
    simulated: bool = False
    compute_cores: int
    comm_cores: int
    """Blocks that plans may give to each kernel, where the described machine does not say how many
    cores its chips have."""
    most_cores: int | None = None
    """The largest number of a chip's cores that kernels use, however many it has; None: all."""
    invariant_ops: tuple[str, ...] = ()
    """Ops whose launches keep the promise of invariant results (:mod:`mkernel.plan.invariance`), on
    every path and in every exchange that plans with ``CommonPart.invariant`` have."""
    invariant_documents: bool = False
    """Says that attention with invariant results takes packed documents too."""
    sums_in_rank_order: bool = True
    """Says that the terms of ranks are added in rank order, in float32; if not, they are added in
    another order, which is fixed too."""
    most_ranks: int | None = None
    """The largest world in ranks; None: any number."""
    stream_ordered: bool = False
    """Says that a call is only queued on the device when the op returns, as torch's own ops are. A
    failure then surfaces at the next call, at ``mkernel.synchronize()`` or at ``finalize()``."""
    settles_puts: bool = False
    """Says that a call ends only when NICs have completed its puts, even if they keep no order.
    Else the host waits for such a NIC after each call."""
    prefetch_ops: tuple[str, ...] = ()
    """Ops whose launches may bring ``Call.tensors["prefetch"]``, which they do not read otherwise,
    to a cache while ranks exchange. Other ops are not given it."""
    library_ops: tuple[str, ...] = ()
    """Ops that also run as a library's product and a collective (``LaunchPlan.path``), in a world of
    one node. The planner takes the faster path, or the one that ``MKERNEL_PATH`` names."""
    only_library_ops: tuple[str, ...] = ()
    """Those of ``library_ops`` that run in no other way, whatever the number of nodes."""
    hierarchical_ops: tuple[str, ...] = ()
    """Ops that also exchange hierarchically between nodes of several ranks
    (:data:`mkernel.plan.pipeline.Exchange`). The planner takes the exchange that is predicted to be
    faster, or the one that ``MKERNEL_EXCHANGE`` names."""
    one_node_ops: tuple[str, ...] = ()
    """Ops that run in worlds of one node only."""
    far_returns: tuple[Returns, ...] = ("slots", "ranks")
    """The ways in which results of MoE GEMM+combine may come home in worlds of several nodes."""
    head_dims: tuple[int, ...] = ()
    """Head dimensions that attention takes; empty: any that is aligned."""
    positions: int = 1
    """A rank's part of a sequence, or each half of it if attention is causal, is a multiple of so
    many positions."""
    attention_layouts: tuple[AttentionLayout, ...] = ("heads",)
    activations: tuple[Activation, ...] = ()
    """Activations that dispatch+GEMM applies to its float32 sums, before it rounds them."""
    documents: tuple[str, ...] = ()
    """Ops of attention that take sequences of several packed documents."""
    routing_of_ids: bool = False
    """Says that the routing words of its MoE handles begin with the ids of all ranks' tokens and
    end with the rows of the outputs. Such backends read each other's handles: an op that reads one
    may run on another backend than the dispatch."""
    reuses_routing: Literal["never", "in_one_node", "always"] = "never"
    """Says in which worlds dispatches take the routing of an earlier one."""
    kinds: tuple[KindName, ...] = ()
    """Kinds of devices that the backend runs on; empty: any."""
    architectures: tuple[str, ...] = ()
    """Chips that the backend's kernels run on, such as ``sm_90``, or ``sm_80+``, which is that one and
    later ones; empty: any of these kinds."""
    constants: MachineConstants | None = None
    """Constants of its machine, from a data file that the backend brings. None: no times of plans
    are predicted, unless the user gives a file (``MKERNEL_CONSTANTS``)."""
    cards: tuple[MachineConstants, ...] = ()
    """The same with other cards; of those of one architecture the first are of devices whose
    product is not known."""
    link_gbs: float | None = None
    """The most that links between devices of a node carry in plans; None: what they do."""
    process_group: bool = False
    """Says that calls need a torch.distributed group (``Call.group``), which carries all bytes
    between ranks, also within a node, except those of ``put_ops``; no NIC session is opened."""
    put_ops: tuple[str, ...] = ()
    """Ops that do not need the process group in a world of one node in which every rank's device
    reaches every other's memory: their messages are puts of the backend's own (``p2p``)."""
    carrier: str = "torch.distributed"
    """The process group in words, for plans and reports."""

    def __hash__(self) -> int:
        # Plans are looked up by it: what tells most claims apart is enough.
        return hash((self.ops, self.compute_cores, self.comm_cores))

    def misfit(self, device: Accelerator) -> str | None:
        """Return why calls cannot run on a device, as what the backend "is" or "has"; None if
        nothing known speaks against it. An emulated device is the backend's own."""
        if device.emulated:
            return None
        if self.simulated:
            return f"is a simulator, and {device.name} is a real device"
        if self.kinds and device.kind not in self.kinds:
            return f"runs on {', '.join(self.kinds)} devices, and {device.name} is {device.kind}"
        if self.architectures and not any(runs(each, device) for each in self.architectures):
            kernels = ", ".join(each.replace("+", " and later") for each in self.architectures)
            return f"has kernels for {kernels} only, not for {described(device)}"
        return None

    def constants_by(
        self, file: Path | None, more: Sequence[MachineConstants] = ()
    ) -> tuple[MachineConstants, ...]:
        """Return the constants in a user's file (``mkernel probe --measure`` writes one), or the
        backend's own: those of its machine, then those with other cards, at last ``more`` of a world
        (``AcceleratorBackend.cards_of``). InputFileError, also for a card that is none of these."""
        every = () if self.constants is None else (self.constants, *self.cards, *more)
        if file is not None:
            given, known = load_constants(file), [one.card for one in every if one.card]
            if known and given.card not in (None, *known):
                raise InputFileError(
                    f"constants file {file}: card {given.card!r} is unknown; known: {', '.join(known)}"
                )
            every = (given,)
        if self.link_gbs is None:
            return every
        return tuple(one.model_copy(update={"p2p_most_gbs": self.link_gbs}) for one in every)

    def takes_routing(self, nodes: int) -> bool:
        """Return whether a dispatch in a world of so many nodes takes the routing of another."""
        return self.reuses_routing == "always" or (
            self.reuses_routing == "in_one_node" and nodes == 1
        )

    def takes_pitched(self, op: str) -> tuple[Literal["a", "b"], ...]:
        """Return the operands of a GEMM op that may be pitched."""
        shards = self.packed_shards and op == "all_gather_gemm"
        return tuple(name for name in self.pitched if not (shards and name == "a"))

    def with_cores(self, cores: int | None) -> Self:
        """Return these capabilities limited to chips of so many cores. None: the number is not
        known."""
        if cores is None or self.compute_cores == cores >= self.comm_cores:
            return self
        cores = min(cores, self.most_cores or cores)
        fewer = {"compute_cores": cores, "comm_cores": min(self.comm_cores, cores)}
        return self.model_copy(update=fewer)

    def group_carries(self, op: str, nodes: int) -> bool:
        """Return whether the process group carries the bytes of an op's calls in such a world, as
        far as this does not depend on the machine."""
        return self.process_group and (nodes > 1 or op not in self.put_ops)

    @property
    def between_nodes(self) -> bool:
        """Return whether calls can reach ranks of other nodes, by puts of a NIC or by a process
        group."""
        return self.process_group or "nic" in self.transfer_paths

    @property
    def stages(self) -> bool:
        """Return whether what kernels send to other nodes may rest in host memory."""
        return "staged" in self.transfer_paths

    def provides(self, op: str, nodes: int) -> bool:
        """Return whether the backend has the op in a world of so many nodes."""
        return op in self.ops and (nodes == 1 or op not in self.one_node_ops)

    def ways_home(self, nodes: int) -> tuple[Returns, ...]:
        """Return how results of MoE GEMM+combine may come home in a world of so many nodes."""
        return self.far_returns if nodes > 1 else _EVERY_WAY

    def takes_attention(self, op: str, shape: AttentionShape, world: int) -> bool:
        """Return whether the backend takes an attention shape that is legal at all."""
        return (
            (not self.head_dims or shape.head_dim in self.head_dims)
            and shape.sequence % self.sequence_step(shape, world) == 0
            and shape.layout in self.attention_layouts
            and (op in self.documents or not shape.documents)
        )

    def sequence_step(self, shape: AttentionShape, world: int) -> int:
        """Return the number of positions of which the sequence of all ranks must be a multiple."""
        return world * (2 if shape.causal else 1) * self.positions

    def too_many(self, ranks: int) -> str | None:
        """Return why a world cannot have so many ranks, as what the backend "runs"; None: it can."""
        if self.most_ranks is None or ranks <= self.most_ranks:
            return None
        return f"runs worlds of at most {self.most_ranks} ranks, not of {ranks}"

    def dtype_pairs(self) -> tuple[tuple[DtypeName, DtypeName], ...]:
        """Return every claimed (dtype of the inputs, dtype of the output)."""
        return tuple(
            (dtype, out)
            for dtype in self.dtypes
            for out in self.out_dtypes
            if self.mixed_dtypes or out == dtype
        )
