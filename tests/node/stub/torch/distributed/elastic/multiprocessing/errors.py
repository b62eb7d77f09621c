from dataclasses import dataclass


@dataclass
class ProcessFailure:
    local_rank: int
    pid: int
    exitcode: int
    error_file: str


class ChildFailedError(Exception):
    def __init__(self, name, failures):
        super().__init__(f"{name}: {failures}")
        self.failures = failures
