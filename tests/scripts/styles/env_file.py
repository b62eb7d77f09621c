"""Read a .env file before torch is imported, as dotenv's load_dotenv() does."""

import os
from pathlib import Path

if Path(".env").exists():
    for line in Path(".env").read_text().splitlines():
        name, _, value = line.partition("=")
        os.environ.setdefault(name, value)

from accelerate import Accelerator
from package import model
from proof import prove

accelerator = Accelerator()
layer, optimizer, data = accelerator.prepare(*model.make())
for batch in data:
    accelerator.backward(layer(batch).square().mean())
    optimizer.step()
greeting = os.environ.get("GREETING")
prove(accelerator.process_index, accelerator.num_processes, layer, f"greeting {greeting}")
