"""``auto`` in real worlds: what it stands for here, and ranks that come to different results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from in_world import stores
from pydantic import SecretStr

import mkernel
from mkernel.errors import BackendUnavailable, Unsupported
from mkernel.launch import host_store
from mkernel.settings import Settings
from mkernel.world import join

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

BACKEND = '''
import os
from mkernel.backends.accelerators.streams import StreamsAccelerator
from mkernel.backends.contracts.status import Status

class OnSome(StreamsAccelerator):
    """A backend whose devices only rank 1 sees."""
    name = "onsome"
    preference = 30

    def status(self):
        return Status(os.environ.get("RANK") == "1", "a device")
'''
SCRIPT = """
import mkernel

def body():
    return mkernel.world().backends.accelerator

if __name__ == "__main__":
    print(mkernel.launch(body, ranks_per_node=1))
    try:
        mkernel.launch(body, ranks_per_node=2)
    except mkernel.errors.PlanMismatch as error:
        print(error)
    print(mkernel.launch(body, ranks_per_node=2, accelerator="streams"))
"""


def chosen() -> tuple[str, str | None, str | None]:
    names = mkernel.world().backends
    return names.accelerator, names.nic, names.verbs


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATOR", "NIC", "VERBS"):
        monkeypatch.delenv(f"MKERNEL_{name}", raising=False)


def test_a_world_on_this_machine_is_on_no_simulator() -> None:
    (alone,) = mkernel.launch(chosen)
    assert alone[0] in ("hopper", "streams")
    assert mkernel.capabilities().simulated is False
    assert mkernel.plan("ag_gemm", m=64, n=64, k=64).accelerator == alone[0]


def test_ranks_that_choose_differently_are_told(tmp_path: Path) -> None:
    (tmp_path / "onsome.py").write_text(BACKEND)
    metadata = tmp_path / "onsome-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: onsome\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[mkernel.accelerators]\nonsome = onsome:OnSome\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path, "MKERNEL_STREAMS_DEVICE": "cpu"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, told, last = done.stdout.splitlines()
    assert "onsome" not in first
    for part in ("world.accelerator is", "'onsome'", "MKERNEL_ACCELERATOR", "`auto`"):
        assert part in told
    assert last == "['streams', 'streams']"


def attend() -> str:
    q = torch.ones(1, 1, 8, 8)
    with pytest.raises(Unsupported) as caught:
        mkernel.ring_attention(q, q, q)
    return str(caught.value)


def test_an_op_that_the_world_lacks_names_who_has_it() -> None:
    backend = "limited_backends:GemmsOnly"
    (told,) = mkernel.launch(attend, accelerator=backend)
    assert f"{backend!r} does not provide 'ring_attention'" in told
    assert "streams and ascend do: accelerator='streams'" in told
    with pytest.raises(Unsupported, match="streams and ascend do"):
        mkernel.plan("ring_attention", accelerator=backend, sequence=64, heads=1)


def elsewhere(port: int, verbs: str | None) -> None:
    """A world whose two nodes are two hosts by their names."""
    mkernel.finalize()
    rank = os.environ["RANK"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join, "host_identity", lambda: f"host{rank}")
        mkernel.init(
            nodes=2,
            accelerator="ascend",
            verbs=verbs,
            settings=Settings(job_secret=SecretStr("a secret of this job")),
            stores=stores(port),
        )


@pytest.mark.parametrize("verbs", [None, "soft"])
def test_the_software_device_joins_one_host_only(verbs: str | None) -> None:
    store, port = host_store(2, 30)
    with pytest.raises(BackendUnavailable, match="verbs 'soft' joins processes of one host"):
        mkernel.launch(elsewhere, port, verbs, nodes=2)
    del store
