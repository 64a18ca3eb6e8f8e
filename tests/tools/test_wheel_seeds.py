"""wheel_seeds.py: what is added to a wheel, and what is refused. The library's search of the folder
is tested in tests/jit/test_store.cc."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import sys
import zipfile

import pytest
import wheel_seeds
from pantile import _jit

RECORD = "pantile-1.dist-info/RECORD"
MODULE = b"import this\n"


def kernel(folder, key: str, advisories: str = "", code: bytes = b"\x7fELF" * 100):
    """A file as cpp/jit/image.cc writes it."""
    fields = f"key {key}\nname row {key}\nadvisories {advisories}\nbytes {len(code)}\n"
    path = folder / f"{key}.kernel"
    path.write_bytes(f"pantile kernel 1\nsha256 0\n{fields}".encode() + code)
    return path


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "pantile-1-cp312-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("pantile/__init__.py", MODULE)
        lines = wheel_seeds.record_line("pantile/__init__.py", MODULE)
        new.writestr(RECORD, f"{lines}{RECORD},,\n")
    return path


def assert_whole(wheel) -> list[str]:
    """Names of the files, each of which is in RECORD with its hash and size."""
    with zipfile.ZipFile(wheel) as opened:
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(opened.read(RECORD).decode()))}
        assert sorted(rows) == sorted(opened.namelist())
        for name, (digest, size) in rows.items():
            if name != RECORD:
                content = opened.read(name)
                hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
                assert digest == f"sha256={hashed.rstrip('=')}"
                assert int(size) == len(content)
        return sorted(rows)


def test_kernels_are_added_and_replaced(wheel, tmp_path):
    files = [kernel(tmp_path, "a"), kernel(tmp_path, "b")]
    taken = wheel_seeds.add_files(wheel, files, 10**6)
    assert 0 < taken < sum(f.stat().st_size for f in files)
    names = ["pantile/__init__.py", "pantile/kernels/a.kernel", "pantile/kernels/b.kernel"]
    assert assert_whole(wheel) == sorted([*names, RECORD])
    with zipfile.ZipFile(wheel) as opened:
        assert opened.read("pantile/kernels/b.kernel") == files[1].read_bytes()
        mode = opened.getinfo("pantile/kernels/b.kernel").external_attr >> 16
        assert mode & 0o777 == 0o644  # pantile loads nothing that everybody may write to
    wheel_seeds.add_files(wheel, [kernel(tmp_path, "c")], 10**6)
    assert assert_whole(wheel) == sorted([names[0], "pantile/kernels/c.kernel", RECORD])


def test_too_much_is_refused(wheel, tmp_path):
    before = wheel.read_bytes()
    with pytest.raises(
        SystemExit, match=r"^1 kernels take \d+ KB of the wheel; --most-kb allows 0"
    ):
        wheel_seeds.add_files(wheel, [kernel(tmp_path, "a")], 10)
    assert wheel.read_bytes() == before
    assert list(tmp_path.glob("*.partial")) == []


def test_slow_kernels_are_refused(tmp_path):
    good = kernel(tmp_path, "a")
    wheel_seeds.check_kernels([good])
    with pytest.raises(SystemExit, match=r"^row b: advisory C7515; it is no seed$"):
        wheel_seeds.check_kernels([good, kernel(tmp_path, "b", "C7515")])
    with pytest.raises(SystemExit, match="no kernel was compiled"):
        wheel_seeds.check_kernels([])


def test_the_package_in_the_wheel_compiles(wheel, tmp_path, monkeypatch, capsys):
    """What runs is a module of the wheel, with the list and a folder."""
    source = (
        "import pathlib, sys\n"
        "words = sys.argv[1:]\n"
        "assert words[:2] == ['compile', '--list'] and words[3] == '-o', words\n"
        "folder = pathlib.Path(words[4])\n"
        "folder.mkdir()\n"
        "(folder / 'k.kernel').write_text('pantile kernel 1\\nadvisories \\nbytes 0\\n')\n"
    )
    with zipfile.ZipFile(wheel) as opened:
        lines = opened.read(RECORD).decode()
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("pantile/__init__.py", MODULE)
        opened.writestr("pantile/__main__.py", source)
        more = wheel_seeds.record_line("pantile/__main__.py", source.encode())
        opened.writestr(RECORD, more + lines)
    monkeypatch.setattr(sys, "argv", ["wheel_seeds.py", str(wheel)])
    wheel_seeds.main()
    assert "1 kernels" in capsys.readouterr().out
    assert "pantile/kernels/k.kernel" in assert_whole(wheel)


def test_the_list_can_be_read():
    entries = _jit._read_list(wheel_seeds.LIST)
    assert {kind for kind, _ in entries} == {"attention"}
    assert {row["head_dim"] for _, row in entries} == {64, 128}
