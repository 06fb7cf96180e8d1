"""How values travel: fp32 as they are, or what changed since the committed state, in fewer bytes."""
