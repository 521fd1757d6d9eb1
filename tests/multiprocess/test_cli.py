"""The `mkernel` command as a user runs it: output, files, exit codes, messages for bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import forked_program
import numpy as np
import pytest
import torch
from command_line import MKERNEL, PATIENCE_S, ends, group_of, mkernel, mkernel_alone
from safetensors.torch import load_file, save_file

from mkernel import zigzag_positions
from mkernel.errors import ArgumentError
from mkernel.harness import timeline_picture
from mkernel.plan.model import LaunchPlan

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "all_gather_gemm.py"
ASCEND = ["--accelerator", "ascend"]
SMALL = [*ASCEND, "--m", "256", "--n", "128", "--k", "256", "--warmup", "0", "--iterations", "1"]


def test_a_process_says_what_these_tests_see() -> None:
    """The other tests run the command in this process; those of pages' commands see one that passes,
    tests/unit/cli/test_hostile_input.py one that is refused."""
    arguments = [
        "run",
        "ag_gemm",
        *SMALL,
        "--accelerator",
        "mkernel.conformance.faults:ReturnsZeros",
    ]
    for done in (mkernel_alone(*arguments), mkernel(*arguments)):
        assert done.returncode == 1, done.stderr
        assert "FAILED" in done.stdout, done.stdout + done.stderr


def test_run_shows_what_it_did() -> None:
    done = mkernel("run", "all_gather_gemm", *SMALL)
    assert done.returncode == 0, done.stderr
    for part in ("node", "ascend", "cx7", "soft", "compute only", "sequential", "pipelined",
                 "speed-up", "overlap efficiency", "modelled", "predicted", "PASSED",
                 "float64"):  # fmt: skip
        assert part in done.stdout, part
    assert re.search(
        r"Overlap makes the call 1\.\d\dx as fast, .* us instead of .* us", done.stdout
    )
    assert "measured" not in done.stdout, "how long a simulation takes says nothing of a device"
    assert "noise" not in done.stdout


@pytest.mark.long
def test_the_first_job_shows_its_point() -> None:
    """The job of `make run` computes as long as it communicates, and overlap gains much. That overlap
    gains at the sizes of every op is in tests/unit/ascend/test_views.py, with records alone."""
    done = mkernel("run", "all_gather_gemm", *ASCEND, "--json")
    assert done.returncode == 0, done.stderr
    modelled = json.loads(done.stdout)["modelled"]
    assert 0.8 < modelled["compute_only_ms"] / modelled["comm_only_ms"] < 1.25
    assert modelled["speedup"] > 1.5


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (3, 2)])
def test_json_is_one_object(nodes: int, ranks: int) -> None:
    size = ["--m", str(64 * nodes * ranks), "--n", "128", "--k", "256"]
    done = mkernel("run", "ag_gemm", *ASCEND, "--json", "--nodes", str(nodes), "--ranks-per-node",
                   str(ranks), *size, "--iterations", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert 0 < report["verification"]["error"] <= report["verification"]["tolerance"]
    for clock in ("wall", "modelled"):
        for view in ("compute_only_ms", "sequential_ms", "pipelined_ms"):
            assert report[clock][view] > 0
    made = LaunchPlan.model_validate(report["plan"])
    assert len(made.placement) == made.world_size == nodes * ranks
    assert (report["nic_bytes"] > 0) == (nodes > 1)


def test_a_trace_alone(tmp_path: Path) -> None:
    file = tmp_path / "call.json"
    done = mkernel("run", "ag_gemm", *SMALL, "--nodes", "1", "--ranks-per-node", "2", "--trace",
                   str(file))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["call.json"]
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"AIC 0", "AIC 0 M", "AIC 0 MTE2", "AIC 0 S", "AIV 0 MTE3"} <= names
    assert {"TWAIT", "TNOTIFY", "TPUT", "TMATMUL"} <= {event["name"] for event in events}
    absent = mkernel("run", "ag_gemm", *SMALL, "--trace", str(tmp_path / "absent" / "call.json"))
    assert absent.returncode == 2
    assert "no such folder" in absent.stderr


@pytest.mark.parametrize(("form", "replicate"), [("safetensors", False), ("npy", True)])
def test_own_tensors(tmp_path: Path, form: str, replicate: bool) -> None:
    a, b = torch.randn(256, 192).half(), torch.randn(192, 128).half()
    if form == "safetensors":
        save_file({"a": a, "b": b}, tmp_path / "x.safetensors")
        files = ["--input", str(tmp_path / "x.safetensors")]
    else:
        np.save(tmp_path / "a.npy", a.numpy())
        np.save(tmp_path / "b.npy", b.numpy())
        files = ["--input", str(tmp_path / "a.npy"), "--input", str(tmp_path / "b.npy")]
    out = tmp_path / "out"
    done = mkernel("run", "ag_gemm", *ASCEND, *files, *(["--replicate-b"] if replicate else []),
                   "--output", str(out), "--iterations", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    parts = [load_file(out / f"rank{rank}.safetensors")["c"] for rank in range(4)]
    wanted = a.double() @ b.double()
    for result in parts if replicate else [torch.cat(parts, 1)]:
        assert result.dtype == torch.float32
        assert (result.double() - wanted).norm() / wanted.norm() <= 1e-5

    trace = json.loads((out / "trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert len(names) == 4
    assert all("modelled" in name for name in names)
    kinds = {e["cat"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert kinds == {"comm", "compute"}
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")


TINY = {
    "all_gather_gemm": ["--m", "64", "--n", "48", "--k", "40", "--shard-b"],
    "gemm_reduce_scatter": ["--m", "64", "--n", "48", "--k", "40", "--layout", "column"],
    "gemm_all_reduce": ["--m", "63", "--n", "47", "--k", "41", "--dtype", "float32"],
    "all_reduce": ["--m", "63", "--n", "47", "--dtype", "float32"],
    "moe_dispatch": ["--tokens", "32", "--hidden", "24", "--experts", "8", "--top-k", "3"],
    "moe_dispatch_gemm": ["--tokens", "32", "--hidden", "24", "--features", "40", "--experts", "8",
                          "--top-k", "2", "--routing", "some_empty", "--dtype", "bfloat16"],
    "moe_combine": ["--tokens", "32", "--features", "40", "--experts", "8", "--top-k", "3"],
    "moe_gemm_combine": ["--tokens", "32", "--hidden", "24", "--features", "40", "--experts", "8",
                         "--top-k", "3"],
    "ring_attention": ["--batch", "2", "--heads", "6", "--kv-heads", "2", "--sequence", "64",
                       "--head-dim", "16", "--causal", "--scale", "0.3"],
}  # fmt: skip
FILED = {"moe_dispatch": {"rows", "counts"},
         "moe_dispatch_gemm": {"outputs", "counts", "out"}, "ring_attention": {"out", "lse"},
         "moe_combine": {"out"}, "moe_gemm_combine": {"out"}, "all_reduce": {"out"}}  # fmt: skip
STREAMS = ["--accelerator", "streams", "--nodes", "1", "--iterations", "1", "--warmup", "0"]


@pytest.mark.parametrize("op", TINY)
def test_every_op_on_streams(tmp_path: Path, op: str) -> None:
    done = mkernel("run", op, *STREAMS, *TINY[op], "--json", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert report["op"] == report["plan"]["op"] == op
    checked = report["verification"]["by_output"]
    for name, each in checked.items():
        assert each["error"] <= each["tolerance"], name
        assert (each["error"] == 0) == (name in ("counts", "rows"))
    for view in ("compute_only_ms", "sequential_ms", "pipelined_ms"):
        assert report["wall"][view] > 0
    assert report["modelled"] is None
    keys = FILED.get(op, {"c"})
    assert set(checked) == (keys if "c" not in keys else {"out"})
    for rank in range(2):
        assert set(load_file(tmp_path / f"rank{rank}.safetensors")) == keys
    text = (tmp_path / "trace.json").read_text()
    assert "wall" in text
    assert "modelled" not in text
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("scales", [[], ["--scales", "block"]])
@pytest.mark.parametrize("op", ["moe_dispatch_gemm", "moe_gemm_combine"])
def test_experts_in_e4m3_on_streams(op: str, scales: list[str]) -> None:
    sizes = ["--tokens", "33", "--hidden", "256", "--features", "128", "--experts", "4"]
    done = mkernel("run", op, *STREAMS, *sizes, "--top-k", "2", "--routing", "padded", "--json",
                   "--dtype", "float8_e4m3", *scales)  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert report["plan"]["scales"]["mode"] == "block"
    assert report["plan"]["dtype"] == "float8_e4m3fn"
    checked = report["verification"]["by_output"]
    assert set(checked) == FILED[op]
    for name in checked.keys() - {"counts"}:
        assert 0 < checked[name]["error"] <= checked[name]["tolerance"] == 3e-3, name


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ImportError("No module named 'matplotlib'"), 0, "timeline.png was not drawn: matplotlib"),
        (OSError(28, "No space left on device"), 2, "is not legal (No space left on device)"),
    ],
)
def test_a_picture_is_claimed_where_it_was_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(timeline_picture, "write_timeline", fail)
    words = [*STREAMS, *TINY["gemm_reduce_scatter"], "--ranks-per-node", "1"]
    done = mkernel("run", "gemm_rs", *words, "--output", str(tmp_path))
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert "timeline.png are in" not in done.stdout
    assert {each.name for each in tmp_path.iterdir()} == {"rank0.safetensors", "trace.json"}


SIMULATED = {
    "gemm_reduce_scatter": ["--m", "256", "--n", "128", "--k", "128"],
    "gemm_all_reduce": ["--m", "256", "--n", "128", "--k", "128"],
    "moe_dispatch": ["--tokens", "64", "--hidden", "64", "--experts", "4"],
    "moe_dispatch_gemm": ["--tokens", "64", "--hidden", "64", "--features", "64", "--experts", "4"],
    "ring_attention": ["--heads", "2", "--kv-heads", "1", "--sequence", "256", "--causal"],
}


@pytest.mark.parametrize("op", SIMULATED)
def test_an_op_on_ascend_has_two_clocks(tmp_path: Path, op: str) -> None:
    """MoE's are of the dispatch and of the combine after it, as its timeline is."""
    done = mkernel("run", op, *ASCEND, *SIMULATED[op], "--nodes", "1", "--iterations", "1",
                   "--warmup", "0", "--json", "--output", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    modelled = report["modelled"]
    assert 0 < modelled["comm_only_ms"] <= modelled["pipelined_ms"]
    assert 0 < modelled["compute_only_ms"] <= modelled["pipelined_ms"] <= modelled["sequential_ms"]
    assert all(report["wall"][view] > 0 for view in ("sequential_ms", "pipelined_ms"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["clock"].startswith("modelled")
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(each["ts"] + each["dur"] for each in slices) == pytest.approx(
        1e3 * modelled["pipelined_ms"], abs=2
    )
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_thin_weights_are_in_both_layouts() -> None:
    done = mkernel("run", "gemm_ar", *STREAMS, "--m", "8", "--n", "1", "--layout", "column")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("fault", "op", "output"),
    [
        ("ReturnsZeros", "gemm_reduce_scatter", "out"),
        ("OffByOneExpert", "moe_dispatch_gemm", "outputs"),
        ("IgnoresCausal", "ring_attention", "lse"),
    ],
)
def test_a_broken_backend_fails(fault: str, op: str, output: str) -> None:
    done = mkernel("run", op, "--json", *STREAMS, *TINY[op],
                   "--accelerator", f"mkernel.conformance.faults:{fault}")  # fmt: skip
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert not report["passed"]
    assert not report["verification"]["passed"]
    each = report["verification"]["by_output"][output]
    assert each["error"] is None or each["error"] > each["tolerance"]


def own_tensors_on_streams(
    folder: Path, op: str, tensors: dict[str, torch.Tensor], *arguments: str
) -> list[dict[str, torch.Tensor]]:
    """What the four ranks of a run of 2 x 2 on a file wrote."""
    save_file(tensors, folder / "x.safetensors")
    done = mkernel("run", op, *STREAMS, "--nodes", "2", "--input", str(folder / "x.safetensors"),
                   "--output", str(folder), *arguments)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "PASSED" in done.stdout
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(4)]


def near(result: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((result.double() - wanted).norm() / wanted.norm() <= tolerance)


def test_own_tensors_of_the_sums(tmp_path: Path) -> None:
    a, b = torch.randn(32, 64), torch.randn(64, 24)
    for op in ("gemm_rs", "gemm_ar"):
        parts = own_tensors_on_streams(tmp_path, op, {"a": a, "b": b})
        whole = torch.cat([p["c"] for p in parts]) if op == "gemm_rs" else parts[3]["c"]
        assert near(whole, a.double() @ b.double())


def test_own_moe(tmp_path: Path) -> None:
    ids = torch.randint(8, (48, 2), dtype=torch.int32)
    x, w, weights = torch.randn(48, 16), torch.randn(8, 16, 12), torch.rand(48, 2)
    parts = own_tensors_on_streams(
        tmp_path,
        "moe_dispatch_gemm",
        {"x": x, "topk_ids": ids, "w": w, "topk_weights": weights},
    )
    rows = torch.einsum("th,tkhi->tki", x.double(), w[ids.long()].double())
    wanted = (rows * weights.double()[:, :, None]).sum(1)
    assert near(torch.cat([p["out"] for p in parts]), wanted)
    counts = torch.cat([p["counts"] for p in parts])
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=8))
    # tokens are numbered rank by rank, so the order by source, token, slot is the flat one
    grouped = rows.flatten(0, 1)[ids.flatten().argsort(stable=True)]
    assert near(torch.cat([p["outputs"] for p in parts]), grouped)


def test_own_attention(tmp_path: Path) -> None:
    q, k, v = (torch.randn(1, heads, 32, 8) for heads in (4, 2, 2))
    parts = own_tensors_on_streams(tmp_path, "ring_attention", {"q": q, "k": k, "v": v}, "--causal")
    held = torch.cat([zigzag_positions(32, 4, rank) for rank in range(4)])
    out = torch.cat([p["out"] for p in parts], 2)[:, :, held.argsort()]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    assert near(out, wanted)


def refused(*arguments: str) -> str:
    done = mkernel("run", *arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["Missing argument", "Name one of:", "(ag_gemm)", "ring_attention"]),
        (["conv"], ["UnknownOp", "conv", "all_gather_gemm"]),
        (["ag_gemm", "--tokens", "8"], ["--tokens", "all_gather_gemm takes m, n, k"]),
        (["ring_attention", "--m", "8"], ["--m", "ring_attention takes batch"]),
        (["gemm_ar", "--causal"], ["--causal", "gemm_all_reduce takes"]),
        (["gemm_rs", "--replicate-b"], ["--replicate-b", "all_gather_gemm"]),
        (["ring_attention", "--layout", "row"], ["--layout", "ops with a weight"]),
        (["ring_attention", "--out-dtype", "float32"], ["--out-dtype"]),
        (["ag_gemm", "--scale", "1"], ["--scale", "ring_attention"]),
        (["ag_gemm", "--routing", "uniform"], ["--routing", "MoE"]),
        (["moe_combine", "--dtype", "float8_e4m3"], ["--dtype", "moe_combine takes no e4m3"]),
        (["dispatch_gemm", "--dtype", "float8_e4m3", "--scales", "tensor"],
         ["--scales", "block: moe_dispatch_gemm"]),
        (["gemm_combine", "--dtype", "float8_e4m3", "--fast-accum"], ["--fast-accum", "float32"]),
        (["dispatch_gemm", "--accelerator", "streams", "--dtype", "float8_e4m3", "--hidden", "200"],
         ["hidden = 200", "a multiple of 128"]),
        (["dispatch_gemm", *ASCEND, "--dtype", "float8_e4m3"],
         ["ascend", "of e4m3 operands none in moe_dispatch_gemm"]),
        (["dispatch_gemm", "--routing", "nearest"], ["--routing", "nearest", "one_expert"]),
        (["ag_gemm", "--layout", "diagonal"], ["--layout", "diagonal", "row, column"]),
        (["ag_gemm", "--input", "x.safetensors", "--m", "64"], ["--m", "--input"]),
        (["dispatch_gemm", "--accelerator", "streams", "--experts", "9"],
         ["experts = 9", "8 or 12"]),
        (["ring_attention", "--accelerator", "streams", "--causal", "--sequence", "12"],
         ["sequence = 12", "zigzag"]),
        (["ag_gemm", "--accelerator", "tpu"], ["UnknownBackend", "accelerator", "tpu", "ascend"]),
        (["ag_gemm", *ASCEND, "--nic", "e1000"], ["UnknownBackend", "nic", "e1000", "cx7"]),
        (["ag_gemm", *ASCEND, "--verbs", "absent.so"],
         ["BackendUnavailable", "absent.so", "name an existing library, `soft` or `system`"]),
        (["ag_gemm", "--m", "2047"], ["ShapeError", "m = 2047", "2044", "2048"]),
        (["ag_gemm", *ASCEND, "--k", "1001"], ["ShapeError", "k = 1001", "1000", "1008"]),
        (["ag_gemm", "--n", "0"], ["n = 0"]),
        (["ag_gemm", "--nodes", "0"], ["--nodes"]),
        (["ag_gemm", "--dtype", "int8"], ["--dtype", "int8", "float16"]),
        (["ag_gemm", "--chunk", "0"], ["chunk", "0"]),
        (["ag_gemm", "--input", "absent.safetensors"], ["absent.safetensors", "no such file"]),
    ],
)  # fmt: skip
def test_bad_input_is_refused(arguments: list[str], parts: list[str]) -> None:
    message = refused(*arguments)
    for part in parts:
        assert part in message


def test_ctrl_c_ends_everything() -> None:
    process = subprocess.Popen(
        [MKERNEL, "run", "ag_gemm", *ASCEND, "--iterations", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while len(group_of(process.pid)) < 5 and time.monotonic() < deadline:  # itself and four ranks
        time.sleep(0.1)
    time.sleep(1)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: the whole group
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert ends(process.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """A signal to the launcher alone leaves nothing either. If the launcher is killed, its fork
    server cleans up after it. Signals have their defaults there: under nohup, which ignores SIGHUP,
    the launcher ignores it too."""
    process = subprocess.Popen(
        ["env", "--default-signal", MKERNEL, "run", "ag_gemm", *STREAMS, "--iterations", "100000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(group_of(process.pid)) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)  # launcher, resource tracker, fork server, two ranks
        assert process.poll() is None
        process.send_signal(number)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()  # where the signal did not end it, it would go on behind the tests
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert stderr == f"stopped by {number.name}\n"
        assert not list(tmp_path.glob("pymp-*"))
    assert ends(process.pid)
    assert not list(tmp_path.iterdir())


def test_nodes_that_the_ranks_do_not_fill_are_refused() -> None:
    with pytest.raises(ArgumentError, match="nodes x ranks_per_node = WORLD_SIZE = 4"):
        forked_program.run(EXAMPLE, "--nodes", "3", ranks=4)


def test_times_wait_for_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NIC that takes 250 ms a message shows up in every view that communicates, and only there: what
    waits for it never takes less, so one quick time of the products is enough on a busy machine."""
    monkeypatch.setenv("MKERNEL_SOFTVERBS_LATENCY_NS", "250000000")
    products = []
    while min(products, default=250) >= 250 and len(products) < 5:
        done = mkernel("run", "ag_gemm", "--json", "--nodes", "2", "--ranks-per-node", "1", *SMALL)
        assert done.returncode == 0, done.stderr
        wall = json.loads(done.stdout)["wall"]
        for view in ("comm_only_ms", "sequential_ms", "pipelined_ms"):
            assert wall[view] >= 250
        products.append(wall["compute_only_ms"])
    assert min(products) < 250, products
