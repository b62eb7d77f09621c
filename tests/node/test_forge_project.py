"""A script and the modules of its project, as the forge reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterrun.node.forge import fitness, preload
from clusterrun.node.forge.project import ProjectFiles
from clusterrun.node.forge.writes import Changes


@pytest.fixture(name="project")
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project whose script imports a module and a package of its own."""
    packages = tmp_path / "lib" / "site-packages"
    for name in ("alpha", "beta", "gamma", "delta", "unused"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text("")
    (tmp_path / "editable").mkdir()
    (tmp_path / "editable" / "mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "editable"))
    monkeypatch.syspath_prepend(str(packages))
    project = tmp_path / "project"
    (project / "model").mkdir(parents=True)
    (project / "helpers.py").write_text("import beta.part as b\nimport train\n")
    (project / "model" / "__init__.py").write_text("from .layers import Layer\n")
    (project / "model" / "layers.py").write_text("from gamma import *\nfrom . import extra\n")
    (project / "model" / "extra.py").write_text("import delta\n")
    return project


def test_installed_modules_are_found_in_the_order_of_the_script(project: Path) -> None:
    script = project / "train.py"
    script.write_text(
        "import os, json\nfrom alpha import Trainer, tools\nimport mine, missing, helpers\n"
        "from model.layers import Layer\nimport alpha\n"
        "def later():\n    import unused\nif os.environ:\n    import unused\n"
    )
    expected = ["alpha", "alpha.Trainer", "alpha.tools", "beta.part", "gamma", "delta"]
    assert ProjectFiles([str(script), "--lr", "1"]).installed == expected


def test_a_script_that_cannot_be_read_imports_nothing(project: Path) -> None:
    (project / "train.py").write_text("import alpha\nnot = 1\n")
    assert ProjectFiles([str(project / "train.py")]).installed == []
    assert ProjectFiles(["-m", "no_such_module"]).installed == []
    assert ProjectFiles([str(project / "none.py")]).installed == []


@pytest.mark.parametrize("entry", [["-m", "model.run"], ["-m", "model"], ["model"]])
def test_a_module_or_a_directory_is_read_as_a_script_is(
    project: Path, monkeypatch: pytest.MonkeyPatch, entry: list[str]
) -> None:
    monkeypatch.chdir(project)
    for name in ("run.py", "__main__.py"):
        (project / "model" / name).write_text("import settings\nfrom .layers import Layer\n")
    for place in (project, project / "model"):
        (place / "settings.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '3'\n")
    found = ProjectFiles(entry)
    assert Changes(found).names == {"OMP_NUM_THREADS"}
    assert entry == ["model"] or found.installed == ["gamma", "delta"]


def test_deepspeed_is_imported_for_a_script_that_imports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preload.importlib.util, "find_spec", lambda name: name == "deepspeed")
    assert preload.of_ranks("ddp", ["alpha", "deepspeed"]) == ("deepspeed",)
    assert preload.of_ranks("ddp", ["alpha"]) == ()


def test_a_package_loads_what_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = tmp_path / "lazy_package"
    lazy.mkdir()
    (lazy / "__init__.py").write_text(
        "loaded = []\ndef __getattr__(name):\n"
        "    if name != 'Heavy':\n        raise AttributeError(name)\n"
        "    loaded.append(name)\n    return name\n"
    )
    (lazy / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fitness, "threads", lambda: 1)  # this process has those of the tests
    names = ["lazy_package.Heavy", "lazy_package.part", "lazy_package.missing"]
    with pytest.raises(fitness.Closed, match=r"cannot import lazy_package\.missing: Module"):
        preload.preload(names, lambda _: None)
    import lazy_package  # type: ignore[import-not-found]

    assert lazy_package.loaded == ["Heavy"]
    assert lazy_package.part
