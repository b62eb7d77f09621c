"""Lightning's Trainer as its documentation shows it; its bar is rich's, which no file shows."""

import sys
import time

import lightning as L
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from proof import STEPS, prove


class Model(L.LightningModule):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        """Return the loss."""
        time.sleep(0.02)
        return self.layer(batch).square().mean()

    def validation_step(self, batch, _):
        """Log the loss."""
        self.log("val", self.layer(batch).square().mean(), sync_dist=True)

    def on_train_end(self):
        """Prove the world while the model is still in DDP."""
        prove(self.global_rank, self.trainer.world_size, self.trainer.strategy.model)

    def configure_optimizers(self):
        """Take SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(size):
    """Return random batches."""
    return torch.utils.data.DataLoader(torch.randn(size, 8), batch_size=4)


devices, nodes, *slurm = [int(word) for word in sys.argv[1:]] or [2, 1]
plugins = [SLURMEnvironment(auto_requeue=bool(requeues)) for requeues in slurm]
how = {"devices": devices, "num_nodes": nodes, "plugins": plugins, "max_epochs": 2}
how["strategy"] = "ddp" if devices * nodes > 1 else "auto"
L.Trainer(accelerator="cpu", **how).fit(Model(), loader(4 * STEPS), loader(160))
