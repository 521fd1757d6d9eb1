"""``auto`` in real worlds: what it stands for here, and ranks that come to different results."""

from __future__ import annotations

import os

import pytest
from in_world import stores
from pydantic import SecretStr

import mkernel
from mkernel.errors import BackendUnavailable
from mkernel.launch import host_store
from mkernel.settings import Settings
from mkernel.world import join

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


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
