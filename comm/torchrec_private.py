"""Private names of TorchRec, and of torch beneath it, that logitmix uses: what to read again before either is updated.

Read in torchrec 1.6.1 (torch 2.11) and 1.8.0 (torch 2.13). A test compares the list with the code, and with what is
installed.
"""

NAMES = {
    # Of which shardings a sharded collection consists, and how their rows are divided among ranks and hosts.
    "torchrec.distributed.embedding": (
        "_embedding_configs",
        "_lookups",
        "_output_dists",
        "_sharding_type_to_sharding",
        "_awaitables_per_sharding",
    ),
    "torchrec.distributed.embeddingbag": (
        "_embedding_bag_configs",
        "_embedding_shardings",
        "_optimizer_classes",
        "_optimizer_kwargs",
    ),
    "torchrec.distributed.sharding.tw_sharding": (
        "_pg",
        "_rank",
        "_dist",
        "_variable_dist",
        "_grouped_embedding_configs_per_rank",
    ),
    "torchrec.distributed.sharding.twrw_sharding": (
        "_intra_pg",
        "_cross_pg",
        "_intra_dist",
        "_cross_dist",
        "_variable_intra_dist",
        "_variable_cross_dist",
        "_grouped_embedding_configs_per_node",
    ),
    # The groups of the ranks of a host.
    "torchrec.distributed.comm": ("_INTRA_PG", "_CROSS_PG"),
    "torchrec.distributed.sharding_plan": ("_get_parameter_sharding",),
    # The collectives that exchanges replace.
    "torchrec.distributed.dist_data": ("_callbacks",),
    # What updates rows in the backward of a lookup.
    "torchrec.distributed.batched_embedding_kernel": ("_feature_table_map",),
    "torch.distributed._shard.sharded_tensor.api": (
        "_init_from_local_shards_and_global_metadata",
        "_process_group",
    ),
    # Where a module has its weights.
    "torch.nn.modules.module": ("_parameters",),
    # The time limits of collectives, and how many a rank has begun.
    "torch.distributed.distributed_c10d": (
        "_get_backend",
        "_set_default_timeout",
        "_get_sequence_number_for_group",
    ),
    # DDP's buckets, rebuilt before the first step.
    "torch.nn.parallel.distributed": ("_push_all_rebuilt_params", "_rebuild_buckets"),
}
"""The names by a module whose code has them."""
