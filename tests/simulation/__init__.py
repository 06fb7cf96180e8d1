"""Swarms in memory and as symbols, faults at named steps, virtual time: what tests and scripts break runs with."""
