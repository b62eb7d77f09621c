"""Lightning's Trainer as its documentation shows it; its bar is rich's, which no file shows."""

import time

import lightning as L
import torch


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

    def configure_optimizers(self):
        """Take SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(size):
    """Return random batches."""
    return torch.utils.data.DataLoader(torch.randn(size, 8), batch_size=4)


trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2)
trainer.fit(Model(), loader(80_000), loader(160))
