"""The link between the agents of one attempt."""
