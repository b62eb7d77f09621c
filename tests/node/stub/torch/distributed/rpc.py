"""Ranks that meet by remote calls: enough to be counted."""


def init_rpc(name, backend=None, rank=-1, world_size=None, rpc_backend_options=None):
    print(f"rpc {name}", flush=True)
