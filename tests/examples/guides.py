"""Read an example of a directory of its own: its script's parts, and the commands of its README."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests.readme import BLOCK


def load(path: Path) -> ModuleType:
    """Load a file that imports none of its neighbours; several examples have a train.py."""
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks for its module there
    spec.loader.exec_module(module)
    return module


def commands(example: Path, kind: str) -> list[str]:
    """Return the shell blocks of an example's README that are marked as `kind`."""
    found = BLOCK.findall((example / "README.md").read_text())
    return [text for name, language, text in found if name == kind and language == "bash"]


def script(example: Path, kind: str) -> str:
    """Return them as one script."""
    return "\n".join(commands(example, kind))
