"""What commands print, at the widths that terminals have and in a pipe: every line fits, every word and
every column is there, units fit, and nothing that a newcomer cannot use."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import mkernel

from mkernel.cli import run as run_command
from mkernel.conformance import check
from mkernel.harness import bench_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

WIDTHS = (60, 80, 200)
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\n)|(\r)")
_LONG_US = re.compile(r"\b\d{4,}(\.\d+)? us\b")
_DIGEST = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,}\b")
_KEYS = {
    "view", "op", "M", "N", "K", "x", "a", "rank", "or", "sizes", "name", "mode", "check", "outcome",
    "variable", "decision", "option", "fault", "ranks", "why", "meaning", "promise", "and", "how", "it",
    "was", "broken", "world", "of",
}  # fmt: skip
"""Words of headings that paragraphs do without: of what names a row, and of running text."""

GEMM = ["--m", "256", "--n", "64", "--k", "128", "--warmup", "0", "--iterations", "1"]
SMALL = ["--shapes", "64x64x64", "--iterations", "1", "--warmup", "1"]
ASCEND = ["--accelerator", "ascend"]
COMMANDS: dict[str, list[str]] = {
    "help": ["--help"],
    "run": ["run", "ag_gemm", *GEMM],
    "run verbose": ["run", "ag_gemm", *GEMM, "--verbose"],
    "run modelled": ["run", "gemm_rs", *ASCEND, *GEMM],
    "run one rank": ["run", "ag_gemm", *ASCEND, "--nodes", "1", "--ranks-per-node", "1", *GEMM],
    "run attention": ["run", "ring_attention", "--sequence", "256", "--iterations", "1"],
    "run moe": ["run", "moe_dispatch_gemm", "--tokens", "32", "--iterations", "1"],
    "plan": ["plan", "ag_gemm"],
    "plan explained": ["plan", "ag_gemm", *ASCEND, "--explain", "--simulate"],
    "plan attention": ["plan", "ring_attention", "--explain", "--simulate"],
    "plan moe": ["plan", "moe_dispatch_gemm", *ASCEND, "--nodes", "3", "--explain"],
    "plan what if": ["plan", "ag_gemm", "--topology", "GPUS", "--explain", "--m", "8192"],
    "probe": ["probe"],
    "probe file": ["probe", "--from", "GPUS"],
    "doctor": ["doctor"],
    "doctor settings": ["doctor", "--settings"],
    "bench": ["bench", "ag_gemm,gemm_rs", *SMALL],
    "bench modes": ["bench", "ag_gemm", *SMALL, "--mode", "kernel,eager,first"],
    "bench verbose": ["bench", "ag_gemm", *SMALL, "--verbose"],
    "bench modelled": ["bench", "--model-only", *ASCEND, "--shapes", "512x256x256"],
    "bench refused": ["bench", "--shapes", "targets"],
    "conformance checks": ["conformance", "--list", "--nic", "cx7"],
    "conformance": ["conformance", *ASCEND, "--quick", "--check", "capabilities"],
    "unknown op": ["run", "al_gather_gemm"],
    "no driver": ["run", "ag_gemm", "--accelerator", "hopper"],
    "foreign size": ["plan", "ag_gemm", "--tokens", "3"],
}
NCCL = """<system version="1"><cpu numaid="0" affinity="ffffffff" arch="x86_64" vendor="GenuineIntel">
<pci busid="0000:10:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
<pci busid="0000:11:00.0" class="0x030200" vendor="0x10de" device="0x2330" link_speed="32.0 GT/s PCIe"
 link_width="16"><gpu dev="0" sm="90" rank="0"><nvlink target="0000:ff:00.0" count="18"
 tclass="0x068000"/></gpu></pci>
<pci busid="0000:12:00.0" class="0x020700" vendor="0x15b3" device="0x1021" link_speed="32.0 GT/s PCIe"
 link_width="16"><nic><net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"/></nic></pci>
</pci></cpu></system>"""


def shown(text: str) -> list[str]:
    """The lines that a terminal shows in the end."""
    lines, row, at = [""], 0, 0
    for match in _CONTROL.finditer(text + "\n"):
        lines[row] += text[at : match.start()]
        at = match.end()
        number, letter, line, back = match.groups()
        if line:
            row += 1
            lines += [""] * (row == len(lines))
        elif back or (letter == "K" and number == "2"):
            lines[row] = ""
        elif letter == "A":
            row -= int(number or 1)
    return [line.rstrip() for line in lines]


def words(lines: list[str]) -> set[str]:
    """Without addresses, which a software device draws anew each time that it is looked at."""
    text = " ".join(line.strip(" │├└─━╭╮╰╯┃") for line in lines)
    return {
        found for word in text.split() if re.search(r"^(?!fd00:).*\w", found := word.strip(" ,;:·"))
    }


class Kept:
    """Calls of a function by their arguments: the later ones return what the first one did."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._found: dict[bytes, Any] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        options_told = {name: value for name, value in options.items() if name[:3] != "on_"}
        key = repr((arguments[:2], options_told)).encode()
        if key not in self._found:
            self._found[key] = pickle.dumps(self._function(*arguments, **options))
        return pickle.loads(self._found[key])


@pytest.fixture(scope="module", autouse=True)
def once() -> Any:
    """What takes processes runs once, and is shown in every width; a check takes 1.5 s."""
    moments = itertools.count(step=1.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
        patch.setattr(run_command, "launch", Kept(run_command.launch))
        patch.setattr(bench_run, "run", Kept(bench_run.run))
        yield


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    def found(arguments: list[str], width: int | None) -> list[str]:
        machine = tmp_path / "gpus.xml"
        machine.write_text(NCCL)
        for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        if width is not None:
            monkeypatch.setenv("TERM", "xterm-256color")
            monkeypatch.setenv("FORCE_COLOR", "1")
            monkeypatch.setenv("COLUMNS", str(width))
        done = mkernel(*(str(machine) if one == "GPUS" else one for one in arguments))
        assert done.returncode in (0, 2), done.stdout + done.stderr
        told = width is not None or done.returncode
        errors = done.stderr if told else ""  # else it is progress, which a terminal erases
        return shown(done.stdout + errors)

    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_whole_words_in_any_width(name: str, printed: Callable[..., list[str]]) -> None:
    arguments = COMMANDS[name]
    piped = printed(arguments, None)
    text = "\n".join(piped)
    assert not re.search(r"\w…", text), text
    assert not _LONG_US.search(text), text
    assert "0.0 MB" not in text
    assert "verbose" in name or not _DIGEST.search(text), text
    assert "10de:" not in text
    for width in WIDTHS:
        lines = printed(arguments, width)
        assert max(map(len, lines)) <= width, "\n".join(lines)
        if name == "help":  # typer wraps at its own widths, and frames
            continue
        cut = words(lines) - words(piped)
        assert not cut, (width, cut)
        lost = words(piped) - words(lines)
        assert not lost - _KEYS, (width, lost - _KEYS)


def test_devices_have_their_products_names(printed: Callable[..., list[str]]) -> None:
    for arguments in (COMMANDS["probe file"], COMMANDS["plan what if"]):
        assert "NVIDIA H100 SXM5 80 GB" in "\n".join(printed(arguments, None))


def test_predictions_stand_beside_what_they_predict(printed: Callable[..., list[str]]) -> None:
    """Of the modelled machine beside its modelled times; of this host's CPUs, nobody measured any."""
    modelled = "\n".join(printed(COMMANDS["run modelled"], None))
    head = next(line for line in modelled.splitlines() if "modelled," in line)
    assert re.search(r"view +modelled, [um]s +predicted, [um]s", head)
    assert "measured" not in modelled, "how long a simulation takes says nothing"
    assert "predicted" not in "\n".join(printed(COMMANDS["run"], None))


def test_the_digest_is_there_for_who_asks(printed: Callable[..., list[str]]) -> None:
    assert _DIGEST.search("\n".join(printed(COMMANDS["run verbose"], None)))


def test_a_bench_of_a_cpu_says_what_it_will_do_or_why_not(
    printed: Callable[..., list[str]],
) -> None:
    said = "\n".join(printed(COMMANDS["bench"], None))
    assert "No accelerator is used: 2 ranks of streams" in said
    assert "1 timed call of each contender" in said
    refused = "\n".join(printed(COMMANDS["bench refused"], None))
    assert re.search(r"about \d+ minutes on \d+ CPUs", refused)
