"""One function gives the bytes of a call, and a NIC, or a process group, carries exactly these."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_world import DEADLINE_S

import mkernel
from mkernel.plan.model import LaunchPlan
from mkernel.plan.traffic import RoutedTokens, traffic_of

pytestmark = [
    pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing")
]  # fmt: skip

TOKENS, HIDDEN, FEATURES, TOP_K, EACH = 12, 32, 16, 4, 2  # experts a rank
_Sent = Counter[int]


class _Counted:
    """Counts what this rank sends to each other one, on streams: every message of a call as it is
    posted."""

    def __init__(self) -> None:
        from mkernel.backends.accelerators.streams.call_streams import CallStreams

        self.sent = _Sent()
        post = CallStreams._single

        def single(streams: Any, peer: int, is_receive: bool, tensor: Any, chunk: int) -> Any:
            if not is_receive:
                self.sent[peer] += tensor.nbytes
            return post(streams, peer, is_receive, tensor, chunk)

        CallStreams._single = single  # type: ignore[method-assign]


def ids_of(rank: int, world: int, skewed: bool) -> torch.Tensor:
    """Tokens of any rank, some of them padded; if skewed, half of them for experts of the last rank,
    the others for those of the first node alone."""
    draw = torch.Generator().manual_seed(rank)
    chances = torch.rand(TOKENS, EACH * world, generator=draw)
    if skewed:
        chances[::2, -EACH:] += 2
        chances[1::2, : EACH * world // 2] += 2
    ids = chances.topk(TOP_K).indices.int()
    ids[rank % TOKENS, 1:] = -1
    return ids


def every_op(streams: bool) -> list[tuple[str, Callable[[], Any]]]:
    """A call of each op, in an order in which handles are there; the same data everywhere."""
    world, half = mkernel.world(), torch.float16
    rows = 8 * world.size
    a, long = torch.ones(8, 64).half(), torch.ones(rows, 64).half()
    b, uneven = torch.ones(64, 40).half(), torch.ones(rows * 40 + 3, 64).half()
    x = torch.ones(TOKENS, HIDDEN).half()
    up, down = torch.ones(EACH, HIDDEN, FEATURES).half(), torch.ones(EACH, FEATURES, HIDDEN).half()
    scores, keys = torch.ones(TOKENS, TOP_K), torch.ones(1, 2, 16, 64).half()
    found: dict[str, Any] = {}

    def dispatch(skewed: bool) -> Any:
        ids = ids_of(world.rank, world.size, skewed)
        sent = found["sent"] = mkernel.moe_dispatch_gemm(x, ids, up)
        return sent

    def rows(skewed: bool, again: bool) -> Any:
        ids, handle = (
            ids_of(world.rank, world.size, skewed),
            found["sent"].handle if again else None,
        )
        return mkernel.moe_dispatch(x, ids, num_experts=EACH * world.size, handle=handle)

    def combine() -> Any:
        return mkernel.moe_combine(found["sent"].outputs, found["sent"].handle, scores)

    def home(returns: Any) -> Any:
        h, handle = found["sent"].outputs, found["sent"].handle
        return mkernel.moe_gemm_combine(h, down, handle, scores, returns=returns)

    calls: list[tuple[str, Callable[[], Any]]] = [
        ("all_gather_gemm", lambda: mkernel.all_gather_gemm(a, b)),
        ("gemm_reduce_scatter", lambda: mkernel.gemm_reduce_scatter(long, b, out_dtype=half)),
        ("gemm_all_reduce", lambda: mkernel.gemm_all_reduce(uneven, b, out_dtype=half)),
    ]
    calls += [
        ("ring_attention", lambda: mkernel.ring_attention(keys, keys, keys)),
        ("ring_attention", lambda: mkernel.ring_attention(keys, keys, keys, causal=True)),
    ]
    if streams:
        calls.append(("all_reduce", lambda: mkernel.all_reduce(uneven)))
    for skewed in (False, True):
        calls.append(("moe_dispatch_gemm", lambda skewed=skewed: dispatch(skewed)))
        calls.append(("moe_dispatch", lambda skewed=skewed: rows(skewed, False)))
        calls.append(("moe_combine", combine))
        if streams:
            calls.append(("moe_dispatch again", lambda skewed=skewed: rows(skewed, True)))
            calls.append(("moe_gemm_combine", lambda: home("slots")))
            calls.append(("moe_gemm_combine by rank", lambda: home("ranks")))
    if streams and world.size > 4:  # torch takes long to begin with gradients
        calls.append(("gradients of attention", lambda: attention_with_gradients(keys)))
        calls.append(("moe with gradients", lambda: with_gradients(x, up, down, scores)))
    return calls


def attention_with_gradients(keys: torch.Tensor) -> None:
    mkernel.ring_attention(*(keys.clone().requires_grad_() for _ in range(3))).sum().backward()


def with_gradients(*given: torch.Tensor) -> None:
    """Both combines and their dispatch, forth and back."""
    world = mkernel.world()
    x, up, down, scores = (each.clone().requires_grad_() for each in given)
    sent = mkernel.moe_dispatch_gemm(x, ids_of(world.rank, world.size, True), up)
    one = mkernel.moe_gemm_combine(sent.outputs, down, sent.handle, scores)
    (one.sum() + mkernel.moe_combine(sent.outputs, sent.handle, scores).sum()).backward()


_Bytes = dict[int, float]
_Ports = dict[str, float]


def carried_and_planned() -> tuple[list[tuple[str, bool, _Bytes, _Bytes]], _Ports, _Ports]:
    """Return of each call its name, whether its routing is skewed, the bytes for each rank that this
    rank's NIC or group carried, and those that its plans say; and by port, what it carried of all
    calls, and what their plans say."""
    world = mkernel.world()
    rank, nic, streams = world.rank, world.nic, world.accelerator.name == "streams"
    counted = _Counted() if streams else None
    backend, plans, latest = world.accelerator, list[LaunchPlan](), dict[str, list[LaunchPlan]]()
    launch = backend.launch

    def launched(call: Any) -> Any:
        plans.append(call.plan)
        return launch(call)

    backend.launch = launched  # type: ignore[method-assign]

    def carried() -> _Sent:
        if counted is not None:
            return _Sent(counted.sent)
        assert nic is not None
        return sum((_Sent({lane.peer: lane.nbytes}) for lane in nic.statistics().lanes), _Sent())

    def at_rest(planned: float) -> _Sent:
        """Return what is carried once it is as much as planned, or if no more comes for long."""
        until = time.monotonic() + 2.0
        while (found := carried()).total() < planned and time.monotonic() < until:
            time.sleep(0.002)
        return found

    found, before, total, ports = [], carried(), 0.0, Counter[str]()
    claims = world.accelerator.capabilities()
    for name, call in every_op(streams):
        if (
            world.settings.exchange == "hierarchical"
            and name.split()[0] not in claims.hierarchical_ops
        ):
            continue
        skewed = (name in latest and "moe" in name) or name == "moe with gradients"
        ids = [ids_of(peer, world.size, skewed).tolist() for peer in range(world.size)]
        plans.clear()
        call()
        mkernel.synchronize()
        latest[name] = plans.copy() or latest[name]
        sent = Counter[int]()
        for plan in latest[name]:
            routed = RoutedTokens(ids, EACH * world.size, plan.nodes)
            planned = traffic_of(plan, routed)
            sent.update(planned.from_rank(rank))  # type: ignore[arg-type]
            ports.update(planned.by_port(rank, plan.route))  # type: ignore[arg-type]
        if nic is not None:  # which carries nothing inside a node
            each = world.size // 2
            sent = Counter({peer: n for peer, n in sent.items() if peer // each != rank // each})
        total += sent.total()
        after = at_rest(total)
        found.append((name, skewed, dict(after - before), dict(sent)))
        before = after
    lanes = [] if nic is None else nic.statistics().lanes
    by_port = sum((Counter({lane.port: lane.nbytes}) for lane in lanes), Counter[str]())
    return found, dict(by_port), dict(ports)


WORLDS = [
    ("streams", "direct", 2, 2),
    pytest.param("streams", "direct", 2, 8, marks=pytest.mark.long),
    ("streams", "hierarchical", 2, 8),
    ("ascend", "direct", 2, 8),
]


@pytest.mark.parametrize(("accelerator", "exchange", "nodes", "each"), WORLDS)
def test_planned_bytes_are_those_that_are_carried(
    accelerator: str, exchange: str, nodes: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are so of every op, to every rank, with tokens that are spread evenly and with others."""
    monkeypatch.setenv("MKERNEL_EXCHANGE", exchange)
    ranks = mkernel.launch(
        carried_and_planned, nodes=nodes, ranks_per_node=each, accelerator=accelerator,
        timeout_s=DEADLINE_S,
    )  # fmt: skip
    for rank, (found, by_port, ports) in enumerate(ranks):
        assert by_port == ports, rank
        assert (accelerator == "ascend") == bool(ports)
        for name, skewed, carried, planned in found:
            assert carried == planned, (rank, name, skewed)
            if exchange == "hierarchical":
                far = {peer for peer in carried if peer // each != rank // each}
                assert {peer % each for peer in far} <= {rank % each}, name
        assert {name for name, *_ in found} >= {"moe_dispatch_gemm", "moe_combine"}
