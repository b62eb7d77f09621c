"""Run jobs on several machines without a queue: hosts over ssh, or an allocation's nodes."""
