"""Is this line of text upside down? A JPEG file goes in, an answer comes out, and every step between is a kernel of one graph.

JPEG decoding, resize, normalisation and the last comparison are kernels of CUDA C (`jpeg.cu`) with twins for the host; the
classifier is a real model between them. A client sends the file and nothing else.

    lamina serve examples/jpeg/app.py
    python examples/jpeg/send.py line.jpg
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lamina
from lamina import kernels
from lamina.errors import LoadFailed

FILE_BYTES, MAX_H, MAX_W, OUT_H, OUT_W = 32_768, 96, 512, 48, 192
BLOCKS = 3 * (MAX_H // 8 + 2) * (MAX_W // 8 + 2)
SOURCE = (Path(__file__).parent / "jpeg.cu").read_text()

app = lamina.App("jpeg")


def decode_twin(files: Any, sizes: Any, scratch: Any, pixels: Any, extents: Any) -> None:
    """libjpeg instead of our own decoder; they differ by how they interpolate colours."""
    import cv2

    for place, size in enumerate(sizes):
        image = cv2.imdecode(files[place, :size], cv2.IMREAD_COLOR) if files[place, :2].tolist() == [0xFF, 0xD8] else None
        if image is not None and image.shape[0] <= MAX_H and image.shape[1] <= MAX_W:
            extents[place] = image.shape[:2]
            pixels[place, : image.shape[0], : image.shape[1]] = image


def resize_twin(pixels: Any, extents: Any, ready: Any) -> None:
    import numpy as np

    for place, (height, width) in enumerate(extents.tolist()):
        if not height:
            continue
        wide = min(OUT_W, -(-OUT_H * width // height))
        y = np.clip((np.arange(OUT_H, dtype=np.float32) + 0.5) * height / OUT_H - 0.5, 0, height - 1).astype(np.float32)
        x = np.clip((np.arange(wide, dtype=np.float32) + 0.5) * width / wide - 0.5, 0, width - 1).astype(np.float32)
        y0, x0 = y.astype(int), x.astype(int)
        y1, x1 = np.minimum(y0 + 1, height - 1), np.minimum(x0 + 1, width - 1)
        dy, dx = (y - y0)[:, None, None], (x - x0)[None, :, None]
        image = pixels[place].astype(np.float32)
        top = image[y0][:, x0] * (1 - dx) + image[y0][:, x1] * dx
        low = image[y1][:, x0] * (1 - dx) + image[y1][:, x1] * dx
        ready[place, :, :, :wide] = ((top * (1 - dy) + low * dy) / np.float32(127.5) - 1).transpose(2, 0, 1)


def answer_twin(chances: Any, extents: Any, label: Any, sureness: Any) -> None:
    import numpy as np

    is_image = extents[:, 0] > 0
    label[...] = np.where(is_image, chances[:, 1] > chances[:, 0], -1)
    sureness[...] = np.where(is_image, chances.max(-1), 0)


def model_file() -> Path:
    """The classifier, from the `rapidocr` wheel; Apache-2.0. The package itself is not imported."""
    found = find_spec("rapidocr")
    if found is None or not found.submodule_search_locations:
        raise LoadFailed("rapidocr is not installed, and its models are needed", hint="pip install 'lamina[ocr]'")
    return Path(next(iter(found.submodule_search_locations))) / "models" / "ch_ppocr_mobile_v2.0_cls_mobile.onnx"


decode = kernels.cuda_kernel(SOURCE, "jpeg_decode", twin=decode_twin)
resize = kernels.cuda_kernel(SOURCE, "resize", twin=resize_twin)
answer = kernels.cuda_kernel(SOURCE, "answer", twin=answer_twin)


@app.kernel_graph(slo="200ms", batch=8, scale=lamina.Scale(min=1, max=2), cpu=lamina.CPU(1, memory="512MiB"))
def orient(g: kernels.GraphBuilder) -> None:
    """1 if the text in a JPEG file stands on its head, 0 if not, -1 if it is no baseline JPEG; and how sure that is."""
    file, size = g.input("file", "uint8", (FILE_BYTES,)), g.input("size", "int32", ())
    blocks, pixels = g.temporary("blocks", "int16", (BLOCKS, 64)), g.temporary("pixels", "uint8", (MAX_H, MAX_W, 3))
    extents, ready = g.temporary("extents", "int32", (2,)), g.temporary("ready", "float32", (3, OUT_H, OUT_W))
    chances = g.temporary("chances", "float32", (2,))
    label, sureness = g.output("label", "int32", ()), g.output("sureness", "float32", ())
    g.launch(decode, file, size, kernels.out(blocks), kernels.out(pixels), kernels.out(extents), block=(256,))
    g.launch(resize, pixels, extents, kernels.out(ready), grid=(OUT_W // 32, OUT_H // 8), block=(32, 8))
    g.launch(kernels.onnx_kernel(model_file(), name="classify"), ready, kernels.out(chances))
    g.launch(answer, chances, extents, kernels.out(label), kernels.out(sureness), block=(32,))


def request(file: bytes) -> dict[str, Any]:
    """The body of a call for a JPEG file."""
    import numpy as np

    if len(file) > FILE_BYTES:
        raise lamina.errors.BadValue(f"file: {len(file)} bytes", hint=f"at most {FILE_BYTES}: a line of text, not a page")
    return {"file": np.frombuffer(file.ljust(FILE_BYTES, b"\0"), np.uint8), "size": len(file)}
