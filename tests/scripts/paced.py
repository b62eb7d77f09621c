"""Take steps whose time grows with the world, and report them; needs no torch."""

import os
import sys
import time

from clusterrun import runtime

ranks = int(os.environ["WORLD_SIZE"])
steps = int(sys.argv[1])
if len(sys.argv) > 2 and int(sys.argv[2]) == ranks:
    sys.exit(f"a world of {ranks} ranks fails here")
for step in range(1, steps + 1):
    time.sleep(0.15 + 0.05 * ranks)
    runtime.step(step, steps)
