"""What all rooms of a node share: identity, processes, tasks, ports, disk, and causes of an end."""
