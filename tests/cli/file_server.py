"""Serve an empty directory by FUSE while a command runs: slow, stuck, or with another clock.

`python file_server.py PLACE DELAY_S AHEAD_S COMMAND…`; a delay of `inf` never answers. Needs the
rights to mount; ends with the status of the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import stat
import struct
import subprocess
import sys
import time

ROOT, FILE = 1, 2  # numbers of the nodes
LOOKUP, FORGET, GETATTR, SETATTR, UNLINK, STATFS, RELEASE = 1, 2, 3, 4, 10, 17, 18
INIT, CREATE, INTERRUPT, FORGETS = 26, 35, 36, 42
ENOENT, ENOSYS = 2, 38
HEADER = struct.Struct("=IIQQIIII")
MOUNT = "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions"


def attributes(node: int, ahead_s: float) -> bytes:
    """Return `struct fuse_attr`."""
    now, nano = divmod(time.time_ns() + int(ahead_s * 1e9), 10**9)
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o600
    times = (now, now, now, nano, nano, nano)
    return struct.pack("=6Q10I", node, 0, 0, *times, mode, 1, 0, 0, 0, 4096, 0)


def answer(code: int, node: int, ahead_s: float) -> bytes | int:
    """Return the answer to a request, or the number of an error."""
    if code == INIT:
        return struct.pack("=4I2H2I2H2I24x", 7, 31, 0, 0, 8, 8, 4096, 1, 0, 0, 0, 0)
    if code in (GETATTR, SETATTR):
        return struct.pack("=QII", 0, 0, 0) + attributes(node, ahead_s)
    if code == CREATE:
        entry = struct.pack("=4Q2I", FILE, 0, 60, 0, 0, 0) + attributes(FILE, ahead_s)
        return entry + struct.pack("=QII", 0, 0, 0)
    if code == STATFS:
        return struct.pack("=5Q4I24x", *[1 << 30] * 5, 4096, 255, 4096, 0)
    if code in (UNLINK, RELEASE):
        return b""
    return ENOENT if code == LOOKUP else ENOSYS


def serve(device: int, delay_s: float, ahead_s: float) -> None:
    """Answer one request."""
    _, code, unique, node, *_ = HEADER.unpack_from(os.read(device, 1 << 17))
    if code in (FORGET, FORGETS, INTERRUPT):
        return
    time.sleep(0 if code == INIT else delay_s)
    found = answer(code, node, ahead_s)
    error, data = (-found, b"") if isinstance(found, int) else (0, found)
    with contextlib.suppress(FileNotFoundError):  # it was not awaited
        os.write(device, struct.pack("=IiQ", 16 + len(data), error, unique) + data)


def main() -> int:
    """Mount, run the command, and serve until it ends."""
    place, delay_s, ahead_s, *command = sys.argv[1:]
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = MOUNT.format(device).encode()
    if libc.mount(b"slow", os.fsencode(place), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    child = subprocess.Popen(command)
    while child.poll() is None:
        if math.isinf(float(delay_s)):
            time.sleep(0.05)
        elif select.select([device], [], [], 0.05)[0]:
            serve(device, float(delay_s), float(ahead_s))
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
