"""`environment: copy`: lock the packages of this interpreter, and have hosts install them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from clusterrun.backends.hosts import build_environment, refusals, start
from clusterrun.backends.hosts.project import find_project, pack, unpack
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.shared import shell
from clusterrun.shared.files import parse_object

BUILD_S: Final = 300.0  # for the wheel of an editable package
_TORCH_TAG: Final = re.compile(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)\Z")
_INDEX: Final = re.compile(r"(?:global|install|:env:)\.((?:extra-)?index-url|find-links)='(.*)'")
# The host's shell finds Python, which reads its program and then the lock.
_START: Final = (
    'p=$(command -v "python%s" || command -v python3) || exit 127; exec "$p" -Ic '
    '"import sys; i = sys.stdin.buffer; exec(i.read(int(i.readline())))"'
)


def lock_environment() -> bytes:
    """Return the lock of this interpreter's environment. Raises ClusterrunError."""
    if Path(sys.prefix, "conda-meta").exists():
        hint = "create it on the hosts, and name it: setup: {conda: NAME}"
        raise UsageError("'environment: copy' cannot copy a conda environment", hint=hint)
    found = {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d for d in _distributions()}
    found.pop("pip", None)  # each environment has its own
    if "clusterrun" not in found:
        hint = "install it with pip into the environment that trains"
        raise UsageError("'environment: copy': clusterrun is not an installed package", hint=hint)
    return lock_of([found[name] for name in sorted(found)])


def lock_of(packages: Sequence[metadata.Distribution]) -> bytes:
    """Return the lock of some packages: JSON that `build_environment` reads."""
    wheels = dict(wheel for package in packages for wheel in _wheels(package))
    lines = [*_indexes(packages), *filter(None, map(_line, packages)), *(f"./{n}" for n in wheels)]
    lock = {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "platform": f"{sys.platform}-{platform.machine()}",
        "packages": len(packages),
    }
    named = json.dumps([lock, lines, [_content(data) for data in wheels.values()]])
    files = {**wheels, "lock.txt": "".join(f"{line}\n" for line in lines).encode()}
    texts = {name: base64.b64encode(data).decode() for name, data in files.items()}
    return json.dumps(
        {**lock, "key": hashlib.sha256(named.encode()).hexdigest(), "files": texts}
    ).encode()


def python_of(lock: bytes) -> str:
    """Return the Python of a lock's environment; `~/` is the home directory of each host."""
    return f"~/.cache/clusterrun/envs/{json.loads(lock)['key']}/bin/python"


def ensure_environment(
    host: str, argv: Sequence[str], lock: bytes, tell: Callable[[str], None], *, first: str = ""
) -> None:
    """Build a lock's environment on a host, unless it exists there.

    `argv` starts a shell on the host that reads its script; it runs on `first` ("" on that host).
    Raises ClusterrunError.
    """
    with tempfile.NamedTemporaryFile() as errors:
        answer, code = _ask(argv, errors.fileno(), lock, lambda note: tell(f"{host}: {note}"))
        said = Path(errors.name).read_text(errors="replace")
    if "error" in answer:
        raise ClusterrunError(f"{host}: {answer['error']}", hint=answer["hint"])
    if not answer:
        raise refusals.between(first, host, code, said)


def _ask(
    argv: Sequence[str], errors: int, lock: bytes, tell: Callable[[str], None]
) -> tuple[dict[str, Any], int]:
    """Run the builder, report its notes, and return its answer and exit status."""
    program = start.for_shell(_START % json.loads(lock)["python"])
    code = Path(build_environment.__file__).read_bytes()
    answer: dict[str, Any] = {}
    with subprocess.Popen(argv, stdin=-1, stdout=-1, stderr=errors, start_new_session=True) as ran:
        assert ran.stdin
        assert ran.stdout
        with contextlib.suppress(BrokenPipeError):
            ran.stdin.write(program + b"".join(b"%d\n%b" % (len(d), d) for d in (code, lock)))
            ran.stdin.flush()
            start.skip_greeting(ran.stdout)
            for line in ran.stdout:
                answer = parse_object(line) or {}
                if "note" not in answer:
                    break
                tell(answer["note"])
    # leaving closes stdin, which ends what still runs there
    return ({} if "note" in answer else answer), ran.returncode


def _distributions() -> Iterator[metadata.Distribution]:
    """Return the installed packages; of two with one name, the one that is imported is last."""
    return reversed([dist for dist in metadata.distributions() if dist.metadata["Name"]])


def _origin(package: metadata.Distribution) -> dict[str, Any]:
    """Return where a package came from, if not from an index."""
    return parse_object(package.read_text("direct_url.json") or "") or {}


def _line(package: metadata.Distribution) -> str:
    """Return a package's line of the lock; "" for one that is sent."""
    name, origin = package.metadata["Name"], _origin(package)
    url = origin.get("url", "")
    if not url:
        return f"{name}=={package.version}"
    if url.startswith("file:"):
        return ""
    _check_url(url, f"the origin of {name}")
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    below = origin.get("subdirectory")
    return f"{name} @ {url}" + (f"#subdirectory={below}" if below else "")


def _check_url(url: str, what: str) -> None:
    if (parts := urlsplit(url)).password or (parts.username and parts.scheme != "ssh"):
        raise UsageError(
            f"{what} has a password or token in its URL, which is not copied to the hosts",
            hint="put it into ~/.netrc here and on the hosts, and remove it from the URL",
        )


def _indexes(packages: Sequence[metadata.Distribution]) -> Iterator[str]:
    """Yield options for the package indexes that hosts can also reach."""
    done = shell.run_once([sys.executable, "-m", "pip", "config", "list"], shell.TIMEOUT_S)
    for option, values in _INDEX.findall(done.stdout):
        for url in re.split(r"\\n|\s+", values):
            _check_url(url, f"pip's {option}")
            if url.startswith(("https:", "http:")):
                yield f"--{option} {url}"
    # torch's own index, of which pip keeps no record
    for tag in sorted({found[1] for p in packages if (found := _TORCH_TAG.search(p.version))}):
        yield f"--extra-index-url https://download.pytorch.org/whl/{tag}"


# Packages that no index has


def _wheels(package: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Yield the wheel of a package that was installed from this machine."""
    origin = _origin(package)
    if origin.get("url", "").startswith("file:"):
        is_editable = origin.get("dir_info", {}).get("editable")
        yield _built(package, urlsplit(origin["url"]).path) if is_editable else _repacked(package)


def _repacked(package: metadata.Distribution) -> tuple[str, bytes]:
    """Make a wheel of the installed files: exactly what this interpreter imports."""
    tags = re.findall(r"(?m)^Tag: *(\S+)", package.read_text("WHEEL") or "")
    files = {
        str(file): file for file in package.files or () if not str(file).startswith(("..", "/"))
    }
    kept = [n for n in sorted(files) if not re.search(r"\.pyc$|\.dist-info/(RECORD|direct_url)", n)]
    record = next((name for name in files if name.endswith(".dist-info/RECORD")), "")
    if not tags or not record:
        raise _not_built(package, "its installation has no list of its files")
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as wheel:
        for name in kept:
            wheel.write(str(files[name].locate()), name)
        wheel.writestr(record, "".join(f"{name},,\n" for name in (*kept, record)))
    return f"{record.partition('.dist-info')[0]}-{tags[-1]}.whl", stream.getvalue()


def _built(package: metadata.Distribution, source: str) -> tuple[str, bytes]:
    """Build the wheel of an editable package, in a copy of its directory."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as packed:
        pack(find_project(Path(source)), packed)
        packed.seek(0)
        unpack(packed, copy := Path(directory, "copy"))
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", directory, str(copy)]
        for argv in (
            [*pip, "--no-build-isolation"],
            pip,
            ["uv", "build", "-o", directory, str(copy)],
        ):
            if argv[0] == "uv" and not shell.find("uv"):
                break
            done = shell.run_once(argv, BUILD_S)
            for wheel in Path(directory).glob("*.whl"):
                return wheel.name, wheel.read_bytes()
    raise _not_built(package, (done.stderr.strip().splitlines() or [""])[-1])


def _not_built(package: metadata.Distribution, cause: str) -> ClusterrunError:
    name = package.metadata["Name"]
    hint = f"install {name} from an index or from git, so that the hosts can install it"
    return ClusterrunError(f"cannot make a wheel of {name}", cause=cause, hint=hint)


def _content(wheel: bytes) -> list[tuple[str, int]]:
    """Return what identifies a wheel: its files, not their times."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        return sorted((info.filename, info.CRC) for info in archive.infolist())
