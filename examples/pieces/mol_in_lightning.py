"""MoL in a Lightning module: python examples/pieces/mol_in_lightning.py"""

import lightning
import torch
from torch import Tensor, nn

from logitmix.modules.config import MoLConfig
from logitmix.modules.losses.blockwise import Examples
from logitmix.modules.similarity.mol import MoL


class Retrieval(lightning.LightningModule):
    def __init__(self, users: int, items: int, width: int = 32) -> None:
        super().__init__()
        self.query, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.mol = MoL(width, MoLConfig(query_components=4, item_components=4, component_dim=16, gate_hidden=32))
        self.mol.reset_parameters(torch.Generator().manual_seed(0))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        user, target = batch
        items = torch.arange(self.item.num_embeddings, device=self.device)
        negatives = torch.randint(len(items), (1, 128), device=self.device)
        sides = self.mol.query(self.query(user), user), self.mol.item(self.item(items), items)
        loss = self.mol.sampled_softmax(*sides, Examples(user, target, [0, len(user)], negatives)) / len(user)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


lightning.seed_everything(0, verbose=False)
data = torch.utils.data.TensorDataset(torch.arange(200), torch.randint(500, (200,)))
trainer = lightning.Trainer(
    max_epochs=20, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Retrieval(users=200, items=500), torch.utils.data.DataLoader(data, batch_size=64, shuffle=True))
print(f"loss {trainer.callback_metrics['loss']:.3f}")
