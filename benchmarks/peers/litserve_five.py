"""The five models of `benchmarks/gpu/app.py` on LitServe, as a careful user writes it: `-m benchmarks.peers.litserve_five PORT`.

One worker process per model (LitServe's own way to serve several), batches of 16, half precision, and CUDA graphs of every power
of two captured by hand in `setup`: without them LitServe answers a fraction of this. Images travel as base64 in JSON, because
LitServe reads JSON or forms and no plain bytes.
"""

from __future__ import annotations

import base64
import sys
from typing import Any

import litserve as ls
import numpy as np
from benchmarks.gpu import zoo

MAX_BATCH = 16


class FromBytes:
    """Module and CUDA graphs: rows in, one number a row out."""

    def __init__(self, name: str) -> None:
        import torch

        self.torch = torch
        model = zoo.build(name)
        self.is_text = name == "bert_base"
        example = model.make_input(1) if self.is_text else torch.zeros(1, 3, 224, 224, dtype=torch.uint8, device="cuda")
        self.graphs: dict[int, tuple[Any, Any, Any]] = {}
        with torch.inference_mode():
            for size in (1, 2, 4, 8, 16):
                self.graphs[size] = self._capture(model.module, example.expand(size, *example.shape[1:]).contiguous())

    def _capture(self, module: Any, rows: Any) -> tuple[Any, Any, Any]:
        torch = self.torch

        def run() -> Any:
            if self.is_text:
                out = module(rows)
                return out[0] if isinstance(out, tuple) else getattr(out, "last_hidden_state", out)
            return module((rows.half() / 255).contiguous(memory_format=torch.channels_last))

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        return graph, rows, out

    def __call__(self, rows: list[Any]) -> list[float]:
        size = next(size for size in self.graphs if size >= len(rows))
        graph, inputs, out = self.graphs[size]
        with self.torch.inference_mode():
            inputs[: len(rows)].copy_(self.torch.from_numpy(np.stack(rows)), non_blocking=True)
            graph.replay()
            host = out[: len(rows)].flatten(1)[:, :1000].float().cpu().numpy()
        return [float(row[0]) if self.is_text else float(row.argmax()) for row in host]


class FiveApi(ls.LitAPI):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        super().__init__(max_batch_size=MAX_BATCH, batch_timeout=0.002, api_path=f"/{name}")
        self.name = name

    def setup(self, device: str) -> None:
        self.model = FromBytes(self.name)

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # LitServe reads annotations as request types
        if self.name == "bert_base":
            return np.asarray(request["words"], dtype=np.int64)
        return np.frombuffer(base64.b64decode(request["image"]), np.uint8).reshape(3, 224, 224)

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def unbatch(self, output: list[float]) -> list[float]:
        return output

    def predict(self, rows: Any) -> Any:
        return self.model(rows if isinstance(rows, list) else [rows])

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"output": output}


if __name__ == "__main__":
    server = ls.LitServer([FiveApi(name) for name in zoo.FIVE], accelerator="cuda", workers_per_device=1, timeout=30)
    server.run(port=int(sys.argv[1]), num_api_servers=6, generate_client_file=False, log_level="error")
