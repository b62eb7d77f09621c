"""Print one line with the time and sleep: a rank without torch."""

import os
import time

rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", ""))
print(f"up {rank} {time.time():.6f}", flush=True)
time.sleep(1.0)
