"""For tests and for trying out runs: swarms of processes and in memory, simulator, virtual clock."""
