"""Backends named ``module:attribute``, as an entry point would spell them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
        registry.accelerator("mkernel.backends.contracts.nic:NoSuchClass")


@pytest.mark.parametrize("attribute", ["nic:NicStatistics.__name__", "instrumented:View"])
def test_what_is_no_class_of_a_backend_is_refused(attribute: str) -> None:
    with pytest.raises(BackendUnavailable, match="not a whole class"):
        registry.accelerator(f"mkernel.backends.contracts.{attribute}")


_called: list[str] = []


def a_function() -> object:
    """Looks like a backend's maker."""
    _called.append("function")
    return registry.accelerator("ascend")


class AStranger:
    """A class of something else."""

    def __init__(self) -> None:
        _called.append("class")


@pytest.mark.parametrize("name", ["a_function", "AStranger"])
@pytest.mark.parametrize("made", [registry.accelerator, registry.nic])
def test_what_is_no_backend_is_refused_before_it_is_called(
    made: Callable[[str], object], name: str
) -> None:
    with pytest.raises(BackendUnavailable, match=f"{__name__}:{name}"):
        made(f"{__name__}:{name}")
    assert not _called


@pytest.mark.parametrize(
    "what", ["os:system", "mkernel.backends.contracts.accelerator:AcceleratorBackend"]
)
def test_no_function_and_no_contract_is_a_backend(what: str) -> None:
    with pytest.raises(BackendUnavailable, match="derives from AcceleratorBackend"):
        registry.accelerator(what)
    with pytest.raises(BackendUnavailable, match="derives from NicBackend"):
        registry.nic(what)


@pytest.mark.parametrize("does", ["raise RuntimeError('broken')", "raise SystemExit(0)"])
def test_a_module_that_breaks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    module = f"breaks_{'exit' if 'Exit' in does else 'error'}"
    (tmp_path / f"{module}.py").write_text(does)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailable, match=f"{module}:Backend"):
        registry.accelerator(f"{module}:Backend")


def test_a_backend_of_the_other_kind_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="AcceleratorBackend"):
        registry.accelerator(CX7)


def test_an_unknown_plain_name_lists_what_is_installed() -> None:
    with pytest.raises(UnknownBackend, match="ascend"):
        registry.accelerator("nothing")
