"""Faults of ``efa`` at the verbs, which a library between it and the software device makes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from mkernel.backends.contracts.nic import NicSession
from mkernel.backends.nics.efa import EfaNic
from mkernel.backends.nics.provider import SOFT, library_of
from mkernel.backends.nics.verbs_backend import VerbsBackend
from mkernel.conformance.nic_faults.base import Fault
from mkernel.settings import NicSettings


class _Mistaken(Fault):
    """``efa`` on ``softverbs/planted.cpp``, which knows the mistake by its name."""

    around: ClassVar[type[VerbsBackend]] = EfaNic
    mistake: ClassVar[str]

    def open(self, device: str, verbs: str, rank: int, settings: NicSettings) -> NicSession:
        os.environ["MKERNEL_PLANTED_MISTAKE"] = self.mistake
        library = Path(library_of(SOFT, settings)).with_name("libmkernel_planted_verbs.so")
        return super().open(device, str(library), rank, settings)


class Honest(_Mistaken):
    """Nothing: the library between passes everything on."""

    mistake = "none"


class MiscountedImmediate(_Mistaken):
    """Of a put of several messages, one immediate fewer is counted than there are."""

    mistake = "miscount"


class MissingReceive(_Mistaken):
    """Receives are not posted again after the first thousand."""

    mistake = "missing-receive"
