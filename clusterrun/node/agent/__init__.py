"""The node agent: from the first word between the nodes to the last process."""
