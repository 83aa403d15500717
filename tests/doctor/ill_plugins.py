"""Plugins with one illness each, and what a doctor should say of them."""

from __future__ import annotations

from pathlib import Path

import attrs

HEAD = (
    "from deepinfer_core.api import *\n@hookimpl\ndef deepinfer_plugin():\n    return PluginInfo(name={name!r}{more})\n"
)
PROBE = """
@hookimpl
def deepinfer_probe(env):
    return [DeviceInfo(backend={name!r}, type={type!r}, arch="a2", count=1, memory=0, priority=-5, evidence="a test",
                       provider=LazyRef("deepinfer_core.cpu.device:CpuDevice"))]
"""


@attrs.frozen(kw_only=True)
class Ill:
    """Source around the plugin's identity; ``requires``: metadata lines; ``fatal``: its process does not come back."""

    first: str = ""
    info: str = ""
    body: str = ""
    requires: tuple[str, ...] = ()
    fatal: bool = False


ILL = {
    "heavy": Ill(first="import torch\n"),
    "opener": Ill(first="try:\n    open('/dev/acme0')\nexcept OSError:\n    pass\n"),
    "slow": Ill(first="import time\nstart = time.process_time()\nwhile time.process_time() - start < 0.6:\n    pass\n"),
    "exits": Ill(first="import sys\nsys.exit(3)\n"),
    "misspelt": Ill(body="\n@hookimpl\ndef deepinfer_prob(env):\n    return []\n"),
    "raises": Ill(body="\n@hookimpl\ndef deepinfer_metrics():\n    raise OSError('no libacme.so')\n"),
    "newtorch": Ill(requires=("torch>=99",)),
    "needy": Ill(requires=("no-such-thing>=2", "attrs>=1", "jax; extra == 'more'")),
    "absent": Ill(
        body=(
            "\n@hookimpl\ndef deepinfer_probe(env):\n"
            "    return [NoDevice(backend='absent', reason='driver 1.2 is too old', fix='absent-smi --version')]\n"
        )
    ),
    "acme": Ill(
        info=", archs=('a1', 'a3')",
        body=PROBE.format(name="acme", type="cpu")
        + (
            "\n@hookimpl\ndef deepinfer_gemm(device):\n"
            "    return [Provider(name='fast', op='gemm.linear', build=LazyRef('acme_kernels:Fast'),\n"
            "                     supports=lambda request: no('not today')),\n"
            "            Provider(name='slip', op='gemm.liner', build=LazyRef('os:getcwd'),\n"
            "                     supports=lambda request: yes(200), caps=frozenset({'kv_layout:acme'})),\n"
            "            Provider(name='other', op='gemm.convolution', build=LazyRef('os:getcwd'),\n"
            "                     supports=lambda request: yes(200), caps=frozenset({'sparse_by_acme'})),\n"
            "           ] if device.backend == 'acme' else []\n"
        ),
    ),
    "foreign": Ill(body=PROBE.format(name="foreign", type="xla")),
    "settled": Ill(
        first="import attrs\n@attrs.frozen\nclass Settings:\n    speed: int = 3\n",
        info=", settings=Settings",
    ),
    "hangs": Ill(body="\n@hookimpl\ndef deepinfer_probe(env):\n    import time\n    time.sleep(3600)\n", fatal=True),
    "dies": Ill(
        body="\n@hookimpl\ndef deepinfer_probe(env):\n    import os\n    os.kill(os.getpid(), 9)\n", fatal=True
    ),
}


def source(name: str) -> str:
    """The plugin's module."""
    ill = ILL[name]
    return ill.first + HEAD.format(name=name, more=ill.info) + ill.body


def metadata(folder: Path, name: str, requires: tuple[str, ...]) -> None:
    """What an installer writes for a distribution ``<name>-dist``."""
    info = folder / f"{name}_dist-1.0.dist-info"
    info.mkdir()
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.0\n{lines}")
    (info / "entry_points.txt").write_text(f"[deepinfer.plugins.v1]\n{name} = {name}_plugin\n")
