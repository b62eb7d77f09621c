"""Figures to hold estimates against; golden.json says of each table what it is and whose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TABLES: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())
