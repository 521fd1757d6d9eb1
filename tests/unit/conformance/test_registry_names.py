"""Backends named ``module:attribute``, as an entry point would spell them."""

from __future__ import annotations

import pytest

from mkernel.backends import registry
from mkernel.errors import BackendUnavailable, UnknownBackend

ASCEND = "mkernel.backends.accelerators.ascend:AscendAccelerator"
CX7 = "mkernel.backends.nics.cx7:Cx7Nic"


def test_an_importable_name_is_a_backend() -> None:
    assert registry.accelerator(ASCEND).name == "ascend"
    assert registry.nic(CX7).name == "cx7"


def test_the_same_name_gives_the_same_object() -> None:
    assert registry.accelerator(ASCEND) is registry.accelerator(ASCEND)


@pytest.mark.parametrize("name", [":", "a:", ":b", "a b:c", "a.b:c d", "a/b:c", "a:b:c", "a.:b"])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(UnknownBackend, match="module:attribute"):
        registry.accelerator(name)


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(BackendUnavailable, match="no_such_module"):
        registry.accelerator("no_such_module:Backend")


def test_an_attribute_that_is_not_there_is_named() -> None:
    with pytest.raises(UnknownBackend, match="NoSuchClass"):
        registry.accelerator("mkernel.backends.base:NoSuchClass")


@pytest.mark.parametrize("attribute", ["NicStatistics.__name__", "View"])
def test_what_is_no_class_of_a_backend_is_refused(attribute: str) -> None:
    with pytest.raises((BackendUnavailable, TypeError)):
        registry.accelerator(f"mkernel.backends.base:{attribute}")


def test_a_backend_of_the_other_kind_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="AcceleratorBackend"):
        registry.accelerator(CX7)


def test_an_unknown_plain_name_lists_what_is_installed() -> None:
    with pytest.raises(UnknownBackend, match="ascend"):
        registry.accelerator("nothing")
