"""Say who is where, joining no world; needs no torch."""

import os
import socket
import sys

rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"rank {rank}/{ranks} on {socket.gethostname()} args {sys.argv[1:]}", flush=True)
print(f"threads {os.environ['OMP_NUM_THREADS']}", flush=True)
