"""The embedded first run: a swarm of real processes on this machine, shown step by step."""
