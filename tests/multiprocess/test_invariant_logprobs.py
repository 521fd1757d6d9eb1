"""The example of log-probabilities: equal bits alone, in batches and on 1, 2 and 4 ranks."""

from __future__ import annotations

import re
from pathlib import Path

import forked_program
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "invariant_logprobs.py"
COUNT = "350"

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


@pytest.mark.parametrize(
    ("ranks", "dtypes"),
    [(2, ["float32"]), pytest.param(4, ["float32", "bfloat16"], marks=pytest.mark.long)],
)
def test_log_probabilities_have_the_same_bits_and_without_the_promise_they_do_not(
    ranks: int, dtypes: list[str]
) -> None:
    """Whatever torch computes besides has been measured; other bits of float32 sums are seen, so that
    equal ones say something."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    code, said = forked_program.run(EXAMPLE, "--dtypes", *dtypes, ranks=ranks)
    assert code == 0, said
    lines = re.findall(r"rank \d, (\w+), TP (\d), (invariant|as usual): (\d+) of (\d+)", said)
    assert len(lines) == ranks * ranks.bit_length() * 2 * len(dtypes)
    for dtype, tp, mode, same, count in lines:
        assert count == COUNT
        if mode == "invariant" or tp == "1":
            assert same == count, (dtype, tp, mode)
        elif dtype == "float32":
            assert int(same) < int(count), tp
    measured = dict(re.findall(r"torch's (.+, \w+): (\d+) of \d+ differ", said))
    assert len(measured) == 9 * len(dtypes)
    of_padding = [int(each) for name, each in measured.items() if "padded" in name]
    assert sum(map(int, measured.values())) == sum(of_padding), measured
