"""`python -m benchmarks.operators --out data/operators.jsonl`: what each model's operators do, without running one.

Every model is traced once at batch 1 on torch's `meta` device: shapes flow, numbers do not, no GPU and no weights are needed.
One line per model: its operators in the order of their time of first use, those alike counted together, as
`[kind, count, flops, weights, read, written]` (per operator and item; elements, not bytes, so that any precision can be
asked for; `weights` do not grow with the batch). Resumable: models that are in the file already are skipped.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu import zoo
from benchmarks.gpu.features import _VIEWS

V100 = Path("data/has-gpu/profile_models.csv")
"""The models of the published V100 measurements, all of torchvision."""

KINDS = {
    "convolution": "conv",
    "addmm": "matmul",
    "mm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "native_batch_norm": "norm",
    "_native_batch_norm_legit_no_training": "norm",
    "cudnn_batch_norm": "norm",
    "native_layer_norm": "norm",
    "_softmax": "softmax",
    "embedding": "gather",
    "max_pool2d_with_indices": "pool",
    "avg_pool2d": "pool",
    "mean": "pool",
    "_adaptive_avg_pool2d": "pool",
    "cat": "copy",
    "copy_": "copy",
    "clone": "copy",
    "_to_copy": "copy",
    "roll": "copy",
}
NOTHING = {"empty", "empty_like", "arange", "ones", "zeros", "full", "scalar_tensor", "lift_fresh", "_assert_tensor_metadata"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data/operators.jsonl"))
    options = parser.parse_args()
    known = {json.loads(line)["model"] for line in options.out.read_text().splitlines()} if options.out.exists() else set()
    published = [line.split(",")[0] for line in V100.read_text().splitlines()[1:]] if V100.exists() else []
    zoo.TORCHVISION += [name for name in published if name not in zoo.TORCHVISION]
    for name in [*zoo.ALL, *(name for name in published if name not in zoo.ALL)]:
        if name in known:
            continue
        try:
            row = {"model": name, "operators": traced(name)}
        except Exception as error:  # one model of many; the rest is still worth having
            print(f"- {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        with options.out.open("a") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        print(f"+ {name}: {len(row['operators'])} kinds of operators", flush=True)


def traced(name: str) -> list[list[Any]]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    # a regnet computes its widths with tensors while it is built, and `meta` tensors hold no numbers
    zoo.DEVICE = "cpu" if name.startswith("regnet") else "meta"
    model = zoo.build(name)
    zoo.DEVICE = "meta"
    model.module.to("meta")
    weights = {id(p) for p in model.module.parameters()} | {id(b) for b in model.module.buffers()}
    seen: Counter[tuple[Any, ...]] = Counter()

    class Trace(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.fixed: set[int] = set(weights)
            self.kept: list[Any] = []  # tensors stay alive: an id is only a name as long as its owner lives

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            op = func.__name__.split(".")[0]
            ins = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            outs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.kept += outs
            fixed = [x for x in ins if id(x) in self.fixed]
            if op in _VIEWS or op in NOTHING:
                if ins and len(fixed) == len(ins):
                    self.fixed |= {id(x) for x in outs}  # a weight transposed is still a weight
                return out
            count = flop_registry.get(func._overloadpacket)
            flops = int(count(*args, **(kwargs or {}), out_val=out)) if count is not None else 0
            kind = KINDS.get(op, "attention" if "attention" in op else "elementwise")
            if op == "convolution" and args[8] > 1:
                kind = "depthwise" if args[8] == args[1].shape[0] else "grouped"
            elif op == "convolution" and args[1].shape[-1] == 1:
                kind = "pointwise"
            held = sum(x.numel() for x in fixed)
            if kind == "gather":  # it reads the rows it asks for, not the table
                held = 0
            read = sum(x.numel() for x in ins if id(x) not in self.fixed)
            seen[kind, flops, held, read, sum(x.numel() for x in outs)] += 1
            return out

    inputs = model.make_input(1)
    with torch.no_grad(), Trace():
        model.module(inputs)
    return [[kind, count, flops, held, read, written] for (kind, flops, held, read, written), count in seen.items()]


if __name__ == "__main__":
    main()
