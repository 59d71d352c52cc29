"""Lines on disk: whole or absent, through a crash, a torn line and a full disk."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lab.monitoring.json_lines import JsonLines


def reopened(path: Path) -> JsonLines:
    file = JsonLines(path)
    file.read()
    return file


def test_each_append_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = JsonLines(path)
    file.append([{"step": 1, "text": "two\nlines, é"}])
    assert path.read_bytes() == '{"step": 1, "text": "two\\nlines, é"}\n'.encode()
    file.append([{"step": 2}, {"step": 3}])
    assert [record["step"] for record in JsonLines(path).read()] == [1, 2, 3]


def test_a_killed_process_loses_nothing_it_reported(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom grpo_lab.monitoring.json_lines import JsonLines\n"
        "file = JsonLines(Path(sys.argv[1]))\n"
        "for step in range(1, 6):\n    file.append([{'step': step}])\n    print(step, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert done.returncode == -9
    assert [str(record["step"]) for record in JsonLines(path).read()] == done.stdout.split()


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "lo', b'{"step": 3}', b"\x00\x00\x00\x00", b'{"te\xc3', b"garbage\n", b"[]\n"]
)
def test_a_torn_last_line_is_left_out_and_written_over(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    file = JsonLines(path)
    assert file.read() == [{"step": 1}, {"step": 2}]
    file.append([{"step": 3}])
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_file_that_holds_a_torn_line_only_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"st')
    reopened(path).append([{"step": 1}])
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_broken_line_before_the_last_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\nbroken\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2 is not a JSON object: b'broken"):
        JsonLines(path).read()


def test_nan_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        JsonLines(tmp_path / "rows.jsonl").append([{"loss": float("nan")}])


def test_a_full_disk_names_the_folder_and_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = JsonLines(path)
    file.append([{"step": 1}])
    # A limit on the size of a file fails as a full disk does, in the middle of a line.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        for step in (2, 3):
            with pytest.raises(RuntimeError) as error:
                file.append([{"step": step}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b'{"step": 1}\n{"step":'
    assert str(error.value) == (
        f"cannot write rows.jsonl in {tmp_path} (File too large). Free space there or make it writable: "
        "what is missing stays in memory and goes out with the next row."
    )
    file.append([{"step": 4}])
    assert [record["step"] for record in JsonLines(path).read()] == [1, 2, 3, 4]


def test_superseded_records_move_and_none_is_lost(tmp_path: Path) -> None:
    path, target = tmp_path / "rows.jsonl", tmp_path / "rows.superseded.jsonl"
    file = JsonLines(path)
    file.append([{"step": step} for step in (1, 2, 3, 4)])
    file.move_out(lambda record: record["step"] > 2, target)
    file.append([{"step": 3, "again": True}])
    file.move_out(lambda record: record["step"] > 2, target)
    file.move_out(lambda record: record["step"] > 2, target)
    assert JsonLines(path).read() == [{"step": 1}, {"step": 2}]
    assert JsonLines(target).read() == [{"step": 3}, {"step": 4}, {"step": 3, "again": True}]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name, target.name]
