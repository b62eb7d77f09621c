"""Which files of a project are copied to hosts, and that they arrive whole or not at all."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import pytest

from clusterrun.backends.hosts import project as module
from clusterrun.backends.hosts.crew import Link, Pipe
from clusterrun.backends.hosts.project import Project, check_paths, find_project, pack, unpack
from clusterrun.errors import ClusterrunError, UsageError


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "init.defaultBranch=main", *words], cwd=root, check=True)


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def packed(root: Path) -> io.BytesIO:
    with pack(find_project(root)) as stream:
        return io.BytesIO(stream.read())


def test_without_git_all_files_but_those_that_are_no_source(root: Path) -> None:
    write(root, "a.py", "lib/b.py", "runs/x/job.json", "env/pyvenv.cfg", "env/lib/c.py", ".env")
    write(root, "out/step-1/.complete", "out/step-1/model.pt", "lib/__pycache__/b.pyc")
    os.mkfifo(root / "pipe")
    found = find_project(root, leave_out=[root / "runs"])
    assert found.names == ("a.py", "lib/b.py")
    assert found.notes == (".env is not copied: it may hold a secret",)


def test_with_git_what_it_tracks_and_does_not_ignore(root: Path) -> None:
    write(root, "a.py", "gone.py", "sub/b.py", "data/x.bin", "new.py", "key.pem", "old.pem")
    write(root, "clone/c.py", "clone/d.tmp", "env/pyvenv.cfg", "env/c.py")
    (root / ".gitignore").write_text("data/\n*.tmp\n")
    for place, names in (
        (root, ("a.py", "gone.py", "sub", "old.pem")),
        (root / "clone", ("c.py",)),
    ):
        git(place, "init", "-q")
        git(place, "add", *names)
    (root / "gone.py").unlink()
    found = find_project(root)
    names = (".gitignore", "a.py", "clone/c.py", "clone/d.tmp", "new.py", "old.pem", "sub/b.py")
    assert found.names == names
    assert found.notes == ("key.pem is not copied: it may hold a secret",)
    assert find_project(root / "sub").names == ("b.py",)


CREDENTIALS = """
.env.production .envrc prod.env .ENV .aws/credentials .kube/config .docker/config.json kaggle.json
service-account.json client_secret.json .huggingface/token .pgpass .my.cnf .netrc .htpasswd .s3cfg
.config/gcloud/application_default_credentials.json terraform.tfstate key.PEM secrets.yaml
secret.json deploy_key a.pfx a.jks a.kdbx .gnupg/secring.gpg ID_RSA wandb_api_key hf_token.txt
conf/found.yaml conf/Pass.json .env_prod .Kube/Config
"""
PLAIN = """
.env.example id_ed25519.pub train.py token.py tokens.txt tokenizer.json special_tokens_map.json
added_tokens.json conf/plain.yaml conf/keys.py keyboard.json passes.csv id_map.json
"""


def test_files_with_credentials_are_named_and_not_copied(root: Path) -> None:
    secret, plain = CREDENTIALS.split(), PLAIN.split()
    write(root, *secret, *plain)
    (root / "conf/found.yaml").write_text(f"tracker:\n  key: {'0a1b2c3d4e' * 4}\n")
    (root / "conf/Pass.json").write_text('{"db": {"password": "hunter2"}}')
    (root / "conf/plain.yaml").write_text("pad_token: <pad>\nauth: ldap\ntokens: [a, b]\n")
    found = find_project(root)
    assert sorted(found.names) == sorted(plain)
    notes = [f"{name} is not copied: it may hold a secret" for name in secret]
    assert sorted(found.notes) == sorted(notes)


def test_a_project_that_is_too_large_names_its_largest_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 2_000_000)
    with open(root / "big.bin", "wb") as file:
        file.truncate(3_000_000)
    write(root, "a.py")
    with pytest.raises(UsageError, match="too large to copy to the hosts: 3 MB") as caught:
        find_project(root)
    assert caught.value.cause == "the largest files: big.bin (3.0 MB), a.py (0.0 MB)"
    assert "git init" in caught.value.hint


def test_a_link_to_another_place_is_refused(root: Path) -> None:
    write(root, "a.py", "lib/b.py")
    (root / "same.py").symlink_to("lib/b.py")
    assert "same.py" in find_project(root).names
    (root / "data").symlink_to("/usr")
    with pytest.raises(UsageError, match="data -> /usr"):
        find_project(root)


def test_arguments_that_only_work_here_are_refused(root: Path, tmp_path: Path) -> None:
    write(root, "a.py", "conf/a.yaml", "left.csv")
    write(tmp_path, "up.csv")
    found = Project(root=root, names=("a.py", "conf/a.yaml"))
    assert check_paths(found, ["a.py", "--config", "conf/a.yaml", "--data", "conf/none.csv"]) == []
    assert check_paths(found, ["a.py", "--data", "/usr"]) == [
        "--data: /usr is not copied; every host must have it"
    ]
    for path, words in (
        (f"{root}/conf/a.yaml", "exists only on this machine"),
        ("../up.csv", "not copied to the hosts"),
        ("left.csv", "not copied to the hosts"),
    ):
        with pytest.raises(UsageError, match=words):
            check_paths(found, ["a.py", "--data", path])
    with pytest.raises(UsageError, match=r"the script: left.csv is not copied"):
        check_paths(found, ["left.csv"])


def test_a_project_arrives_as_it_was_through_a_pipe(root: Path, tmp_path: Path) -> None:
    write(root, "a.py", "lib/b.sh")
    (root / "lib/b.sh").chmod(0o755)
    os.utime(root / "a.py", (1_000_000, 1_000_000))
    (root / "big").write_bytes(os.urandom(3 << 20))
    (root / "lib/link").symlink_to("../a.py")
    wire = io.BytesIO()
    pipe = Pipe(wire, wire)
    with subprocess.Popen("true") as process:
        first = Link(name="gpu1", argv=(), script=b"", process=process)
        first.pipe = pipe
        first.send_project(packed(root))
    wire.seek(0)
    stream, target = io.BytesIO(), tmp_path / "project"
    while (message := pipe.receive()) and message["data"]:
        stream.write(message["data"])
    unpack(stream, target)
    assert {str(path.relative_to(target)) for path in target.rglob("*")} == {
        *("a.py", "big", "lib", "lib/b.sh", "lib/link")
    }
    assert (target / "big").read_bytes() == (root / "big").read_bytes()
    assert os.access(target / "lib/b.sh", os.X_OK)
    assert (target / "a.py").stat().st_mtime == 1_000_000
    assert target.stat().st_mode & 0o77 == 0
    assert (target / "lib/link").read_text() == "a.py"
    assert sorted(os.listdir(tmp_path)) == ["project", "work"]


def test_a_stream_that_is_cut_leaves_nothing(root: Path, tmp_path: Path) -> None:
    (root / "big").write_bytes(os.urandom(1 << 20))
    (tmp_path / "in").mkdir()
    with pytest.raises(ClusterrunError, match=r"cannot write the project"):
        unpack(io.BytesIO(packed(root).getvalue()[:-1000]), tmp_path / "in" / "project")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "work"]
    assert not any((tmp_path / "in").iterdir())
