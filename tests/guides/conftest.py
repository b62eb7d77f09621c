"""The fixture of one command line in this process."""

from tests.cli.conftest import _here

__all__ = ["_here"]
