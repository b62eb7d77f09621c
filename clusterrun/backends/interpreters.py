"""Inspect the interpreter that a job will use: its version and its packages.

An interpreter is executed only if the user named it: an untrusted project may name any program.
Otherwise the files of its environment are read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from clusterrun.config.environments import Tool, read_step
from clusterrun.config.settings import Resolved
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ClusterrunError
from clusterrun.launch.facts import Interpreter
from clusterrun.shared import shell
from clusterrun.shared.files import MOST_BYTES, end_of
from clusterrun.shared.installed import metadata_of, own_version, versions_in

PACKAGES: Final = ("clusterrun", "torch", "accelerate", "deepspeed")
ANSWER_S: Final = 20.0

# Imports come after the first line: a json.py in the working directory must not run.
_ASK: Final = """
import sys; sys.path[:] = filter(None, sys.path)
import json, os
path = [p for p in sys.path if os.path.isdir(p)]
print(json.dumps({"version": sys.version_info[:2], "path": path}))
"""
_CLASSES: Final = ("BaseConfig", "ClusterConfig")  # of accelerate: the fields are the keys
_IMPORT: Final = ("import ", "import\t")  # what site.py executes in a .pth file
# Lines of this kind that every environment may have; they hide no package.
_KNOWN_PTH: Final = r"distutils-precedence|_virtualenv|__editable__.*|.*-nspkg"


def path_of(python: str, spec: JobSpec, environ: Mapping[str, str]) -> str:
    """Return the path of an interpreter; "" if only the nodes know it."""
    if "/" not in python and not spec.setup:
        python = shell.find(python) or ""
    elif python == "python":
        # Setup lines may change PATH: what they find is known only for an environment of conda.
        python = _conda_python(spec, environ)
    # Only the nodes know what a bare name finds.
    return python if "/" in python and os.access(python, os.X_OK) else ""


def may_run(resolved: Resolved) -> bool:
    """Return whether the user, not a file of a project, chose the interpreter."""
    spec = resolved.spec
    deciding = ["launch.python"] if spec.python else []
    if spec.setup and "/" not in (spec.python or ""):  # the setup lines find it
        deciding.append("launch.setup")
    return all(resolved.origins[key].is_of_user for key in deciding)  # if none decides, it is ours


def inspect(path: str, *, may_run: bool, environ: Mapping[str, str]) -> Interpreter:
    """Return what is known about an interpreter; run it to find out if it `may_run`."""
    if path == sys.executable:
        own = {name: own_version(name) for name in PACKAGES}
        return Interpreter(path, sys.version_info[:2], own, is_known=True, places=(*sys.path,))
    if path and may_run and (answer := _ask(path)) is not None:
        return answer
    return _read(Path(path), environ) if path else Interpreter()  # "": only the nodes know it


def accelerate_keys(interpreter: Interpreter) -> frozenset[str]:
    """Return the keys that accelerate's source accepts in its YAML; empty if it is not found."""
    import ast  # only for a job with such a file

    for place in interpreter.places:
        file = Path(place, "accelerate/commands/config/config_args.py")
        with contextlib.suppress(OSError, ValueError, SyntaxError):
            body = ast.parse(file.read_text(encoding="utf-8")).body
            classes = [n for n in body if isinstance(n, ast.ClassDef) and n.name in _CLASSES]
            nodes = [node for each in classes for node in ast.walk(each)]
            # The classes' fields are keys. The code tests for older keys: "fp16" in config.
            fields = {ast.unparse(n.target) for n in nodes if isinstance(n, ast.AnnAssign)}
            compared = [n.left for n in nodes if isinstance(n, ast.Compare)]
            old_keys = {str(n.value) for n in compared if isinstance(n, ast.Constant)}
            has_known_form = "distributed_type" in fields
            return frozenset(fields | old_keys) if has_known_form else frozenset()
    return frozenset()


@functools.cache
def oldest() -> dict[str, tuple[int, int]]:
    """Return the oldest versions of Python and packages that clusterrun's metadata allows."""
    # `Requires-Python: >=3.10` gets the form of `Requires-Dist: torch>=2.2`.
    text = metadata_of("clusterrun").replace("Requires-Python: ", "Requires-Dist: python")
    found = re.finditer(r"^Requires-Dist: (\w+).*>=([0-9]+)\.([0-9]+)", text, re.MULTILINE)
    return {match[1]: (int(match[2]), int(match[3])) for match in found}


# Query the interpreter


def _ask(path: str) -> Interpreter | None:
    """Run an interpreter to get its version and packages; None if it does not answer."""
    try:
        done = shell.run([path, "-c", _ASK], timeout_s=ANSWER_S, tries=1)
        answer = json.loads(done.stdout)
        major, minor = answer["version"]
        places = tuple(answer["path"])
        packages = versions_in(places, PACKAGES)
    except (ClusterrunError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return Interpreter(path, (major, minor), packages, is_known=True, places=places)


# Read its files


def _read(python: Path, environ: Mapping[str, str]) -> Interpreter:
    """Read the packages of an environment from its files; `is_known` if these surely are all."""
    root = python.parent.parent
    site_packages = sorted(root.glob("lib/python3*/site-packages"))
    minors = [re.fullmatch(r"python3\.([0-9]+)", path.parent.name) for path in site_packages]
    version = (3, int(minors[0][1])) if len(minors) == 1 and minors[0] else None
    python_path = [Path(name) for name in environ.get("PYTHONPATH", "").split(":") if name]
    is_conda = (root / "conda-meta").is_dir()
    if version and is_conda:  # conda also uses the user's packages
        home = Path(os.path.expanduser("~/.local/lib"))
        site_packages.insert(0, home / f"python3.{version[1]}" / "site-packages")
    pth = [file for directory in site_packages for file in directory.glob("*.pth")]
    lines = [(file, line) for file in pth for line in _text_of(file).splitlines()]
    from_pth = [
        file.parent / line.strip()  # such as those of editable installations
        for file, line in lines
        if line.strip() and not line.startswith(("#", *_IMPORT))
    ]
    places = tuple(map(str, [*python_path, *site_packages, *from_pth]))  # in the order of sys.path
    runs_code = _runs_code(root, site_packages, lines)
    settings = root / "pyvenv.cfg"
    shares = re.search(r"(?im)^include-system-site-packages\s*=\s*true", _text_of(settings))
    is_isolated = is_conda or (settings.exists() and not shares)
    is_known = version is not None and is_isolated and not runs_code
    return Interpreter(str(python), version, versions_in(places, PACKAGES), is_known, places)


def _runs_code(root: Path, site_packages: list[Path], pth_lines: list[tuple[Path, str]]) -> bool:
    """Return whether activation, Python's start or a .pth file runs code that may add packages."""
    return (
        any(root.glob("etc/conda/activate.d/*"))
        or os.path.exists(root / "conda-meta/state")  # variables that the activation sets
        or "PYTHONPATH" in _text_of(root / "bin/activate")
        or any((directory / "sitecustomize.py").exists() for directory in site_packages)
        or any(
            line.startswith(_IMPORT) and not re.fullmatch(_KNOWN_PTH, file.stem)
            for file, line in pth_lines
        )
    )


def _text_of(file: Path) -> str:
    return end_of(file, MOST_BYTES).decode("utf-8", "replace")


def _conda_python(spec: JobSpec, environ: Mapping[str, str]) -> str:
    """Return the interpreter of the conda environment that setup activates last; "" if unsure."""
    steps = [step for step in map(read_step, spec.setup) if step.tool in (Tool.CONDA, Tool.VENV)]
    if not steps or steps[-1].tool is not Tool.CONDA:
        return ""
    name = steps[-1].names[0]
    places = [Path(name)] if "/" in name else [place / name for place in _conda_places(environ)]
    found = {str(place / "bin/python") for place in places if (place / "bin/python").exists()}
    return found.pop() if len(found) == 1 else ""


def _conda_places(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the directories in which the setup lines look for conda environments."""
    for variable in ("CONDA_ENVS_PATH", "CONDA_ENVS_DIRS"):
        yield from map(Path, filter(None, environ.get(variable, "").split(":")))
    if conda := environ.get("CONDA_EXE") or shell.find("conda"):
        yield Path(conda).parent.parent / "envs"
    home = Path(os.path.expanduser("~"))
    names = ("miniforge3", "miniconda3", "mambaforge", "anaconda3", ".conda")
    yield from (home / name / "envs" for name in names)
    yield Path("/opt/conda/envs")
