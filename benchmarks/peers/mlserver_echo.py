"""The same echo in MLServer; run by its own Python: `mlserver_echo.py HTTP_PORT GRPC_PORT WORKERS`.

Its default is one worker process; with none the model runs inside the server.
"""

import asyncio
import sys

from mlserver import MLModel, MLServer
from mlserver.settings import ModelSettings, Settings
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Echo(MLModel):
    async def load(self) -> bool:
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        x = payload.inputs[0]
        out = ResponseOutput(name="output", shape=x.shape, datatype=x.datatype, data=x.data)
        return InferenceResponse(model_name=self.name, outputs=[out])


async def main() -> None:
    http_port, grpc_port, workers = map(int, sys.argv[1:])
    settings = Settings(
        host="127.0.0.1", http_port=http_port, grpc_port=grpc_port, metrics_endpoint=None, parallel_workers=workers, debug=False
    )
    server = MLServer(settings)
    await server.start([ModelSettings(name="echo", implementation=Echo)])


if __name__ == "__main__":
    asyncio.run(main())
