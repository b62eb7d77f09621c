"""Train until asked to save and leave, and a little more in the next attempt.

With the name of a file it asks only once, and trains until the file is there.
"""

import sys
import time
from pathlib import Path

from clusterrun import runtime

until = Path(sys.argv[1]) if len(sys.argv) > 1 else None
here = runtime.info()
assert here
saves = runtime.Checkpoints()
newest = None if until else saves.newest()
step = newest.step if newest else 0
last = step + 5 if here.attempt > 1 else sys.maxsize
runtime.should_checkpoint()  # from here on SIGTERM is left to the agent
print(f"attempt {here.attempt} begins at step {step}", flush=True)
while step < last and not (until and until.exists()):
    time.sleep(0.1)
    step += 1
    if until is None and runtime.should_checkpoint():
        saves.save(step, lambda directory: (directory / "weights").write_text("none"))
        if runtime.should_stop():
            break
