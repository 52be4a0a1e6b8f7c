"""The same echo in PyTriton; run by its own Python: `pytriton_echo.py HTTP_PORT GRPC_PORT`."""

import sys

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


@batch
def echo(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"output": x}


http_port, grpc_port = map(int, sys.argv[1:])
config = TritonConfig(
    http_address="127.0.0.1",
    http_port=http_port,
    grpc_address="127.0.0.1",
    grpc_port=grpc_port,
    allow_metrics=False,
    log_verbose=0,
)
with Triton(config=config) as triton:
    triton.bind(
        model_name="echo",
        infer_func=echo,
        inputs=[Tensor(name="x", dtype=np.float32, shape=(16,))],
        outputs=[Tensor(name="output", dtype=np.float32, shape=(16,))],
        config=ModelConfig(max_batch_size=16),
    )
    triton.serve()
