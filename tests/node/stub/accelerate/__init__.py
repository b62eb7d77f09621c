"""A stand-in for accelerate that starts plain processes: agents are tested without torch."""
