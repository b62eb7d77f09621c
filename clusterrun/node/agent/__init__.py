"""The node agent: from the meeting of the nodes to the last process."""
