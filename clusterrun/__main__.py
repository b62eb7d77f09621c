"""`python -m clusterrun`: the command line without its entry point."""

from __future__ import annotations

import sys

from clusterrun.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
