"""A process group that is a directory: enough to be counted, asked and destroyed."""

import os
import socket
import time
from pathlib import Path

__all__ = [
    "TCPStore",
    "destroy_process_group",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_available",
    "is_initialized",
]

_group = {}


def is_available():
    return True


class _Store:
    def __init__(self, root):
        self.root = Path(root)

    def set(self, key, value):
        path = self.root / key.replace("/", "_")
        path.with_suffix(".tmp").write_text(value)
        path.with_suffix(".tmp").rename(path)

    def wait(self, keys, timeout):
        deadline = time.monotonic() + timeout.total_seconds()
        while not all((self.root / key.replace("/", "_")).exists() for key in keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"wait timeout for {keys}")
            time.sleep(0.01)

    def has_extended_api(self):
        return True

    def multi_get(self, keys):
        return [(self.root / key.replace("/", "_")).read_bytes() for key in keys]


def TCPStore(host, port, size, is_master, timeout, **kwargs):
    assert is_master
    return socket.create_server(("", port))


def init_process_group(
    backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None
):
    _group["size"] = int(os.environ.get("STUB_GROUP", os.environ["WORLD_SIZE"]))
    _group["rank"] = int(os.environ["RANK"])
    _group["timeout"] = timeout
    _group["backend"] = backend or "gloo"
    print(f"init backend={backend} timeout={timeout}", flush=True)


def get_world_size():
    return _group["size"]


def get_rank():
    return _group["rank"]


def get_backend():
    return _group["backend"]


def is_initialized():
    return bool(_group)


def destroy_process_group():
    _group.clear()
    print("destroyed", flush=True)


def _get_default_store():
    return _Store(os.environ["STUB_STORE"])


def _get_default_group():
    return _group
