"""Functions of ONNX files, run in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamina.errors import BadValue
from lamina.sdk.model_function import RowBatcher
from lamina.sdk.onnx import OnnxModel
from lamina.sdk.tensors import Signature


class OnnxFunction:
    def __init__(self, path: Path, signature: Signature, batched: bool) -> None:
        self._model = OnnxModel(path, ["CPUExecutionProvider"])
        self._outputs = [port.name for port in signature.outputs]
        self._rows = RowBatcher(signature, batched)

    def load(self) -> None:
        self._model.session()

    def __call__(self, **inputs: Any) -> Any:
        return self._rows.run(inputs, self._forward)

    def _forward(self, feeds: dict[str, Any]) -> dict[str, Any]:
        session = self._model.session()
        try:
            results = session.run(self._outputs, feeds)
        except Exception as error:
            if type(error).__name__ == "InvalidArgument":  # the caller's: the file says what fits, and this does not
                raise BadValue(str(error).partition("\n")[0]) from None
            raise
        return dict(zip(self._outputs, results, strict=True))
