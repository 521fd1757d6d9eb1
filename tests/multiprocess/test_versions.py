"""Ranks with unlike versions of mkernel make no world."""

from __future__ import annotations

from typing import Any

import pytest
from in_world import stores

import mkernel
from mkernel.errors import PlanMismatch
from mkernel.launch import host_store
from mkernel.world import join, lifecycle

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def joins(port: int, told: Any) -> tuple[str, tuple[str, str], str]:
    """How joining another world fails where rank 1 is of another version, whose hello says ``told`` of
    the host."""
    world = mkernel.world()
    clients = stores(port)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(join, "__version__", "0.0.7")
            if told is not None:
                patch.setattr(join, "host_identity", lambda: told)
        with pytest.raises(PlanMismatch) as refused:
            lifecycle.join(world.identity, world.backends, world.settings, clients, "two versions")
    return refused.value.field, refused.value.values, str(refused.value)


@pytest.mark.parametrize("told", [None, {"a host": "in other words"}])
def test_a_world_of_two_versions_is_refused_and_both_are_named(told: Any) -> None:
    # Also where the hello of the other version has another meaning, which none of ours has.
    store, port = host_store(2, 30)
    for field, versions, text in mkernel.launch(
        joins, port, told, ranks_per_node=2, accelerator="streams"
    ):
        assert field == "world.mkernel"
        assert set(versions) == {"0.0.7", mkernel.__version__}
        assert "0.0.7" in text
        assert mkernel.__version__ in text
        assert "install the same version" in text
    del store
