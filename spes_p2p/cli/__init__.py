"""The `spes-p2p` program: one module a command, with its flags and what it shows."""
