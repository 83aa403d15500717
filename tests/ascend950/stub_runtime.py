"""Empty stand-ins for CANN's libraries, so that ``import torch_npu`` gives its schemas and Meta kernels on any machine.

The symbols that torch_npu and its neighbours leave undefined are read with ``nm``; each becomes a function that
returns 0 or, for C++ type tables, 256 zero bytes. A few must answer: one device of this kind, without memory.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

LIBRARIES = (
    "libhccl",
    "libascendcl",
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libacl_tdt_channel",
)
ANSWERS = """
#include <stddef.h>
#include <stdint.h>
static int device = 0;
static long handle = 1;
const char *aclrtGetSocName(void) { return "Ascend950PR_9599"; }
const char *aclGetRecentErrMsg(void) { return "no device: these are stand-ins"; }
int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return 0; }
int aclrtGetDevice(int *out) { *out = device; return 0; }
int aclrtSetDevice(int wanted) { device = wanted; return 0; }
int aclrtGetCurrentContext(void **out) { *out = &handle; return 0; }
int aclrtCreateStream(void **out) { *out = &handle; return 0; }
int aclrtCreateStreamWithConfig(void **out, uint32_t a, uint32_t b) { *out = &handle; return 0; }
int aclrtMalloc(void **out, size_t size, int flags) { *out = 0; return 207001; }
int aclrtMallocHost(void **out, size_t size) { *out = 0; return 207001; }
int aclrtGetMemInfo(int kind, size_t *left, size_t *total) { *left = *total = 0; return 0; }
int aclrtSetDeviceSatMode(void) { return 0; }
"""
TABLE = re.compile(r"^_ZT[VIS]")
TOOLS = ("nm", "gcc")


def missing_tools() -> list[str]:
    """Of the programs needed, those that are not installed."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def build(torch_npu: Path, torch: Path, target: Path) -> None:
    """Write the libraries into ``target``. ``torch_npu`` and ``torch`` are the installed packages' folders."""
    users = [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")]
    neighbours = [*users, *torch.glob("lib/*.so*"), *_system()]
    needed = _symbols(users, "--undefined-only") - _symbols(neighbours, "--defined-only")
    needed = {name for name in needed if not name.startswith(("Py", "_Py")) and "pybind" not in name}
    answered = set(re.findall(r"(\w+)\(", ANSWERS))
    target.mkdir(parents=True, exist_ok=True)
    assembly = [".text"]
    for name in sorted(needed - answered):
        if TABLE.match(name):
            assembly += [f".data; .globl {name}; .type {name},@object; .size {name},256; .balign 16"]
            assembly += [f"{name}: .zero 256; .text"]
        else:
            assembly.append(f".globl {name}; .type {name},@function; {name}: xorl %eax,%eax; ret")
    assembly.append('.section .note.GNU-stack,"",@progbits')
    (target / "stubs.s").write_text("\n".join(assembly) + "\n")
    (target / "answers.c").write_text(ANSWERS)
    (target / "empty.c").write_text("")
    for library in LIBRARIES:
        sources = ["stubs.s", "answers.c"] if library == "libascendcl" else ["empty.c"]
        subprocess.run(
            ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}.so", "-o", f"{library}.so", *sources],
            cwd=target,
            check=True,
            capture_output=True,
        )


def _system() -> list[Path]:
    names = ("libc", "libm", "libgcc_s", "libpthread", "libdl", "librt", "libstdc++")
    folders = [Path("/lib/x86_64-linux-gnu"), Path("/usr/lib/x86_64-linux-gnu")]
    found = [path for folder in folders for name in names for path in folder.glob(f"{name}.so.[0-9]*")]
    return [*found, Path("/lib64/ld-linux-x86-64.so.2")]


def _symbols(files: Iterable[Path], which: str) -> set[str]:
    """Names without versions. Undefined weak symbols need no stand-in."""
    found: set[str] = set()
    for path in files:
        out = subprocess.run(["nm", "-D", which, str(path)], capture_output=True, text=True, check=False).stdout
        for line in out.splitlines():
            parts = line.split()
            if which == "--undefined-only" and parts[0] != "U":
                continue
            found.add(parts[-1].partition("@")[0])
    return found
