"""What must be on the machine besides the device: driver, CANN, torch_npu, and which versions of them.

Each check reads files or package metadata, imports nothing, and gives the first thing that is missing as a sentence
and the command that shows or mends it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import attrs
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

CANN = SpecifierSet(">=8.5rc1", prereleases=True)
"""torch_npu 2.13 switches operators on from 8.5 upwards. Which one a device needs was not tried."""
TORCH_NPU = SpecifierSet(">=2.11,<2.15", prereleases=True)
"""One torch_npu goes with each torch; the adapters' schemas were checked with 2.13.0 and 2.14.0."""
CANN_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Set by CANN's ``set_env.sh``."""
CANN_DEFAULT = "usr/local/Ascend/ascend-toolkit/latest"
DRIVER_VERSION = "usr/local/Ascend/driver/version.info"


@attrs.frozen(kw_only=True)
class Missing:
    """One thing that is missing. part: ``driver``, ``CANN`` or ``torch_npu``; fix: a command, or what to install."""

    part: str
    reason: str
    fix: str


def driver(root: str) -> str | Missing:
    """The driver's version, from its ``version.info``."""
    path = Path(root, DRIVER_VERSION)
    version = _field(path, "Version")
    if version is None:
        return Missing(part="driver", reason=f"no driver: {path} is missing", fix="check: npu-smi info")
    return version


def cann(environ: Mapping[str, str], root: str) -> str | Missing:
    """CANN's version, from the ``ascend_toolkit_install.info`` of the toolkit in use."""
    named = [environ[name] for name in CANN_HOMES if environ.get(name)]
    home = Path(root, named[0].lstrip("/") if named else CANN_DEFAULT)
    path = home / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    version = _field(path, "version")
    if version is None:
        return Missing(
            part="CANN",
            reason=f"no CANN toolkit: {path} is missing",
            fix="install CANN and run: source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        )
    if not _within(version, CANN):
        return Missing(
            part="CANN",
            reason=f"CANN {version} is not one of {CANN}",
            fix=f"install CANN {CANN} and run its set_env.sh; check: cat {path}",
        )
    return version


def torch_npu() -> str | Missing:
    """torch_npu's version, from package metadata: importing it would open the device."""
    try:
        version = metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        torch = ".".join(metadata.version("torch").split("+")[0].split(".")[:2])
        return Missing(
            part="torch_npu",
            reason="torch_npu is not installed",
            fix=f"pip install 'torch-npu=={torch}.*' (the one for torch {torch})",
        )
    if not _within(version, TORCH_NPU):
        return Missing(
            part="torch_npu",
            reason=f"torch_npu {version} is not one of {TORCH_NPU}",
            fix=f"pip install 'torch-npu{TORCH_NPU}'",
        )
    return version


def _field(path: Path, name: str) -> str | None:
    """``name=value`` of a file of such lines, whatever the case of the name."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition("=")
        if key.strip().lower() == name.lower() and value.strip():
            return value.strip()
    return None


def _within(version: str, allowed: SpecifierSet) -> bool:
    try:
        return Version(version) in allowed
    except InvalidVersion:
        return False
