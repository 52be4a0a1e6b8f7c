"""ONNX models: `lamina.onnx_model("model.onnx")` runs a file with as many threads as its slice has cores.

onnxruntime fixes the number of threads when a session is made. A slice may be of another size for every batch, so a
session is kept for each number of cores met so far; the least used one goes when there are too many.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamina.errors import BadValue, LoadFailed
from lamina.sdk.context import context
from lamina.sdk.model_sources import fetch_model, is_address, model_file

MAX_SESSIONS = 4
"""Each holds the weights once more."""


class OnnxModel:
    def __init__(self, path: str | Path, providers: Sequence[str], sha256: str = "") -> None:
        self.path = fetch_model(path, sha256=sha256) if sha256 or is_address(str(path)) else Path(path)
        self.path = model_file(self.path) if self.path.is_dir() else self.path
        if not self.path.is_file():
            raise BadValue(f"no model at {str(path)!r}", hint="give the path of an .onnx file")
        self._providers = list(providers)
        self._sessions: OrderedDict[int, Any] = OrderedDict()  #: by number of threads, least used first
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<onnx model {self.path.name!r}>"

    def session(self, threads: int | None = None) -> Any:
        """The onnxruntime session for this many threads; by default, as many as the running batch has cores."""
        threads = threads or context().cores
        with self._lock:
            if threads not in self._sessions:
                self._sessions[threads] = self._create_session(threads)
                if len(self._sessions) > MAX_SESSIONS:
                    self._sessions.popitem(last=False)
            self._sessions.move_to_end(threads)
            return self._sessions[threads]

    def run(self, feeds: Any) -> Any:
        """Run inference. `feeds` is a dict by input name, or the array itself for a model with one input.

        The result is an array for a model with one output, else a dict by output name.
        """
        session = self.session()
        if not isinstance(feeds, Mapping):
            names = [found.name for found in session.get_inputs()]
            if len(names) != 1:
                raise BadValue(f"{self.path.name} has {len(names)} inputs", hint=f"give a dict with {', '.join(names)}")
            feeds = {names[0]: feeds}
        results = session.run(None, dict(feeds))
        if len(results) == 1:
            return results[0]
        return {found.name: result for found, result in zip(session.get_outputs(), results, strict=True)}

    def _create_session(self, threads: int) -> Any:
        try:
            import onnxruntime
        except ImportError:
            raise LoadFailed("onnxruntime is not installed", hint="pip install 'lamina[onnx]'") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # its errors are raised; on stderr they would look like another one
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads must not eat a neighbour's slice
        try:
            return onnxruntime.InferenceSession(str(self.path), options, providers=self._providers)
        except Exception as error:  # onnxruntime's own family of errors has no public root
            raise LoadFailed(f"{self.path.name} cannot be loaded: {error}") from None


def onnx_model(path: str | Path, *, providers: Sequence[str] = ("CPUExecutionProvider",), sha256: str = "") -> OnnxModel:
    """An ONNX file as a model. `path` may be an address, which is fetched at once, and the file may have to have a checksum.
    Nothing is loaded until it runs, or until `.session()` is asked for in a load hook."""
    return OnnxModel(path, providers, sha256)
