"""What a run needs of a machine, by arithmetic on its config: parameters, memory, traffic. No torch, no GPU."""
