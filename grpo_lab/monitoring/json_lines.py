"""A file of one JSON object a line that survives a killed process and a full disk."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class JsonLines:
    """A file that grows by whole lines, each on the disk before `append` returns.

    What cannot be written waits in memory and goes out with the next `append`; half a line that a failure
    left behind is cut off first.

    Args:
        path: the file; made on the first `append`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = 0
        self._waiting = b""

    def append(self, records: Iterable[Record]) -> None:
        """Write each record as one line and sync the file.

        Args:
            records: what `json` can encode; NaN and infinity it cannot.

        Raises:
            RuntimeError: the file cannot be written; the message names the folder and what to do.
        """
        self._waiting += b"".join(_line(record) for record in records)
        try:
            with self.path.open("r+b" if self._size else "wb") as file:
                file.truncate(self._size)
                file.seek(self._size)
                file.write(self._waiting)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            reason = error.strerror or error
            raise RuntimeError(
                f"cannot write {self.path.name} in {self.path.parent} ({reason}). Free space there or make "
                "it writable: what is missing stays in memory and goes out with the next row."
            ) from error
        self._size += len(self._waiting)
        self._waiting = b""

    def read(self) -> list[Record]:
        """The records in the file, which `append` goes on from.

        Returns:
            All records in order; none where there is no file. A last line that a crash cut short is left out.

        Raises:
            ValueError: a line before the last is not a JSON object.
        """
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        records: list[Record] = []
        self._size = 0
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if not isinstance(record, dict):
                if number < len(lines):
                    raise ValueError(f"{self.path}, line {number} is not a JSON object: {line[:60]!r}")
                break
            records.append(record)
            self._size += len(line)
        return records

    def move_out(self, superseded: Callable[[Record], bool], target: Path) -> None:
        """Move records to another file.

        Args:
            superseded: which of them go.
            target: where they are appended. They are there before they leave this file, so that a crash
                between the two doubles them and loses none.

        Raises:
            RuntimeError: one of the files cannot be written.
        """
        if self._waiting:
            self.append([])
        records = self.read()
        gone = [record for record in records if superseded(record)]
        if not gone:
            return
        others = JsonLines(target)
        others.read()
        others.append(gone)
        draft = JsonLines(self.path.with_suffix(".draft"))
        draft.append(record for record in records if not superseded(record))
        draft.path.replace(self.path)
        self._size = draft._size


def _line(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
