import os
import subprocess
from pathlib import Path

import pytest

from retrain.records.environment import holds_records, system_files
from retrain.records.schema.layout import CODE_DIFF
from retrain.util import repository
from retrain.util.repository import code_diff, git_state


def git(repo: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", "-C", str(repo), *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def repo(tmp_path):
    """A repository with one commit of text, binary and odd files."""
    root = tmp_path / "repo"
    (root / "sub").mkdir(parents=True)
    git(root, "init", "-q")
    for name in ("one.py", "two.py", "both.py", "gone.py", "sub/deep.py"):
        (root / name).write_text("".join(f"{name} line {n}\n" for n in range(20)))
    (root / "weights.bin").write_bytes(bytes(range(256)) * 4)
    (root / "windows.txt").write_bytes(b"first\r\nsecond\r\n")
    (root / "latin.txt").write_bytes(b"caf\xe9\nend")
    (root / ".gitignore").write_text("ignored/\n")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def change_everything(root: Path) -> None:
    """Staged, unstaged and both; binary, without a last line break, other bytes than UTF-8; new, moved and deleted."""
    for name in ("one.py", "both.py", "fresh.py"):
        (root / name).write_text("staged\n")
        git(root, "add", name)
    (root / "both.py").write_text("and changed again\n")
    (root / "two.py").write_text("no line break at the end")
    (root / "gone.py").unlink()
    git(root, "mv", "sub/deep.py", "sub/moved.py")
    (root / "weights.bin").write_bytes(b"\0\1\2" * 300)
    (root / "windows.txt").write_bytes(b"first\r\nchanged\r\n")
    (root / "latin.txt").write_bytes(b"th\xe9\nend\n")
    (root / "empty.py").touch()
    (root / "sub" / "new binary").write_bytes(bytes(reversed(range(256))))
    (root / "sub" / 'é "quoted"\t.py').write_text("odd name, without a last line break")
    (root / "script.sh").write_text("#!/bin/sh\n")
    (root / "script.sh").chmod(0o755)
    (root / "link").symlink_to("one.py")
    (root / "ignored").mkdir()
    (root / "ignored" / "data.txt").write_text("ignored")


def contents(root: Path) -> dict[str, object]:
    """Every file that git does not ignore, with its bytes and mode."""
    names = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    paths = {name: root / name for name in names if name and os.path.lexists(root / name)}
    return {
        name: os.readlink(path) if path.is_symlink() else (path.read_bytes(), path.stat().st_mode & 0o100)
        for name, path in paths.items()
    }


def applied(root: Path, patch: bytes, to: Path) -> Path:
    """A clone of the commit with the patch applied."""
    git(root.parent, "clone", "-q", str(root), str(to))
    (to.parent / "code.diff").write_bytes(patch)
    git(to, "apply", "--check", str(to.parent / "code.diff"))
    git(to, "apply", str(to.parent / "code.diff"))
    return to


def test_the_recorded_changes_give_the_working_tree_back(repo, tmp_path, monkeypatch):
    change_everything(repo)
    before = {path: path.read_bytes() for path in (repo / ".git").rglob("*") if path.is_file()}
    monkeypatch.chdir(repo / "sub")
    monkeypatch.setattr("retrain.records.environment.own_checkout", lambda: None)
    patch = system_files(repo)[CODE_DIFF]
    assert {path: path.read_bytes() for path in (repo / ".git").rglob("*") if path.is_file()} == before
    state = git_state(repo)
    assert patch.startswith(f"### repo: {state['root']} @ {state['revision']}\n".encode())
    assert (len(state["revision"]), state["changed"]) == (40, True)
    assert patch.count(b"### repo:") == 1
    assert contents(applied(repo, patch, tmp_path / "clone")) == contents(repo)
    plain = code_diff(repo)
    git(repo, "config", "diff.noprefix", "true")
    assert code_diff(repo) == plain


def test_every_repository_has_its_part(repo, tmp_path, monkeypatch):
    other, source = tmp_path / "experiments", tmp_path / "retrain"
    for root in (other, source):
        (root / "pkg").mkdir(parents=True)
        git(root, "init", "-q")
        (root / "pkg" / "environment.py").write_text("a\n")
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", "first")
        (root / "pkg" / "environment.py").write_text(f"changed in {root.name}\n")
    (repo / "one.py").write_text("changed in repo\n")
    monkeypatch.chdir(repo)
    monkeypatch.setattr(repository, "__file__", str(source / "pkg" / "environment.py"))
    parts = ["### repo:" + part for part in system_files(other / "pkg")[CODE_DIFF].decode().split("### repo:")[1:]]
    assert [part.partition("\n")[0] for part in parts] == [
        f"### repo: {root} @ {git(root, 'rev-parse', 'HEAD').strip()}" for root in (repo, other, source)
    ]
    for root, part in zip((repo, other, source), parts, strict=True):
        assert f"+changed in {root.name}\n" in part


def test_no_commit_no_repository_no_git_and_a_hook_of_another_repository(repo, tmp_path, monkeypatch):
    (bare := tmp_path / "bare").mkdir()
    git(bare, "init", "-q")
    (bare / "new.py").write_text("a = 1\n")
    text = code_diff(bare)
    assert text.startswith(f"### repo: {bare} @ no commit yet\n")
    assert "+a = 1\n" in text
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere" / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "elsewhere" / "index"))
    assert git_state(repo)["root"] == str(repo)
    assert code_diff(tmp_path) == f"### no git repository around {tmp_path}\n"
    monkeypatch.setenv("PATH", "")
    assert git_state(repo) is None
    assert system_files(tmp_path)[CODE_DIFF].decode() == f"### no git repository around {Path.cwd()}\n"


def test_no_secret_nothing_large_and_nothing_that_runs_wrote(repo, tmp_path, monkeypatch):
    (repo / ".env").write_text("a = 1\n")
    (repo / "old.py").write_text('key = "swordfish-9"\nb = 1\n')
    git(repo, "add", "-A", "-f", ".env", "old.py")
    git(repo, "commit", "-q", "-m", "second")
    monkeypatch.setenv("MY_API_KEY", "swordfish-9")
    (repo / ".env").write_text("PASSWORD=hunter-2\n")
    (repo / "one.py").write_text('a = 2\nkey = "swordfish-9"\n')
    (repo / "old.py").write_text('key = "swordfish-9"\nb = 2\n')
    (repo / "creds.json").write_text('{"user": "hunter-2"}\n')
    (repo / "new.py").write_text(f'key = "sk-{"x" * 20}"\n')
    (repo / "big.txt").write_text("large" * 60_000)
    (repo / "weights.bin").write_bytes(os.urandom(300_000))
    run = repo / "logs" / "run"
    (run / "emergence").mkdir(parents=True)
    for name in ("plan.json", "manifest.json", "emergence/generations.jsonl"):
        (run / name).write_text("{}\n")
    text = code_diff(repo, is_record=holds_records)
    for secret in ("hunter-2", "swordfish-9", "xxxx", "generations.jsonl", "largelarge"):
        assert secret not in text
    for name, reason in ((".env", "named like a secret"), ("creds.json", "named like a secret"),
                         ("big.txt", "too large"), ("weights.bin", "too large")):  # fmt: skip
        assert f"### {name}: left out, {reason}\n" in text
    assert '+key = "[key left out]"\n' in text
    assert "### +b = 2\n" in text  # beside a line of the commit that is left out: a remark, no patch
    assert len(text) < 10_000
    clone = applied(repo, text.encode(), tmp_path / "clone")
    assert (clone / "one.py").read_text() == 'a = 2\nkey = "[key left out]"\n'


def test_what_does_not_fit_is_named_and_the_rest_applies(repo, tmp_path, monkeypatch):
    monkeypatch.setattr(repository, "MAX_DIFF_BYTES", 2_000)
    (repo / "a.txt").write_text("a\n" * 2_000)
    (repo / "z.txt").write_text("fits\n")
    text = code_diff(repo)
    assert "### no room for: diff --git a/a.txt b/a.txt\n" in text
    assert (applied(repo, text.encode(), tmp_path / "clone") / "z.txt").read_text() == "fits\n"
