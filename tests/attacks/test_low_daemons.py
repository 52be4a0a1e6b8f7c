"""The low list: a function that makes a daemon of itself does not outlive the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.servers import free_port, wait_for

pytestmark = pytest.mark.live

APP = """
import os
import time

import lamina

app = lamina.App("daemons")


@app.function(scale=lamina.Scale(min=1, max=1))
def leave(path):
    if not os.fork():
        os.setsid()
        if not os.fork():
            for descriptor in range(3, 256):
                try:
                    os.close(descriptor)
                except OSError:
                    pass
            with open(path, "w") as file:
                file.write(str(os.getpid()))
            while True:
                time.sleep(1)
        os._exit(0)
    os.wait()
    return True
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_daemon_made_by_a_function_ends_with_the_server(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    mark = tmp_path / "pid"
    port = free_port()
    command = [sys.executable, "-m", "lamina", "serve", str(tmp_path / "app.py"), "--port", str(port), "--store", "none"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            wait_for(f"http://127.0.0.1:{port}/v1/functions/leave", b'"%s"' % str(mark).encode(), 60.0)
            while not mark.exists() or not mark.read_text():
                time.sleep(0.01)
            daemon = int(mark.read_text())
            assert is_alive(daemon)
            server.send_signal(signal.SIGTERM)
            _, said = server.communicate(timeout=60)
            assert "left behind" in said
            assert not is_alive(daemon)
        finally:
            server.kill()
            if mark.exists() and is_alive(int(mark.read_text())):
                os.kill(int(mark.read_text()), signal.SIGKILL)
