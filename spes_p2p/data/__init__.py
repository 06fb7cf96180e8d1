"""Text to token shards, shards to batches: tokenizing, the order of training, leases, loaders."""
