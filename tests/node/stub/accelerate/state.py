"""A Borg like accelerate's, alone in the world unless the environment says that it is on a CPU."""

import os


class PartialState:
    _shared_state = {}  # noqa: RUF012 - as accelerate has it

    def __init__(self, cpu=False, **kwargs):
        self.__dict__ = self._shared_state
        if self._shared_state:
            return
        self.given, self.local_rank = (cpu, kwargs), os.environ.get("LOCAL_RANK")
        self.num_processes = 1
        if cpu or "backend" in kwargs:
            import torch.distributed

            torch.distributed.init_process_group(**kwargs)
            self.num_processes = torch.distributed.get_world_size()
