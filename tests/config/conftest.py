"""A project, a user and a site of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clusterrun.config.load import load_spec
from clusterrun.config.settings import Resolved


@dataclass
class Workplace:
    """Directories of files that loading reads, and an environment that leads to them."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def project(self) -> Path:
        return self.root / "home" / "project"

    def write(self, path: str, text: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return target

    def write_project(self, text: str) -> Path:
        return self.write("home/project/clusterrun.yaml", text)

    def write_user(self, text: str) -> Path:
        return self.write("home/.config/clusterrun/config.yaml", text)

    def write_site(self, text: str) -> Path:
        return self.write("site.yaml", text)

    def load(self, flags: dict[str, Any] | None = None, **rest: Any) -> Resolved:
        rest.setdefault("cwd", self.project)
        return load_spec(flags or {}, environ=self.environ, **rest)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    place = Workplace(root=tmp_path)
    place.project.mkdir(parents=True)
    place.write_site("")
    place.environ = {
        "HOME": str(tmp_path / "home"),
        "CLUSTERRUN_SITE_CONFIG": str(tmp_path / "site.yaml"),
    }
    return place


@pytest.fixture
def loaded(workplace: Workplace) -> Callable[[str], Resolved]:
    """Load a project whose clusterrun.yaml holds this text."""

    def load(text: str) -> Resolved:
        workplace.write_project(text)
        return workplace.load()

    return load
