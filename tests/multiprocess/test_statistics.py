"""What `mkernel.stats` counts, and the names that profilers see, of known calls too."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from in_world import DEADLINE_S
from torch.profiler import ProfilerActivity, profile

import mkernel
from mkernel.backends.contracts.nic import NicSession
from mkernel.errors import ShapeError
from mkernel.world import exposition, profiling

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

BACKEND = "starting_backend:Starting"
M, N, K = 64, 40, 72
F32 = 4


def launched(function: Callable[[], Any], accelerator: str, nodes: int = 1, each: int = 2) -> Any:
    return mkernel.launch(
        function, nodes=nodes, ranks_per_node=each, accelerator=accelerator, timeout_s=DEADLINE_S
    )


def operands(rows: int = M) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, K), torch.ones(K, N)


# ---- statistics ----------------------------------------------------------------------------------


def several_ops() -> list[mkernel.Statistics]:
    found = [mkernel.stats()]
    a, b = operands()
    for _ in range(3):
        mkernel.all_gather_gemm(a, b)
    mkernel.gemm_all_reduce(a, b)
    mkernel.gemm_all_reduce(*operands(2 * M))
    with pytest.raises(ShapeError):
        mkernel.all_gather_gemm(a, torch.ones(K + 1, N))
    mkernel.synchronize()
    return [*found, mkernel.stats()]


def test_calls_bytes_shapes_and_waits() -> None:
    for before, after in launched(several_ops, "streams"):
        assert before == mkernel.Statistics(calls={}, sent_bytes={})
        assert after.calls == {"all_gather_gemm": 3, "gemm_all_reduce": 2}
        gathered, reduced = 3 * M * K * F32, 3 * 2 * M * N // 2 * F32
        assert after.sent_bytes == {"process group": gathered + reduced}
        assert after.new_shapes == 3
        assert after.waits == 5
        assert after.waited_s > 0
        assert (after.retries, after.errors) == (0, 0)  # a wrong call is none


def until_carried(nic: NicSession, least: float) -> int:
    """Return the bytes of the NIC's puts once these are at least ``least`` and rest. Collective. The
    proxy counts a put after it has posted it, perhaps later than the peer has its bytes."""
    mkernel.world().barrier()  # all that peers wait for is posted
    latest, before = time.monotonic() + DEADLINE_S, -1
    while (carried := nic.statistics().put_bytes) < least or carried != before:
        assert time.monotonic() < latest, f"{carried} of {least} bytes"
        before = carried
        time.sleep(0.05)
    return carried


def through_the_nic() -> tuple[mkernel.Statistics, int]:
    a, b = operands()
    mkernel.all_gather_gemm(a.half(), b.half())
    session = mkernel.world().nic
    assert session is not None
    until_carried(session, 2 * M * K * 2)  # of two ranks there
    return mkernel.stats(), session.statistics().put_bytes


def test_what_the_nic_carries_it_counts_itself() -> None:
    for found, carried in launched(through_the_nic, "ascend", nodes=2):
        assert found.calls == {"all_gather_gemm": 1}
        assert found.sent_bytes["peer memory"] == M * K * 2
        assert found.sent_bytes["nic"] == carried
        assert carried >= 2 * M * K * 2


def test_calls_that_raise_are_errors() -> None:
    with pytest.raises(mkernel.errors.WorldError):
        launched(raises_and_counts, "streams")


def raises_and_counts() -> None:
    if mkernel.world().rank == 1:
        raise mkernel.errors.Cancelled("enough")
    a, b = operands()
    try:
        mkernel.all_gather_gemm(a, b)
    except mkernel.errors.WorldError:
        assert mkernel.stats().errors == 1
        assert mkernel.stats().calls == {}
        raise


def known_ones() -> tuple[int, mkernel.Statistics]:
    backend: Any = mkernel.world().accelerator
    a, b = operands()
    for _ in range(6):
        mkernel.gemm_all_reduce(a, b)
    mkernel.synchronize()
    return len(backend.started), mkernel.stats()


def test_calls_that_native_code_starts_are_counted_too() -> None:
    for started, found in launched(known_ones, BACKEND):
        assert started == 5
        assert found.calls == {"gemm_all_reduce": 6}
        assert found.new_shapes == 1
        each = 2 * M // 2 * N * F32
        assert sum(found.sent_bytes.values()) == 6 * each


# ---- Prometheus' text ----------------------------------------------------------------------------

_NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="((?:[^"\\\n]|\\["\\n])*)"'
SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (\d+(?:\.\d+)?(?:e-?\d+)?)")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    """The samples of a page, which must follow the grammar of the format: a HELP and a TYPE line for
    each metric, then all its samples, and none twice."""
    found: Samples = {}
    seen: set[str] = set()
    metric = kind = ""
    assert text.endswith("\n")
    lines = iter(text[:-1].split("\n"))
    for line in lines:
        if line.startswith("# HELP "):
            metric, told = line.removeprefix("# HELP ").split(" ", 1)
            assert metric not in seen
            assert told
            seen.add(metric)
            name, kind = next(lines).removeprefix("# TYPE ").split(" ")
            assert name == metric
            assert (kind == "counter") == metric.endswith("_total")
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        assert match[1] == metric, "below the lines of another metric"
        labels = re.findall(rf"([a-zA-Z_][a-zA-Z0-9_]*)={_LABEL.partition('=')[2]}", match[2] or "")
        key = (metric.removeprefix("mkernel_"), frozenset(labels))
        assert key not in found
        found[key] = float(line.rpartition(" ")[2])
    if find_spec("prometheus_client") is not None:
        from prometheus_client.parser import text_string_to_metric_families

        families = list(text_string_to_metric_families(text))
        assert sum(len(family.samples) for family in families) == len(found)
        assert {sample.name for family in families for sample in family.samples} == seen
    return found


def of(found: Samples, metric: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels among theirs."""
    wanted = set(labels.items())
    values = [value for (name, own), value in found.items() if name == metric and wanted <= own]
    assert values, (metric, labels)
    return sum(values)


def a_page() -> tuple[str, mkernel.Statistics, int]:
    a, b = operands()
    for _ in range(3):
        mkernel.all_gather_gemm(a.half(), b.half())
    mkernel.all_reduce(a)
    kept = mkernel.empty((4, 8), torch.float32)
    mkernel.synchronize()
    session = mkernel.world().nic
    assert session is not None
    until_carried(session, 3 * 2 * M * K * 2)
    page = mkernel.stats(format="prometheus")
    assert kept.shape == (4, 8)
    return page, mkernel.stats(), session.statistics().puts


def test_a_page_for_prometheus_has_what_statistics_have() -> None:
    for rank, (page, found, puts) in enumerate(launched(a_page, "ascend,streams", nodes=2)):
        seen = parsed(page)
        assert of(seen, "info", version=mkernel.__version__) == 1
        assert of(seen, "worlds") == 1
        own = {"rank": str(rank)}
        assert of(seen, "world_ranks", **own) == 4
        assert of(seen, "world_nodes", **own) == 2
        gathers = {"op": "all_gather_gemm", "accelerator": "ascend", "path": "fused"}
        reduces = {"op": "all_reduce", "accelerator": "streams"}
        assert of(seen, "calls_total", **gathers) == found.calls["all_gather_gemm"] == 3
        assert of(seen, "calls_total", **reduces) == found.calls["all_reduce"] == 1
        assert of(seen, "fallback_calls_total") == of(seen, "fallback_calls_total", **reduces) == 1
        for name, launched_there in (("ascend", 3), ("streams", 1)):
            assert of(seen, "plans_total", accelerator=name) == 1
            assert of(seen, "new_shapes_total", accelerator=name) == 1
            assert of(seen, "epochs_total", accelerator=name) == launched_there
        assert of(seen, "planned_nic_bytes_total") == 3 * 2 * M * K * 2
        assert of(seen, "sent_bytes_total", way="nic") == found.sent_bytes["nic"]
        assert of(seen, "nic_lane_bytes_total") == found.sent_bytes["nic"]
        assert of(seen, "nic_puts_total") == puts
        assert of(seen, "memory_bytes", accelerator="ascend", use="tensors") == 4 * 8 * F32
        assert of(seen, "memory_bytes", accelerator="ascend", use="workspace") >= 4 * M * K * 2
        assert of(seen, "waits_total") == found.waits
        assert of(seen, "errors_total") == 0
        assert not any(metric == "failures_total" for metric, _ in seen)


def native_page() -> tuple[int, str]:
    started, _ = known_ones()
    return started, mkernel.stats(format="prometheus")


def test_a_page_has_calls_that_native_code_starts() -> None:
    for started, page in launched(native_page, BACKEND):
        assert started == 5
        assert of(parsed(page), "calls_total", op="gemm_all_reduce") == 6


def fails_and_tells(folder: Path) -> None:
    (folder / "before").write_text(mkernel.stats(format="prometheus"))
    mkernel.world().barrier()
    if mkernel.world().rank == 1:
        raise ZeroDivisionError
    try:
        mkernel.all_gather_gemm(*operands())
    except mkernel.errors.WorldError:
        mkernel.finalize()
        (folder / "after").write_text(mkernel.stats(format="prometheus"))
        raise


def test_failures_outlive_their_worlds(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        launched(partial(fails_and_tells, tmp_path), "streams")
    before, after = (parsed((tmp_path / name).read_text()) for name in ("before", "after"))
    assert not any(metric == "failures_total" for metric, _ in before)
    assert (of(before, "worlds"), of(after, "worlds")) == (1, 0)
    assert of(after, "failures_total", error="PeerFailure") == 1


def test_a_page_without_a_world_and_a_format_that_there_is_not() -> None:
    assert of(parsed(mkernel.stats(format="prometheus")), "worlds") == 0
    with pytest.raises(mkernel.errors.ArgumentError, match="format"):
        mkernel.stats(format="json")  # type: ignore[call-overload]


def test_labels_are_escaped() -> None:
    page, name = exposition.Page(), 'a "b" \\ c\nd'
    page.common = {"world": name}
    page.add("worlds", 3)
    ((_, labels),) = parsed(page.text())
    assert labels == {("world", 'a \\"b\\" \\\\ c\\nd')}


# ---- names ---------------------------------------------------------------------------------------


def names(call: Callable[[], object], times: int = 1) -> list[str]:
    """Of mkernel's ranges in what torch.profiler saw."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(times):
            call()
    return [event.name for event in seen.events() if event.name.startswith("mkernel.")]


def known_profiled() -> tuple[list[str], int]:
    backend: Any = mkernel.world().accelerator
    a, b = operands()
    found = names(lambda: mkernel.gemm_all_reduce(a, b), 4)
    return found, len(backend.started)


def test_known_calls_stay_known_under_a_profiler() -> None:
    for found, started in launched(known_profiled, BACKEND, each=1):
        assert found == ["mkernel.gemm_all_reduce"] * 4
        assert started == 3


class Ranges:
    """What a tool that listens to NVTX hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def rangePushA(self, name: str) -> None:
        self.heard.append(name)

    def rangePop(self) -> None:
        self.heard.append("end")


def heard() -> list[str]:
    a, b = operands()
    mkernel.gemm_all_reduce(a, b)  # nobody listens
    profiling.nvtx = ranges = Ranges()
    try:
        mkernel.gemm_all_reduce(a, b)
        with pytest.raises(ShapeError):
            mkernel.gemm_all_reduce(a, b[1:])
    finally:
        profiling.nvtx = None
    mkernel.gemm_all_reduce(a, b)
    return ranges.heard


def test_nvtx_hears_calls_while_a_tool_listens() -> None:
    for found in launched(heard, "streams"):
        assert found == ["mkernel.gemm_all_reduce", "end"] * 2
