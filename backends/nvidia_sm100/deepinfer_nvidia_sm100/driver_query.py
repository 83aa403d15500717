"""Asks the CUDA driver which devices it has, as a script in a process of its own. Imports nothing but the library.

In the engine's process ``cuInit`` would make later forks unable to use a GPU. No context is created here either, so
that nothing is taken of a device's memory. Writes one JSON object: ``driver`` (as 13000 for 13.0) and ``devices``.
"""

import ctypes
import json
import sys

MAJOR, MINOR, MULTIPROCESSORS = 75, 76, 16  # CUdevice_attribute


def query(library: str) -> dict[str, object]:
    """What the driver says. Raises OSError when it cannot be loaded or refuses."""
    cuda = ctypes.CDLL(library)

    def call(name: str, *arguments: object) -> None:
        error = getattr(cuda, name)(*arguments)
        if error:
            raise OSError(f"{name} failed with error {error}{said_of(error)}")

    def said_of(error: int) -> str:
        text = ctypes.c_char_p()
        known = getattr(cuda, "cuGetErrorString", None)
        if known is None or known(error, ctypes.byref(text)) or not text.value:
            return ""
        return f", {text.value.decode(errors='replace')}"

    number = ctypes.c_int()

    def attribute(device: ctypes.c_int, which: int) -> int:
        call("cuDeviceGetAttribute", ctypes.byref(number), which, device)
        return number.value

    call("cuInit", 0)
    call("cuDriverGetVersion", ctypes.byref(number))
    driver = number.value
    call("cuDeviceGetCount", ctypes.byref(number))
    devices = []
    for index in range(number.value):
        device, name, size = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
        call("cuDeviceGet", ctypes.byref(device), index)
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        devices.append(
            {
                "name": name.value.decode(errors="replace"),
                "major": attribute(device, MAJOR),
                "minor": attribute(device, MINOR),
                "multiprocessors": attribute(device, MULTIPROCESSORS),
                "memory": size.value,
            }
        )
    return {"driver": driver, "devices": devices}


if __name__ == "__main__":
    try:
        print(json.dumps(query(sys.argv[1])))
    except OSError as error:
        sys.exit(str(error))
