"""Start the ranks of one node as torch's launcher does: own sessions, SIGTERM for the rest."""

import argparse
import os
import signal
import subprocess
import sys
import time

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def launch_command_parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config_file")
    parser.add_argument("--num_machines", type=int)
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--machine_rank", type=int)
    for name in ("log_dir", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf"):
        parser.add_argument(f"--{name}")
    for name in ("max_restarts", "gpu_ids", "mixed_precision"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--monitor_interval", type=float)
    parser.add_argument("--no_python", action="store_true")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


def launch_command(args):
    if os.environ.get("STUB_REFUSES"):
        print("the stub does not like this configuration", file=sys.stderr)
        raise SystemExit(7)
    signal.signal(signal.SIGTERM, _on_signal)
    local = int(os.environ.get("STUB_RANKS", args.num_processes // args.num_machines))
    first = args.machine_rank * (args.num_processes // args.num_machines)
    world = int(os.environ.get("STUB_WORLD", args.num_processes))
    ranks = {}
    try:
        for number in range(local):
            env = {
                **os.environ,
                "RANK": str(first + number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(local),
                "MASTER_ADDR": args.main_process_ip,
                "MASTER_PORT": args.main_process_port,
                "TORCHELASTIC_USE_AGENT_STORE": os.environ.get("STUB_AGENT_STORE", "False"),
                "TORCHELASTIC_ERROR_FILE": f"{args.log_dir}.{number}.json",
            }
            ranks[number] = subprocess.Popen(args.rest, env=env, start_new_session=True)
        _wait(ranks, first, args.monitor_interval)
    finally:
        _end(ranks)


def _wait(ranks, first, monitor_s):
    looked = time.monotonic()
    while any(rank.poll() is None for rank in ranks.values()):
        time.sleep(0.05)
        if time.monotonic() - looked >= monitor_s:
            looked = time.monotonic()
            if any(rank.poll() for rank in ranks.values()):
                break
    _end(ranks)
    failures = {
        first + n: ProcessFailure(n, r.pid, r.returncode, "") for n, r in ranks.items() if r.poll()
    }
    if failures:
        raise ChildFailedError("stub", failures)


def _end(ranks):
    for rank in ranks.values():
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks.values():
        rank.wait()


def _on_signal(number, frame):
    raise SignalException(f"got signal {number}")
