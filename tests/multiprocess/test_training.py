"""The training examples: losses are those of the unsharded models, and mistakes are seen in them."""

from __future__ import annotations

import re
from pathlib import Path

import forked_program
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE, EXPERTS = EXAMPLES / "train_tensor_parallel.py", EXAMPLES / "qwen3_moe.py"
MODELS = EXAMPLES / "transformers_models.py"

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def trained(script: Path, *arguments: str) -> tuple[int, str, list[float]]:
    """Return the exit code, what is printed, and by how much losses differ on each rank."""
    code, said = forked_program.run(script, *arguments)
    differ = re.findall(r"rank \d of 2 on streams: losses differ by (\S+) at most", said)
    return code, said, [float(each) for each in differ]


def test_losses_follow_the_unsharded_models() -> None:
    code, said, differ = trained(EXAMPLE)
    assert code == 0, said
    assert len(differ) == 2
    assert max(differ) <= 1e-3
    losses = dict(re.findall(r"step (\d+): loss (\S+),", said))
    assert float(losses["49"]) < float(losses["0"]) / 2  # it has learnt something


def test_losses_of_shared_experts_follow_the_unsharded_models() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    code, said, differ = trained(EXPERTS)
    assert code == 0, said
    assert len(differ) == 2
    assert max(differ) <= 1e-3
    losses = dict(re.findall(r"step (\d+): loss (\S+),", said))
    assert float(losses["29"]) < float(losses["0"]) / 1.5


def test_models_of_transformers_follow_the_unsharded_ones() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    code, said = forked_program.run(MODELS, "--steps", "3")
    assert code == 0, said
    assert said.count("32 of 32 tokens are the same") == 2 * 2


@pytest.mark.parametrize(
    ("example", "right", "wrong"),
    [
        (EXAMPLE, "            dist.all_reduce(shared)", "            pass"),
        (EXAMPLE, "run(inputs[:, mine], mine)", "run(inputs[:, mine], mine - mine[0])"),
        (EXAMPLE, "model.load_state_dict(reference.state_dict())", "model.state_dict()"),
        (EXPERTS, "averaged(parameter.grad, world.size)", "pass"),
        (EXPERTS, "parameter.grad /= world.size", "averaged(parameter.grad, world.size)"),
    ],
    ids=[
        "gradients are not summed",
        "positions of the first rank",
        "other weights",
        "gradients are not averaged",
        "experts of all ranks are one",
    ],
)
def test_a_mistake_is_seen(example: Path, right: str, wrong: str, tmp_path: Path) -> None:
    if example == EXPERTS:
        pytest.importorskip("transformers", reason="transformers is not installed")
    source = example.read_text()
    assert source.count(right) == 1
    script = tmp_path / "mistaken.py"
    script.write_text(source.replace(right, wrong))
    code, said, differ = trained(script, "--steps", "5")
    assert code != 0, said
    assert max(differ) > 1e-3
