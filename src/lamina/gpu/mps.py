"""MPS slicer: shares of a GPU for processes, by a private MPS daemon of our own.

For code that must not share a process with others. The share is fixed when a process starts: a cap and not a reservation,
rounded down to whole SMs. The memory limit holds. A client is ended by `terminate_client` first: the manual calls a kill in
the middle of its work undefined for the others. A fatal fault on the GPU still reaches all clients.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from lamina.errors import BadValue, LaminaError
from lamina.gpu.driver import CudaError, NoGpu, open_driver
from lamina.gpu.slicer import SlicerCheck, SlicerClosed, check_mask
from lamina.types import DeviceSpec, SliceLimits

BINARY = "nvidia-cuda-mps-control"
UNITS = 50
"""Steps of two percent: a mask of a hundred bits would not fit into the 64-bit number that travels to a worker."""

_START_S, _ASK_S, _QUIT_S = 10.0, 10.0, 20.0


class MpsError(LaminaError):
    """An MPS daemon that did not start, or did not do what it was told."""

    code = "mps-error"


def find_binary() -> str | None:
    """Path of the daemon: on the PATH, or beside nvidia-smi, where some images keep it."""
    beside = os.path.dirname(shutil.which("nvidia-smi") or "")
    return shutil.which(BINARY, path=os.pathsep.join((os.environ.get("PATH", ""), beside)))


class MpsDaemon:
    """The MPS daemon, in the foreground, so that it is our child and ends with us; sockets in a folder of its own."""

    def __init__(self) -> None:
        binary = find_binary()
        if binary is None:
            raise NoGpu(f"{BINARY} is not installed", hint="it comes with the NVIDIA driver")
        self._binary = binary
        self._folder = Path(tempfile.mkdtemp(prefix="lmps"))  # short: names of UNIX sockets end at 108 bytes
        for name in ("pipe", "log"):
            (self._folder / name).mkdir(mode=0o700)
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "log"),
        }
        self._process: subprocess.Popen[bytes] | None = None
        with (self._folder / "log" / "daemon.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [binary, "-f"], env=self._whole_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.close()
            raise

    def ask(self, command: str) -> str:
        """Send one command to the daemon; returns its answer."""
        done = subprocess.run(
            [self._binary],
            input=command + "\n",
            text=True,
            env=self._whole_environment(),
            capture_output=True,
            timeout=_ASK_S,
            check=False,
        )
        return (done.stdout + done.stderr).strip()

    def servers(self) -> list[int]:
        return [int(line) for line in self.ask("get_server_list").split() if line.isdecimal()]

    def end_client(self, process: subprocess.Popen[bytes]) -> None:
        """End a client: its work is stopped by the daemon first; only then the process is killed."""
        if process.poll() is None:
            self.terminate(process.pid)
            process.kill()
        process.wait()

    def terminate(self, pid: int) -> None:
        """Stop the work of this client; its process may be killed afterwards."""
        for server in self.servers():
            self.ask(f"terminate_client {server} {pid}")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                self.ask("quit")
            try:
                process.wait(_QUIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        ends_s = time.monotonic() + _START_S
        while time.monotonic() < ends_s:
            if self._process.poll() is not None:
                raise MpsError(f"the MPS daemon ended with status {self._process.returncode}: {self._log()}")
            with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
                float(self.ask("get_default_active_thread_percentage"))
                return
            time.sleep(0.05)
        raise MpsError(f"the MPS daemon does not answer: {self._log()}")

    def _log(self) -> str:
        texts = [path.read_text(errors="replace")[-300:] for path in sorted((self._folder / "log").glob("*"))]
        return " | ".join(text.strip() for text in texts if text.strip())

    def _whole_environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_MPS_")}
        return {**inherited, **self.environment}


class MpsSlicer:
    """Not a back end of the executor: it slices a device for other processes."""

    name = "mps"
    in_process = False

    def __init__(self, device: DeviceSpec | None = None, *, memory_mib: int = 0) -> None:
        self.device = device or DeviceSpec(
            id="gpu0",
            kind="mps",
            units=UNITS,
            memory_mib=memory_mib,
            limits=SliceLimits(per_batch=False),
        )
        self._daemon: MpsDaemon | None = MpsDaemon()

    @property
    def daemon(self) -> MpsDaemon:
        if self._daemon is None:
            raise SlicerClosed(f"{self.device.id} has been let go")
        return self._daemon

    @classmethod
    def check(cls) -> SlicerCheck:
        binary = find_binary()
        if binary is None:
            hint = "it comes with the NVIDIA driver; only isolated workers need it"
            return SlicerCheck("mps", False, f"{BINARY} is not installed", hint)
        try:
            open_driver()
        except (NoGpu, CudaError) as error:
            return SlicerCheck("mps", False, error.message)
        return SlicerCheck("mps", True, f"{binary}; a private daemon is started when a worker needs one")

    def slice(self, mask: int) -> NoReturn:
        raise BadValue("mps makes no slices inside a process", hint="start a process with environment(mask)")

    def environment(self, mask: int, memory_mib: int = 0) -> dict[str, str]:
        daemon = self.daemon
        check_mask(self.device, mask)
        percent = mask.bit_count() * 100 / self.device.units
        limit = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={memory_mib}M"} if memory_mib else {}
        return {**daemon.environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{percent:g}", **limit}

    def close(self) -> None:
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.close()
