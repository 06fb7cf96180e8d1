"""Who is there and how to reach them: ports, libp2p through hivemind, the same in memory, signed records."""
