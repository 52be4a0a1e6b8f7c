"""Main of the process that owns one GPU, or is its hot standby: `python -m lamina.gpu.executor_main SETUP`, or, started early
(`early_start.py`), `--warm FD MODULE...`: then the setup comes over its socket.

It ends with its gateway. An error of the device ends it at once, because nothing it says after that can be believed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any

import msgspec

from lamina.gpu.executor import ExecutorLost, open_executor
from lamina.gpu.executor_loop import ExecutorLoop
from lamina.gpu.gc_schedule import disable_full_collections
from lamina.gpu.hot_standby import import_all
from lamina.gpu.protocol import ExecutorSetup, ImportModules, Promote, to_executor_reader
from lamina.gpu.slicers import back_end, open_slicer
from lamina.ipc.child_process import WARM, await_setup
from lamina.ipc.framing import FrameChannel
from lamina.worker.main import die_with_parent
from lamina.worker.output_tags import show_logging, tag_output

EXIT_DEVICE_BROKEN = 70
"""Exit status after an error of the device."""

SWITCH_S = 0.0005
"""How long a callable's thread may keep the interpreter to itself: batches of others wait that long."""


def _open_app(setup: ExecutorSetup) -> Any:
    from lamina.sdk.app_loader import load_app

    with contextlib.suppress(Exception):  # the load of a function of it says what is wrong
        import torch  # noqa: F401

        return load_app(setup.app)


def _import_torch() -> None:
    with contextlib.suppress(Exception):  # what needs it says what is wrong
        import torch  # noqa: F401


def wait_for_promotion(channel: FrameChannel) -> None:
    """Import everything that needs no device, then wait for promotion: imports take most of a restart."""
    while not isinstance(frame := channel.next_buffered(), Promote):
        if isinstance(frame, ImportModules):
            import_all(frame.names)
        elif frame is not None or not channel.read():
            raise BrokenPipeError


def _await_setup(fd: int, importing: threading.Thread) -> ExecutorSetup:
    """Import what takes long, until the gateway says what this process is."""
    importing.start()
    sock = socket.socket(fileno=fd)
    try:
        return msgspec.json.decode(await_setup(sock), type=ExecutorSetup)
    finally:
        sock.detach()


def main(arguments: list[str]) -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which then tells us
    importing = threading.Thread(target=_import_torch)
    if arguments[0] == WARM:
        importing = threading.Thread(target=import_all, args=(arguments[2:],))
        try:
            setup = _await_setup(int(arguments[1]), importing)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)  # it is not needed
    else:
        setup = msgspec.json.decode(arguments[0], type=ExecutorSetup)
    os.set_inheritable(setup.fd, False)
    channel = FrameChannel(socket.socket(fileno=setup.fd), to_executor_reader())
    sys.argv = [setup.app]
    if setup.tags_output:
        tag_output()
    show_logging(setup.log_level)
    sys.setswitchinterval(SWITCH_S)
    disable_full_collections()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # what is it doing? every thread says so on stderr
    try:
        app = _open_app(setup) if setup.is_standby else None
        if setup.is_standby and not setup.opens_ahead:
            wait_for_promotion(channel)
        if back_end(setup.slicer).has_device and importing.ident is None:
            importing.start()  # which takes seconds, and opening the device one
        slicer = open_slicer(setup.slicer, setup.ordinal, soft=setup.soft)
        if importing.ident is not None:
            importing.join()
        worker = ExecutorLoop(setup, channel, slicer, open_executor(slicer, setup.weights_mib, setup.folder), app)
        signal.set_wakeup_fd(worker.woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "leaving", True))
        worker.serve()
    except (BrokenPipeError, ConnectionResetError):  # the gateway is gone
        return 0
    except ExecutorLost as error:
        os.write(2, f"lamina: {setup.device}: {error}\n".encode())  # its last words
        os._exit(EXIT_DEVICE_BROKEN)  # without the exit handlers of a library whose device is broken
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once: a thread of a user may hang, and the gateway would wait for it
    finally:
        channel.leave_open()
    os._exit(0)  # threads of users may hang, and no result of theirs is wanted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
