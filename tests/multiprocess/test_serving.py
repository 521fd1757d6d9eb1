"""The serving example: answers are the unsharded model's, and mistakes are seen in the logits."""

from __future__ import annotations

import re
from pathlib import Path

import forked_program
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving.py"
FOUND = re.compile(r"rank \d of 2 on streams: .* differ by (\S+) at most, (\d+) of (\d+) tokens")

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def test_both_servers_answer_as_the_unsharded_model() -> None:
    code, said = forked_program.run(EXAMPLE, "--seconds", "1", "--steps", "40")
    assert code == 0, said
    found = FOUND.findall(said)
    assert len(found) == 2
    assert max(float(error) for error, _, _ in found) <= 1e-5
    assert len({(same, total) for _, same, total in found}) == 1
    assert re.search(r"^decode 4 +\d+( +\d+\.\d{3}){4}$", said, re.MULTILINE), said
    assert re.search(r"^prefill +\d+( +\d+\.\d{3}){4}$", said, re.MULTILINE), said
    assert re.search(r"answers: mkernel \d+, gloo \d+$", said, re.MULTILINE), said


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("residual=residual, norm_weight", "residual=residual * 2, norm_weight"),
        ("    dist.all_reduce(y)", "    pass"),
        ("self.places <= places[:, None]", "self.places < places[:, None]"),
    ],
    ids=[
        "a wrong residual",
        "torch's sum is left out",
        "a token does not see itself",
    ],
)
def test_a_mistake_is_seen(right: str, wrong: str, tmp_path: Path) -> None:
    source = EXAMPLE.read_text()
    assert source.count(right) == 1
    script = tmp_path / "mistaken.py"
    script.write_text(source.replace(right, wrong))
    code, said = forked_program.run(script, "--seconds", "1", "--steps", "20")
    assert code != 0, said
    assert max(float(error) for error, _, _ in FOUND.findall(said)) > 1e-5


def test_growth_is_seen(tmp_path: Path) -> None:
    source, right = EXAMPLE.read_text(), "        self.last = [(request, logits[request.slot])"
    assert source.count(right) == 1
    script = tmp_path / "growing.py"
    kept = "        vars(self).setdefault('kept', []).append(torch.ones(1 << 18))\n"
    script.write_text(source.replace(right, kept + right))
    code, said = forked_program.run(script, "--seconds", "1", "--steps", "20", "--growth", "16")
    assert code != 0, said
    assert max(float(error) for error, _, _ in FOUND.findall(said)) <= 1e-5
