"""The committed state: the same bits at every peer, on disk, by round; layout, versions, stagings, hashes."""
