"""Model trace: static record of a torch module without running it, as `lamina.predict.model_features` reads it.

The module is copied to torch's `meta` device, where shapes flow and numbers do not: no GPU, no time, no memory for weights. It
is passed through at batch 1 and at batch 8; every operator that is not a view is counted with its arithmetic, the elements it
reads and writes, and the weights among them. Sums over operators are as if nothing were cached.

From the trace of a model that has not run on the device, the shipped latency model predicts its profile.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from msgspec.structs import replace

from lamina.errors import BadValue
from lamina.predict import interference, learned
from lamina.predict.model_features import Record
from lamina.predict.profile import Profile
from lamina.sdk.function import Function
from lamina.sdk.torch_model import LoadedTorchModel

VIEW_OPERATORS = {
    "view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "detach", "alias", "as_strided",
    "_unsafe_view", "split", "unbind", "split_with_sizes", "chunk", "_reshape_alias",
}  # fmt: skip
FREE_OPERATORS = {
    "empty",
    "empty_like",
    "arange",
    "ones",
    "zeros",
    "full",
    "scalar_tensor",
    "lift_fresh",
    "_assert_tensor_metadata",
}
KIND_BY_OPERATOR = {
    "convolution": "conv", "addmm": "matmul", "mm": "matmul", "bmm": "matmul", "baddbmm": "matmul",
    "native_batch_norm": "norm", "_native_batch_norm_legit_no_training": "norm", "cudnn_batch_norm": "norm",
    "native_layer_norm": "norm", "_softmax": "softmax", "embedding": "gather", "max_pool2d_with_indices": "pool",
    "avg_pool2d": "pool", "mean": "pool", "_adaptive_avg_pool2d": "pool", "cat": "copy", "copy_": "copy", "clone": "copy",
    "_to_copy": "copy", "roll": "copy",
}  # fmt: skip
LAYER_WORDS = {
    "conv": ("Conv",), "linear": ("Linear",), "norm": ("Norm",), "attention": ("Attention",), "recurrent": ("RNN", "LSTM", "GRU"),
    "activation": ("ReLU", "GELU", "SiLU", "Hardswish", "Hardsigmoid", "Sigmoid", "Tanh", "Softmax"),
}  # fmt: skip


def trace_model(name: str, module: Any, example: tuple[Any, ...]) -> Record:
    """`example` is a batch of one."""
    import torch

    shadow = copy.deepcopy(module).to("meta").eval()
    one, eight = (
        _forward_pass(name, shadow, [torch.empty((batch, *part.shape[1:]), dtype=part.dtype, device="meta") for part in example])
        for batch in (1, 8)
    )
    parameters = list(module.parameters())
    kinds = [type(layer).__name__ for layer in module.modules()]
    ops = sum(one.counts.values())
    return {
        "model": name,
        "params": sum(p.numel() for p in parameters),
        "param_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "nesting": max(path.count(".") + 1 for path, _ in module.named_modules()),
        **{f"layers_{layer}": sum(any(word in kind for word in words) for kind in kinds) for layer, words in LAYER_WORDS.items()},
        "flops_b1": one.flops, "flops_b8": eight.flops,
        "read_bytes_b1": one.read_bytes, "written_bytes_b1": one.written_bytes,
        "read_bytes_b8": eight.read_bytes, "written_bytes_b8": eight.written_bytes,
        "ops_b1": ops, "leaf_calls_b1": sum(not list(layer.children()) for layer in module.modules()),
        "op_counts_b1": dict(one.counts),
        "operators": [[*row[:1], count, *row[1:]] for row, count in one.operators.items()],
    }  # fmt: skip


class _TraceCounts:
    def __init__(self) -> None:
        self.operators: Counter[tuple[Any, ...]] = Counter()  #: kind, flops, weights, read, written
        self.counts: Counter[str] = Counter()
        self.flops = self.read_bytes = self.written_bytes = 0


def _forward_pass(name: str, module: Any, inputs: list[Any]) -> _TraceCounts:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    seen = _TraceCounts()
    fixed = {id(value) for value in (*module.parameters(), *module.buffers())}
    kept: list[Any] = []  # tensors stay alive: an id is only a name as long as its owner lives

    def tensors(tree: Any) -> list[Any]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    def dispatch(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        op, ins, outs = func.__name__.split(".")[0], tensors((args, kwargs)), tensors(out)
        kept.extend(outs)
        weights = [x for x in ins if id(x) in fixed]
        if op in VIEW_OPERATORS or op in FREE_OPERATORS:
            if ins and len(weights) == len(ins):
                fixed.update(id(x) for x in outs)  # a weight transposed is still a weight
            return out
        count = flop_registry.get(func._overloadpacket)
        flops = int(count(*args, **(kwargs or {}), out_val=out)) if count is not None else 0
        kind = KIND_BY_OPERATOR.get(op, "attention" if "attention" in op else "elementwise")
        if op == "convolution" and args[8] > 1:
            kind = "depthwise" if args[8] == args[1].shape[0] else "grouped"
        elif op == "convolution" and args[1].shape[-1] == 1:
            kind = "pointwise"
        held = 0 if kind == "gather" else sum(x.numel() for x in weights)  # of a table it reads the rows it asks for
        read = sum(x.numel() for x in ins if id(x) not in fixed)
        seen.operators[kind, flops, held, read, sum(x.numel() for x in outs)] += 1
        seen.counts[op] += 1
        seen.flops += flops
        seen.read_bytes += sum(x.numel() * x.element_size() for x in ins)
        seen.written_bytes += sum(x.numel() * x.element_size() for x in outs)
        return out

    mode: Any = type("Trace", (TorchDispatchMode,), {"__torch_dispatch__": dispatch})
    try:
        with torch.no_grad(), mode():
            module(*inputs)
    except Exception as error:
        raise BadValue(
            f"{name!r} cannot be traced without numbers: {type(error).__name__}: {error}", hint="profile it on the device instead"
        ) from error
    return seen


def predict_profile(function: Function[..., Any], kind: str) -> Profile:
    model = learned.shipped_model(kind)
    runner = function.open()
    try:
        if not isinstance(runner.model, LoadedTorchModel) or not hasattr(runner.model.module, "parameters"):
            raise BadValue(
                f"function {function.name!r} is no torch model, so nothing can be said of it without running it",
                hint="make it a lamina.TorchModel, or profile it on the device",
            )
        record = trace_model(function.name, runner.model.module, runner.model.example)
    finally:
        runner.close()
    grid = model.predict(record)
    found = grid.profile(function.name, kind)
    largest = max(1, function.spec.max_batch)
    kept = [point for point in found.points if point.batch <= largest]
    places = [f"batch {batch} on {units} unit{'s'[: units > 1]}" for batch, units in model.probes(3) if batch <= largest]
    meta = found.meta | {"learnt_from": f"{len(model.library.functions)} functions", "worth_measuring": ", ".join(places)}
    return replace(found, points=kept, traits=interference.traits_from_record(record), meta=meta)
