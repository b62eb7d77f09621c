"""Run the fast tests as another user, or with a newer Python: what CI adds to `make test`.

python -m tests.elsewhere user     as root: they run as nobody
python -m tests.elsewhere newer    with the next Debian's Python, unpacked beside the system's

A copy of what git lists gets an environment of its own. The user's has this one's packages; a newer
Python installs them from the index of packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.checkout import ROOT, copy_listed
from tests.cluster.newer import NewerPython

NOBODY = 65534
# The shell starts the program: setpriv still has the rights of root when it does.
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"),
    *("sh", "-c", 'exec "$0" "$@"'),
)
PIP = ("install", "--quiet", "--disable-pip-version-check", "--constraint", "constraints.txt")
FAST = ("-q", "-n", "4", "--dist", "worksteal", "-p", "no:cacheprovider", "--part", "fast")


def python_of(who: str) -> str:
    """Return the Python to use; another user must reach it."""
    if who == "newer":
        NewerPython.default().install()
        return str(NewerPython.default().programs / "python")
    reached = subprocess.run([*AS_NOBODY, sys.executable, "-c", ""], stderr=subprocess.DEVNULL)
    return "/usr/bin/python3" if reached.returncode else os.path.realpath(sys.executable)


def main(who: str) -> int:
    """Return the exit status of the tests."""
    with tempfile.TemporaryDirectory(prefix="clusterrun-") as place:
        home = copy_listed(ROOT, Path(place) / "clone")
        subprocess.run(["git", "init", "--quiet", str(home)], check=True)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "."]
        if subprocess.run([*fetch, "pip"], cwd=home).returncode:
            print("the index of packages cannot be reached: no test was run", file=sys.stderr)
            return 1 if os.environ.get("CLUSTERRUN_REQUIRE_ALL") else 0
        packages = sysconfig.get_path("purelib")
        can_read = [*AS_NOBODY, "test", "-r", packages]
        is_shared = who == "user" and subprocess.run(can_read).returncode == 0
        become: tuple[str, ...] = ()
        if who == "user":
            become = AS_NOBODY
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", place], check=True)
        kept = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        env = {**kept, "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}
        env |= {"HYPOTHESIS_PROFILE": "same", "USER": "nobody" if become else "root"}

        def do(*argv: str, check: bool = True) -> int:
            return subprocess.run([*become, *argv], cwd=home, env=env, check=check).returncode

        do(python_of(who), "-m", "venv", "--without-pip", ".venv")
        (wheel,) = home.glob("pip-*.whl")
        if is_shared:
            (own,) = home.glob(".venv/lib/python*/site-packages")
            (own / "shared.pth").write_text(packages)
        extra = ["--no-deps", "."] if is_shared else [".[train,examples,dev]"]
        do(".venv/bin/python", f"{wheel}/pip", *PIP, *extra[:-1], "--editable", extra[-1])
        return do(".venv/bin/python", "-m", "pytest", *FAST, check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
