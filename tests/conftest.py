"""What all tests share: the environment's own programs come first, as in an activated one.

Another ninja on the machine would build DeepSpeed's extensions anew each time that it takes turns
with the environment's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
