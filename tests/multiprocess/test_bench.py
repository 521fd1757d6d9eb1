"""`mkernel bench` as a user runs it, on CPU ranks; and what it must not let pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Done, mkernel

from mkernel import Invariant
from mkernel.harness import results
from mkernel.harness.contenders import NO_ROUNDING, PROMISING
from mkernel.harness.spec import GEMMS

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

GEMMS_BY_ALIAS = "ag_gemm,gemm_rs,gemm_ar"
OTHERS = {
    "all_reduce": "m=161 n=128",
    "moe_dispatch": "tokens=160 hidden=24 experts=4 top_k=2",
    "moe_dispatch_gemm": "tokens=160 hidden=24 features=128 experts=4 top_k=2",
    "moe_combine": "tokens=160 features=128 experts=4 top_k=2",
    "moe_gemm_combine": "tokens=160 hidden=64 features=128 experts=4 top_k=2",
    "moe_layer": "tokens=160 hidden=64 features=128 experts=4 top_k=2",
    "ring_attention": "heads=4 kv_heads=2 sequence=384 head_dim=16 causal=1",
    "ring_attention_backward": "heads=4 kv_heads=2 sequence=384 head_dim=16 causal=1",
}
PRODUCT = {"m": 162, "n": 128, "k": 96}
WRONG = "wrong_contenders:ForgetsTheResidual"
PEERS = {
    "moe_dispatch": ("gather+grouped",),
    "moe_dispatch_gemm": ("gather+grouped",),
    "moe_gemm_combine": ("gather+grouped",),
    "moe_layer": ("gather+grouped",),
    "ring_attention": ("ring",),
}
SMALL = ["--ranks", "2", "--shapes", "256x128x192", "--iterations", "3", "--warmup", "1"]


def bench(*arguments: str) -> Done:
    return mkernel("bench", *arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_contenders_take_turns(tmp_path: Path, dtype: str) -> None:
    file, picture = tmp_path / "sub" / "x.json", tmp_path / "x.png"
    done = bench(*SMALL, "--accelerator", "streams", "--dtype", dtype, "--layout", "column",
                 "--json", str(file), "--plot", str(picture), "--commit", "f" * 40)  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    for part in ("ag_gemm", "gemm_rs", "gemm_ar", "gloo+matmul", "mkernel", "gemm, ", "comm, ",
                 "PASSED"):  # fmt: skip
        assert part in done.stdout, part
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = results.read(file)
    assert report is not None
    assert report.passed
    assert report.provenance["commit"] == "f" * 40
    assert report.provenance["hardware"]["device"] == "cpu"
    assert len(report.rows) == 3
    for row in report.rows:
        for name in ("mkernel", "gloo+matmul", "gemm", "comm"):
            entry = row.entries[name]
            assert len(entry.seconds) == 3
            assert all(len(iteration) == 2 for iteration in entry.seconds)
            assert entry.error is not None
            # A gather is exact, nothing else is.
            assert (entry.error > 0) == (entry.limit > NO_ROUNDING)
            assert entry.figures is not None
        assert row.entries["symm_mem"].state == row.entries["nccl+cublas"].state == "absent"
        assert row.best_peer == "gloo+matmul"
        assert row.floor_us is not None

    page = bench("--render", str(file.parent)).stdout
    for part in ("# Measured numbers", "## What misses its target", "## x", "ffffffffffff",
                 "256 x 128 x 192"):  # fmt: skip
        assert part in page, part
    assert page.index("misses") < page.index("## x")


def test_fast_accumulation_is_recorded(tmp_path: Path) -> None:
    """In the result, in what was planned and in the line above the table; other inputs have none."""
    file = tmp_path / "x.json"
    scaled = ["--dtype", "float8_e4m3", "--accelerator", "streams"]
    once = ["--ranks", "2", "--shapes", "64x32x64", "--iterations", "1", "--warmup", "1"]
    done = bench("ag_gemm", *once, *scaled, "--fast-accum", "--json", str(file))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "float8_e4m3fn with row scales, fast accumulation" in done.stdout
    report = results.read(file)
    assert report is not None
    assert report.spec.fast_accum
    sizes = ["--m", "64", "--n", "32", "--k", "64", "--warmup", "0", "--iterations", "1"]
    for fast in ([], ["--fast-accum"]):
        ran = mkernel("run", "ag_gemm", *scaled, *sizes, "--nodes", "1", "--json", *fast)
        assert ran.returncode == 0, ran.stderr
        scales = json.loads(ran.stdout)["plan"]["scales"]
        assert scales == {"mode": "row", "use_fast_accum": bool(fast), "quantises": None}
    for command in ("run", "bench", "plan"):
        refused = mkernel(command, "ag_gemm", "--fast-accum")
        assert refused.returncode == 2
        assert "--fast-accum" in refused.stderr


def test_modes_and_drawn_shapes(tmp_path: Path) -> None:
    """Loops and first calls are timed, checked, and told apart; the seed draws the shapes."""
    file = tmp_path / "x.json"
    done = bench("gemm_rs", *SMALL, "--accelerator", "streams", "--mode", "eager,first",
                 "--verbose", "--json", str(file))  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    for part in ("`eager`: a turn is 20 calls", "`first`: a turn is the first call", "median skew",
                 "without multicast"):  # fmt: skip
        assert part in done.stdout, part
    report = results.read(file)
    assert report is not None
    assert [row.mode for row in report.rows] == ["eager", "first"]
    for row in report.rows:
        for name in ("mkernel", "gloo+matmul", "gemm"):
            assert row.entries[name].state == "right"
            assert len(row.entries[name].seconds) == len(row.entries[name].skew_us) == 3
        assert row.entries["comm"].why == "a part alone: timed in mode kernel"
        assert row.to_best is not None
    for mode in ("eager", "first"):
        assert report.timing[mode].launches == "counted"
        assert report.timing[mode].start == "instant"
        assert report.timing[mode].turns == 9
    assert report.conditions is not None
    assert report.conditions.environment["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize("mode", ["eager", "first"])
def test_a_predecessors_result_has_no_figure_in_any_mode(tmp_path: Path, mode: str) -> None:
    file, name = tmp_path / "x.json", "wrong_contenders:ReturnsPrevious"
    done = bench("gemm_rs", *SMALL, "--accelerator", "streams", "--only-peers", "--peers", name,
                 "--mode", mode, "--json", str(file))  # fmt: skip
    (row,) = json.loads(file.read_text())["rows"]
    # A first call is its contender's only one: it has no predecessor.
    assert row["entries"][name]["state"] == ("wrong" if mode == "eager" else "right")
    assert done.returncode == (1 if mode == "eager" else 0)


def test_one_wrong_row_in_one_call_of_a_loop_has_no_figure(tmp_path: Path) -> None:
    """Results have more rows than are compared singly."""
    file, name = tmp_path / "x.json", "wrong_contenders:OneWrongRow"
    done = bench(GEMMS_BY_ALIAS, *SMALL, "--shapes", "1024x128x64", "--accelerator", "streams",
                 "--only-peers", "--peers", name, "--mode", "eager", "--json", str(file))  # fmt: skip
    assert done.returncode == 1
    rows = json.loads(file.read_text())["rows"]
    assert [row["entries"][name]["state"] for row in rows] == ["wrong"] * 3
    assert [row["entries"]["gemm"]["state"] for row in rows] == ["right"] * 3


@pytest.mark.parametrize("fault", ["FinishesLate", "ReturnsPrevious", "SkipsHalf", "LeavesElement"])
def test_wrong_peers_get_no_figure(tmp_path: Path, fault: str) -> None:
    file = tmp_path / "x.json"
    name = f"wrong_contenders:{fault}"
    done = bench(*SMALL, "--accelerator", "streams", "--only-peers", "--peers", name,
                 "--json", str(file))  # fmt: skip
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 3
    for row in rows:
        assert row["entries"][name]["state"] == "wrong"
        assert row["entries"][name]["figures"] is None
        assert row["entries"]["gemm"]["state"] == row["entries"]["comm"]["state"] == "right"


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        *((GEMMS_BY_ALIAS, fault) for fault in ("ReportsEarly", "GivesUpWaiting")),
        ("ag_gemm", "SkipsWaits"),
        *(
            (op, fault)
            for op in (GEMMS_BY_ALIAS, *OTHERS)
            for fault in ("ReturnsPrevious", "WrongEveryFifth", "LeavesElement")
        ),
    ],
)
def test_a_faulty_backend_has_no_right_row(tmp_path: Path, op: str, fault: str) -> None:
    """Whether it does not wait, or one turn of several is wrong: every turn of every op is checked."""
    file = tmp_path / "x.json"
    done = bench(op, *SMALL, "--shapes", OTHERS.get(op, "256x128x192"), "--dtype", "float16",
                 "--peers", "none", "--json", str(file),
                 *(["--capacity"] if op.startswith("moe") else []),  # results of one shape
                 "--accelerator", f"mkernel.conformance.faults:{fault}")  # fmt: skip
    assert done.returncode == 1
    for row in json.loads(file.read_text())["rows"]:
        assert row["entries"]["mkernel"]["state"] == "wrong", row["shape"]["op"]


WITHOUT_PRODUCT = ("moe_dispatch", "moe_combine", "all_reduce")
PUT_OPS = (*GEMMS, "moe_dispatch", "moe_dispatch_gemm")
NOT_SIMULATED = ("moe_gemm_combine", "moe_layer", "all_reduce", "ring_attention_backward")


@pytest.mark.parametrize(
    "where",
    [
        ["--accelerator", "streams", "--nodes", "2"],
        ["--accelerator", "ascend", "--dtype", "float16", "--nodes", "2", "--nic", "cx7"],
    ],
    ids=["two nodes", "simulated, two nodes"],
)
def test_every_op_has_a_peer_and_is_right(tmp_path: Path, where: list[str]) -> None:
    for op in (*GEMMS, *OTHERS):
        file = tmp_path / f"{op}.json"
        done = bench(op, *where, "--ranks", "2", "--shapes", OTHERS.get(op, "256x128x192"),
                     "--iterations", "2", "--warmup", "1", "--json", str(file))  # fmt: skip
        if op in NOT_SIMULATED and "ascend" in where:
            assert done.returncode == 1
            why = "activation = 'silu_and_mul'" if op == "moe_layer" else f"does not provide '{op}'"
            assert why in done.stdout
            continue
        assert done.returncode == 0, done.stderr + done.stdout
        report = results.read(file)
        assert report is not None
        assert report.nodes == 2
        assert report.carrier == ("torch.distributed (gloo)" if "streams" in where else "cx7")
        assert report.routes == (("direct",) if "cx7" in where else ())
        (row,) = report.rows
        puts = "host-puts-by-rank" if op.startswith("moe") else "host-puts"
        puts_of_op = (puts,) if "cx7" in where and op in PUT_OPS else ()
        peers = ("gloo+matmul", *puts_of_op, *PEERS.get(op, ()))
        assert row.best_peer in peers
        assert row.to_best is not None
        assert row.entries["mkernel"].error is not None
        assert (row.entries["gemm"].state == "right") == (op not in WITHOUT_PRODUCT)
        for name in peers:
            assert row.entries[name].state == "right", name
    page = bench("--render", str(tmp_path)).stdout
    assert "tokens=160 hidden=24" in page
    assert "2 emulated nodes" in page


def test_sums_with_a_residual_and_a_norm(tmp_path: Path) -> None:
    """Run the peers of a plain sum and of products, in loops too, where libraries sum in place."""
    shapes, file = tmp_path / "in.json", tmp_path / "x.json"
    plain = {"op": "all_reduce", "sizes": {"m": 161, "n": 128}}
    shapes.write_text(json.dumps({"shapes": [plain, {"op": "gemm_all_reduce", **PRODUCT}]}))
    done = bench("all_reduce,gemm_ar", "--norm", "--ranks", "2", "--accelerator", "streams",
                 "--shapes", str(shapes), "--iterations", "2", "--warmup", "1",
                 "--dtype", "bfloat16", "--mode", "kernel,eager", "--json", str(file),
                 "--peers", f"gloo+matmul,{WRONG}")  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "sums with residual and norm" in done.stdout
    rows = json.loads(file.read_text())["rows"]
    assert [row["shape"]["op"] for row in rows] == ["all_reduce", "gemm_all_reduce"] * 2
    for row in rows:
        for name, state in (("mkernel", "right"), ("gloo+matmul", "right"), (WRONG, "wrong")):
            assert row["entries"][name]["state"] == state, (row["shape"]["op"], row["mode"], name)
    refused = bench("ag_gemm", "--norm")
    assert refused.returncode == 2
    assert "all_reduce or gemm_ar beside it" in refused.stderr


def test_what_invariant_results_cost(tmp_path: Path) -> None:
    """Ours with the promise, ours without it and the unfused way take turns. A K that segments do not
    cut is refused to ours with the promise alone. A wrong argument starts nothing."""
    shapes, file = tmp_path / "in.json", tmp_path / "x.json"
    sizes = {"m": 64, "n": 32, "k": 64}
    listed = [{"op": op, **sizes} for op in GEMMS]
    listed += [{"op": GEMMS[0], **sizes, "m": 512}, {"op": GEMMS[1], **sizes, "k": 24}]
    listed.append({"op": "all_reduce", "sizes": {"m": 64, "n": 32}})
    shapes.write_text(json.dumps({"shapes": listed}))
    done = bench(f"{GEMMS_BY_ALIAS},all_reduce", "--ranks", "2", "--accelerator", "streams",
                 "--shapes", str(shapes), "--iterations", "2", "--warmup", "1", "--dtype", "bfloat16",
                 "--invariant", "4:float32", "--json", str(file))  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    report = results.read(file)
    assert report is not None
    assert report.spec.invariant == Invariant(4, "float32")
    for row in report.rows:
        for name in ("mkernel", *PROMISING):
            refused = row.shape.k == 24 and name == "mkernel-invariant"
            entry = row.entries[name]
            assert entry.state == ("absent" if refused else "right"), (row.shape, name, entry.why)
        assert row.best_peer is None
    page = bench("--render", str(tmp_path)).stdout
    for text in (done.stdout, page):
        assert "bfloat16, invariant by 4 segments in float32" in text
        for rows in ("below 512 rows", "from 512 rows on"):
            assert f"ag_gemm, kernel, {rows}: " in text
        assert "of the unfused way's" in text
    assert bench("ag_gemm", "--invariant", "3").returncode == 2


def test_sums_of_scaled_products_with_a_norm(tmp_path: Path) -> None:
    shapes, file = tmp_path / "in.json", tmp_path / "x.json"
    shapes.write_text(json.dumps({"shapes": [{"op": "gemm_all_reduce", **PRODUCT}]}))
    done = bench("gemm_ar", "--norm", "--dtype", "float8_e4m3", "--ranks", "2", "--accelerator",
                 "streams", "--shapes", str(shapes), "--iterations", "2", "--warmup", "1",
                 "--json", str(file), "--peers", "gloo+matmul")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    for name in ("mkernel", "gloo+matmul"):
        assert row["entries"][name]["state"] == "right", row["entries"][name]


def test_experts_with_a_capacity(tmp_path: Path) -> None:
    """Rows beyond those of a turn's routing are no results, whatever they hold."""
    file = tmp_path / "x.json"
    done = bench("moe_dispatch_gemm,moe_gemm_combine,moe_layer", "--ranks", "2", "--accelerator",
                 "streams", "--shapes", OTHERS["moe_gemm_combine"], "--iterations", "2",
                 "--warmup", "1", "--dtype", "bfloat16", "--capacity", "--routing", "zipf",
                 "--json", str(file), "--mode", "kernel,eager", "--invariant", "4",
                 "--peers", "gloo+matmul,gather+grouped")  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    for row in json.loads(file.read_text())["rows"]:
        for name in ("mkernel", "mkernel-invariant", "gloo+matmul", "gather+grouped", "gemm"):
            assert row["entries"][name]["state"] == "right", (row["shape"]["op"], name)


def test_experts_in_e4m3(tmp_path: Path) -> None:
    """With and without a capacity; peers are absent by name where torch has no such product."""
    file = tmp_path / "x.json"
    for options in (["--nodes", "2"], ["--capacity", "--routing", "zipf", "--mode", "eager"]):
        done = bench("dispatch_gemm,gemm_combine,moe_layer", "--ranks", "2", "--accelerator", "streams",
                     "--shapes", "tokens=160 hidden=256 features=128 experts=4 top_k=2",
                     "--iterations", "2", "--warmup", "1", "--dtype", "float8_e4m3",
                     "--scales", "block", "--json", str(file), *options)  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        assert "float8_e4m3fn with block scales" in done.stdout
        for row in json.loads(file.read_text())["rows"]:
            sequential = "--nodes" in options and row["shape"]["op"] != "moe_layer"
            right = ("mkernel", "mkernel-sequential") if sequential else ("mkernel",)
            right += ("gather+dequantised",) if "--capacity" in options else ()
            for name in right:
                entry = row["entries"][name]
                assert entry["state"] == "right", (row["shape"]["op"], name)
                assert entry["error"] > 1e-4  # of bfloat16 results
            for name in ("gloo+matmul", "gather+grouped", "gather+scaled", "gemm"):
                assert (
                    row["entries"][name]["why"] == "torch has no product with scales by blocks here"
                )


@pytest.mark.parametrize("fault", ["ReturnsPrevious", "WrongEveryFifth"])
def test_a_faulty_backend_has_no_right_row_of_e4m3_experts(tmp_path: Path, fault: str) -> None:
    file = tmp_path / "x.json"
    done = bench("dispatch_gemm,gemm_combine,moe_layer", *SMALL, "--peers", "none", "--shapes",
                 "tokens=160 hidden=256 features=128 experts=4 top_k=2", "--capacity",
                 "--dtype", "float8_e4m3", "--json", str(file), "--accelerator",
                 f"mkernel.conformance.faults:{fault}")  # fmt: skip
    assert done.returncode == 1
    for row in json.loads(file.read_text())["rows"]:
        assert row["entries"]["mkernel"]["state"] == "wrong", row["shape"]["op"]


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        ("moe_dispatch_gemm", "RowsOfTheNextExpert"),
        ("moe_gemm_combine", "RowsOfTheNextExpert"),
        ("moe_layer", "RowsOfTheNextExpert"),
        ("ring_attention", "MergesWithoutRescaling"),
        ("ring_attention", "StaleKeys"),
        ("ring_attention_backward", "SumsOfTheOwnKeys"),
    ],
)
def test_wrong_peers_of_other_ops(tmp_path: Path, op: str, fault: str) -> None:
    file, name = tmp_path / "x.json", f"wrong_contenders:{fault}"
    done = bench(op, "--ranks", "2", "--accelerator", "streams", "--shapes", OTHERS[op],
                 "--iterations", "2", "--warmup", "1", "--only-peers", "--peers", name,
                 "--json", str(file))  # fmt: skip
    assert done.returncode == 1
    (row,) = json.loads(file.read_text())["rows"]
    assert row["entries"][name]["state"] == "wrong"
    assert row["entries"]["gemm"]["state"] == "right"


@pytest.mark.parametrize("op", ["moe_combine", "ring_attention", "ring_attention_backward"])
def test_loops_and_first_calls_of_other_ops(tmp_path: Path, op: str) -> None:
    file = tmp_path / "x.json"
    done = bench(op, "--ranks", "2", "--shapes", OTHERS[op], "--iterations", "2", "--warmup", "1",
                 "--accelerator", "streams", "--mode", "eager,first", "--json", str(file))  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert [row["mode"] for row in json.loads(file.read_text())["rows"]] == ["eager", "first"]


def test_a_peer_that_raises_leaves_and_fails_the_run(tmp_path: Path) -> None:
    file, name = tmp_path / "x.json", "wrong_contenders:Raises"
    done = bench("ag_gemm", *SMALL, "--accelerator", "streams", "--peers", f"gloo+matmul,{name}",
                 "--json", str(file))  # fmt: skip
    assert done.returncode == 1
    assert f"{name} at all_gather_gemm 256 x 128 x 192" in done.stdout
    assert "RuntimeError: planted" in done.stdout
    (row,) = json.loads(file.read_text())["rows"]
    assert row["entries"][name]["state"] == "failed"
    for other in ("mkernel", "gloo+matmul", "gemm", "comm"):
        assert row["entries"][other]["state"] == "right"


def test_what_hangs_is_named() -> None:
    done = bench("ag_gemm", *SMALL, "--accelerator", "streams", "--only-peers", "--timeout", "6",
                 "--peers", "wrong_contenders:Hangs")  # fmt: skip
    assert done.returncode == 1
    assert "ContenderHung: wrong_contenders:Hangs at all_gather_gemm 256 x 128 x 192" in done.stderr


def test_what_fails_on_one_rank_is_said_though_the_others_wait_for_it() -> None:
    done = bench("ag_gemm", *SMALL, "--accelerator", "ascend", "--only-peers",
                 "--peers", "wrong_contenders:FailsAlone")  # fmt: skip
    assert done.returncode == 2
    assert "RuntimeError: planted" in done.stderr
    assert "ContenderHung" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gemm"], "one of"),
        (["moe_dispatch_gemm", "--shapes", "64x64x64"], "moe_dispatch_gemm: tokens, hidden"),
        (["moe_combine", "--ranks", "5"], "experts that is a multiple of 5"),
        (["ring_attention", "--shapes", "sequence=6 causal=1", "--ranks", "2"], "twice the number"),
        (["ring_attention", "--random", "3"], "--random"),
        (["ag_gemm", "--backward"], "ring_attention alone"),
        (["ag_gemm", "--capacity"], "an op of MoE"),
        (["ring_attention", "--routing", "zipf"], "an op of MoE"),
        (["moe_combine", "--routing", "even"], "uniform or zipf"),
        (["moe_combine", "--mode", "graph", "--accelerator", "streams"], "depend on its data"),
        (["--nodes", "3", "--ranks", "4"], "a multiple of 3"),
        (["--peers", "nobody"], "'nobody'"),
        (["--peers", "json:loads"], "derives from Contender"),
        (["--shapes", "4x4"], "M x N x K"),
        (["--shapes", "129x128x64", "--ranks", "2"], "a multiple of 2"),
        (["--dtype", "int8"], "--dtype"),
        (
            ["dispatch_gemm", "--dtype", "float8_e4m3", "--scales", "row"],
            "block: moe_dispatch_gemm",
        ),
        (
            ["gemm_combine", "--dtype", "float8_e4m3", "--fast-accum"],
            "moe_gemm_combine are float32",
        ),
        (["moe_combine", "--dtype", "float8_e4m3"], "moe_combine takes no e4m3 inputs"),
        (["dispatch_gemm", "--scales", "block"], "--dtype float8_e4m3 beside it"),
        (["--layout", "diagonal"], "row or column"),
        (["--timeout", "0"], "--timeout"),
        (["--mode", "kernel,fast"], "'fast'"),
        (["--mode", "graph", "--accelerator", "streams"], "kernel, eager or first"),
        (["--mode", "eager", "--launches"], "--launches"),
        (["--random", "3", "--shapes", "8x8x8"], "--random"),
        (["--most-rows", "64"], "nothing without --random"),
        (["--render", "/nonexistent"], "--render"),
    ],
)
def test_bad_input_starts_nothing(arguments: list[str], says: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_what_mkernel_refuses_fails_the_run(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    done = bench("ag_gemm", "--ranks", "2", "--shapes", "128x128x63", "--iterations", "1",
                 "--accelerator", "ascend", "--peers", "none", "--dtype", "float16",
                 "--json", str(file))  # fmt: skip
    assert done.returncode == 1
    (row,) = json.loads(file.read_text())["rows"]
    assert row["entries"]["mkernel"]["why"].startswith("refused: k = 63")
    assert row["entries"]["gemm"]["state"] == "right"


def test_without_devices_it_says_what_it_does_and_shows_progress() -> None:
    done = mkernel("bench", "ag_gemm", "--iterations", "1", "--warmup", "1", "--peers", "none")
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("No accelerator is used: 2 ranks of streams on this machine's CPU")
    assert [line for line in done.stderr.splitlines() if "all_gather_gemm" in line] == [
        "1 of 2 done: kernel all_gather_gemm 256 x 256 x 512",
        "2 of 2 done: kernel all_gather_gemm 1024 x 512 x 1024",
    ]
