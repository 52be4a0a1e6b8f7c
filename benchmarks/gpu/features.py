"""What can be said of a model without timing it: operations, bytes, parameters, kinds of layers, kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

LAYERS = {
    "conv": ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d"),
    "linear": ("Linear", "NonDynamicallyQuantizableLinear"),
    "norm": ("BatchNorm2d", "LayerNorm", "LayerNorm2d", "GroupNorm", "T5LayerNorm", "BatchNormAct2d", "RMSNorm"),
    "activation": ("ReLU", "ReLU6", "GELU", "SiLU", "Hardswish", "Hardsigmoid", "Sigmoid", "GELUActivation", "Tanh", "Softmax"),
    "attention": ("MultiheadAttention", "ShiftedWindowAttention", "Attention"),
    "pool": ("MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "SelectAdaptivePool2d"),
    "embedding": ("Embedding",),
    "recurrent": ("LSTM", "GRU", "RNN"),
}
_VIEWS = {"view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "detach", "alias"}
_VIEWS |= {"as_strided", "_unsafe_view", "split", "unbind", "split_with_sizes", "chunk", "_reshape_alias"}


def counted(model: Any, batch: int) -> dict[str, Any]:
    """One eager pass with every operator counted. Bytes are those each operator reads and writes, as if nothing were cached."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: Counter[str] = Counter()
            self.read_bytes = self.written_bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func.__name__.split(".")[0]
            if name not in _VIEWS:
                self.ops[name] += 1
                self.read_bytes += sum(map(_bytes, torch.utils._pytree.tree_leaves((args, kwargs))))
                self.written_bytes += sum(map(_bytes, torch.utils._pytree.tree_leaves(out)))
            return out

    def _bytes(value: Any) -> int:
        return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0

    inputs = model.make_input(batch)
    calls = 0

    def called(*_: Any) -> None:
        nonlocal calls
        calls += 1

    leaves = [module for module in model.module.modules() if not list(module.children())]
    hooks = [module.register_forward_hook(called) for module in leaves]
    count = Count()
    with torch.no_grad(), FlopCounterMode(display=False) as flops, count:
        model.module(inputs)
    for hook in hooks:
        hook.remove()
    return {
        "flops": int(flops.get_total_flops()),
        "read_bytes": count.read_bytes,
        "written_bytes": count.written_bytes,
        "ops": sum(count.ops.values()),
        "leaf_calls": calls,
        "op_counts": dict(count.ops.most_common(24)),
    }


def static(model: Any) -> dict[str, Any]:
    kinds = Counter(type(module).__name__ for module in model.module.modules())
    parameters = list(model.module.parameters())
    depth = max(name.count(".") + 1 for name, _ in model.module.named_modules())
    return {
        "params": sum(p.numel() for p in parameters),
        "param_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "nesting": depth,
        **{f"layers_{kind}": sum(kinds[name] for name in names) for kind, names in LAYERS.items()},
    }
