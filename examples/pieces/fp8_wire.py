"""The FP8 wire in your own TorchRec model: torchrun --nproc-per-node 2 examples/pieces/fp8_wire.py"""

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from logitmix.comm.config import WireConfig
from logitmix.comm.hooks import attach

dist.init_process_group("gloo")
rank = dist.get_rank()
tables = [EmbeddingBagConfig(num_embeddings=100, embedding_dim=64, name=n, feature_names=[n]) for n in ("user", "item")]
bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
sharder = EmbeddingBagCollectionSharder()
plan = construct_module_sharding_plan(
    bags,
    {name: table_wise(owner, compute_kernel="fused") for owner, name in enumerate(("user", "item"))},
    sharder,
    local_size=2,
    world_size=2,
    device_type="cpu",
)
model = DistributedModelParallel(
    bags, device=torch.device("cpu"), plan=ShardingPlan({"": plan}), sharders=[sharder], init_data_parallel=False
)

wire = attach(model, WireConfig())  # the only line that is ours: E4M3 forward, E5M2 backward

batch = KeyedJaggedTensor.from_lengths_sync(
    keys=["user", "item"], values=torch.arange(6) + 10 * rank, lengths=torch.tensor([1, 2, 1, 2])
)
embeddings = model(batch).values()  # 2 examples, 64 numbers of each table
embeddings.square().sum().backward()
sent = wire.pop_counts()  # [tables, directions, (bytes, FP32 bytes, …)], of what this rank sent
dist.all_reduce(sent)
if rank == 0:
    print(f"embeddings {list(embeddings.shape)}")
    for table, (forward, backward) in zip(wire.tables, sent.tolist(), strict=True):
        print(
            f"{table}: {forward[0]:.0f} of {forward[1]:.0f} bytes forward, {backward[0]:.0f} of {backward[1]:.0f} back"
        )
dist.destroy_process_group()
