"""MoL and its fused sampled softmax in a plain torch loop: python examples/pieces/mol_in_torch.py"""

import torch
from torch import nn

from logitmix.modules.config import MoLConfig
from logitmix.modules.losses.blockwise import Examples
from logitmix.modules.similarity.mol import MoL

generator = torch.Generator().manual_seed(0)
users, items, width, batch = 200, 500, 32, 64
next_item = torch.randint(items, (users,), generator=generator)  # what each user does next
query, item = nn.Embedding(users, width), nn.Embedding(items, width)  # your own encoders
mol = MoL(width, MoLConfig(query_components=4, item_components=4, component_dim=16, gate_hidden=32))
mol.reset_parameters(generator)
optimizer = torch.optim.Adam([*query.parameters(), *item.parameters(), *mol.parameters()], lr=0.01)

for step in range(61):
    user = torch.randperm(users, generator=generator)[:batch]
    negatives = torch.randint(items, (1, 128), generator=generator)  # one set for the whole batch
    examples = Examples(row_T=user, target_T=next_item[user], bounds=[0, batch], negatives_GN=negatives)
    sides = mol.query(query(user), user), mol.item(item.weight, torch.arange(items))
    loss = mol.sampled_softmax(*sides, examples) / batch
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
