"""JupyterLab as a user meets it: a real server, a real Chromium."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
TOKEN = "browser-test"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium on the PATH (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a JupyterLab whose root is a fresh folder, and that folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = tmp_path / "lab"
    root.mkdir()
    settings = tmp_path / "settings"
    settings.mkdir()
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}", "--ip=127.0.0.1",
        f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={root}",
        f"--LabApp.user_settings_dir={settings}", "--LabApp.news_url=None", "--allow-root",
    ]  # fmt: skip
    log = (tmp_path / "lab.log").open("w")
    environment = os.environ | {"JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        _wait_until_up(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", server, tmp_path / "lab.log")
        yield f"http://127.0.0.1:{port}", root
    finally:
        server.terminate()
        server.wait(20)
        log.close()


def _wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url, timeout=2)
        except OSError:
            time.sleep(0.3)
        else:
            return
    raise AssertionError(f"JupyterLab did not answer\n{log.read_text()}")
