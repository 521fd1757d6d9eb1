"""The pytest plug-in behind ``pytest --pyargs mkernel.conformance --accelerator NAME``.

It only adds the kit's options: pytest does not look for them in the conftest of a package that
``--pyargs`` names. It lies outside of ``mkernel`` because pytest imports it in every session, and
importing ``mkernel`` imports torch. In sessions that do not run the kit it adds nothing.
"""

from __future__ import annotations

import pytest

KIT = "mkernel.conformance"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the kit's options to a session that names the kit."""
    config = pluginmanager.get_plugin("pytestconfig")
    asked = config.invocation_params.args if isinstance(config, pytest.Config) else ()
    if not any(KIT in str(argument) for argument in asked):
        return
    group = parser.getgroup("mkernel conformance")
    group.addoption("--accelerator", metavar="NAME", help="judge this accelerator backend")
    group.addoption("--nic", metavar="NAME", help="judge this NIC backend")
    group.addoption("--verbs", metavar="PROVIDER", help="soft, system, or a library's path")
    group.addoption("--quick", action="store_true", help="a minute instead of five")
    group.addoption("--seed", type=int, default=0, help="of the random draws")
