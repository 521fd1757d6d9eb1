"""Virtual environments of other packages over those of the Python that runs this."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path


def make(folder: Path | str, *installs: Sequence[str], reuse: bool = False) -> Path:
    """Make an environment in ``folder``, and return its Python.

    Its own packages come first. All others, mkernel as it is built here among them, are those of the
    Python that runs this; hooks of editable installs run too, as they do here.

    Args:
        installs: what pip is told to install, one call after another: requirements and options.
        reuse: whether packages of the Python that runs this count as installed, torch say.
    """
    venv.create(folder, with_pip=True)
    python = Path(folder) / "bin" / "python"
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.check_output([python, "-c", purelib], text=True).strip()
    ours = sysconfig.get_path("purelib")
    link = Path(own) / "ours.pth"
    link.write_text(f"import site; site.addsitedir({ours!r})\n" if reuse else "")
    for words in installs:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *words], check=True)
    link.write_text(f"import site; site.addsitedir({ours!r})\n")
    return python
