"""The Open Inference Protocol, version 2, over REST and gRPC: every function and workflow is a model there.

A request becomes raw tensors (`tensors.py`, from JSON, from the binary extension, from protobuf), is checked against the model
(`check.py`), becomes one call per row (`rows.py`, `serving.py`), and its results become raw tensors again. Bytes that need no
change are not looked at on the way.
"""
