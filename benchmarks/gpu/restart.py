"""Where does a new executor process spend its time, from its first import to its first answer?"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.gpu.common import Bench


def run(bench: Bench) -> None:
    """Once: after other measurements all files are in memory."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu.restart"], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        what, _, seconds = line.rpartition(" ")
        bench.report.add(what, float(seconds), "s")
    if done.returncode:
        print(done.stderr[-1000:])


def main() -> None:
    begin_s = time.perf_counter()

    def mark(what: str) -> None:
        nonlocal begin_s
        print(f"{what} {time.perf_counter() - begin_s:.3f}", flush=True)
        begin_s = time.perf_counter()

    import torch

    mark("import torch")
    from lamina.gpu.executor import open_executor
    from lamina.gpu.slicers import open_slicer
    from lamina.sdk.app_loader import load_app

    app = load_app("benchmarks/gpu/app.py")
    mark("import the app")
    slicer = open_slicer("green")
    executor = open_executor(slicer)
    mark("open the device")
    torch.zeros(1, device="cuda")
    mark("first tensor")
    import torchvision  # noqa: F401

    mark("import torchvision")
    import transformers  # noqa: F401
    from transformers import BertModel  # noqa: F401

    mark("import transformers")
    kept = []  # a graph that nobody holds takes its memory pool with it
    for name in ("resnet50", "mobilenet_v3_large", "shufflenet_v2_x0_5", "convnext_tiny", "bert_base"):
        model = app.functions[name].open().model
        assert model is not None
        mark(f"{name}: make the module")
        executor.load(name, model.module, model.example, buckets=(1, 16), staged=executor.models.stage(model.module))
        executor.models.pin(name)
        mark(f"{name}: weights")
        for bucket in (16, 1):
            executor.models.warmup_run(name, bucket, 0b111)
            mark(f"{name}: first run of {bucket}")
            kept.append(executor.models.capture(name, bucket, 0b111))
            mark(f"{name}: graph of {bucket}")


if __name__ == "__main__":
    main()
