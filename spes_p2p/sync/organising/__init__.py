"""The bootstrap node: genesis, following the run, the archive, and naming members where nobody is left."""
