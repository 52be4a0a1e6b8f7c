"""Open Inference Protocol, version 2, over REST and gRPC: every function and workflow is a model there.

A request becomes raw tensors (`tensors.py`, from JSON, from the binary extension, from protobuf), is validated against the model
(`validation.py`), becomes one call per row (`row_conversion.py`, `inference_service.py`), and its results become raw tensors
again. Bytes that need no change are not looked at on the way.
"""
