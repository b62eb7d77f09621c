"""A loop with accelerate and one progress bar for all steps, as in its examples."""

import time

import torch
from accelerate import Accelerator
from proof import STEPS, prove
from tqdm.auto import tqdm

accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(4 * STEPS, 8), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
bar = tqdm(range(2 * len(loader)), disable=not accelerator.is_local_main_process)
for _ in range(2):
    for batch in loader:
        time.sleep(0.02)
        accelerator.backward(model(batch.to(next(model.parameters()).dtype)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        bar.update(1)
prove(accelerator.process_index, accelerator.num_processes, model)
accelerator.end_training()
