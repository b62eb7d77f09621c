"""What all node code shares: identity, processes, tasks, ports, disk, and causes of an end."""
