"""Model bundles: model files served without user code (`lamina serve --model`), alone or added to an app.

Gateway and workers load the same app from the same text. For a bundle that is a path whose last part holds what is in it, so
that what belongs beside an app, such as profiles, is looked for in its folder.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lamina.errors import BadValue
from lamina.sdk.model_repository import DEFAULT_BATCH, ModelEntry
from lamina.sdk.model_sources import fetch_model, is_address, model_file
from lamina.sdk.resources import GPU, SLO
from lamina.sdk.tensors import NUMPY, Port, Signature, Tensor
from lamina.types import FunctionSpec, ScaleSpec

if TYPE_CHECKING:
    from lamina.sdk.app import App
    from lamina.sdk.model_signatures import ModelFileSignature

PREFIX = "models="
PACKED = "models=packed"
"""Last part of the path of a bundle whose content lies beside it, in `PACKED_FILE`: its models are in folders below."""
PACKED_FILE = "models.json"
DATA_MARK = ".lamina-data"
"""File in a folder of code that was taken in: it is no part of an app that lies above it."""
MAX_ROWS = 1_024
_SETTINGS: dict[str, type] = {"slo": str, "gpu": str, "cores": int, "batch": int, "instances": int, "memory_mib": int}
_FIELDS = {"batch": "max_batch"}


class ModelBundle(Struct, frozen=True):
    entries: list[ModelEntry]
    file: str = ""  #: an app besides

    def target(self, folder: Path) -> str:
        return str(folder / (PREFIX + base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()))


def is_bundle(target: str) -> bool:
    return Path(target).name.startswith(PREFIX)


def read_bundle(target: str) -> ModelBundle:
    path = Path(target)
    try:
        if path.name == PACKED:
            return _placed(msgspec.json.decode((path.parent / PACKED_FILE).read_bytes(), type=ModelBundle), path.parent)
        return msgspec.json.decode(base64.urlsafe_b64decode(path.name.removeprefix(PREFIX)), type=ModelBundle)
    except OSError as error:
        raise BadValue(f"{path.parent / PACKED_FILE}: {error.strerror}", hint="the package was changed") from None
    except (msgspec.MsgspecError, ValueError):
        raise BadValue(f"{PREFIX}...: not readable", hint="use lamina serve --model NAME=FILE") from None


def _placed(bundle: ModelBundle, folder: Path) -> ModelBundle:
    """A bundle whose paths are below a folder."""
    entries = [replace(entry, path=str(folder / entry.path)) for entry in bundle.entries]
    return ModelBundle(entries, str(folder / bundle.file) if bundle.file else "")


def packed_bundle(target: str) -> tuple[bytes, dict[str, Path], str]:
    """A bundle for another machine: the text of its `PACKED_FILE`; the files of its models, by their names in the package; the
    app besides, if there is one."""
    bundle = read_bundle(target)
    files: dict[str, Path] = {}
    entries = []
    for number, entry in enumerate(bundle.entries):
        path = Path(entry.path)
        for file in _belonging(path):
            files[f"m{number}/{file.name}"] = file
        entries.append(replace(entry, path=f"m{number}/{path.name}"))
    where, _, name = bundle.file.partition(".py:")
    app = f"{Path(where).name}.py:{name}" if name else Path(bundle.file).name
    return msgspec.json.encode(ModelBundle(entries, app if bundle.file else "")), files, bundle.file


def _belonging(path: Path) -> list[Path]:
    """A model's file, and those beside it that it needs: weights kept apart (`model.onnx.data`), a configuration."""
    from lamina.sdk.model_function import CONFIG

    config = [path.parent / CONFIG] if path.suffix == ".safetensors" else []
    apart = sorted(one for one in path.parent.iterdir() if one.name.startswith(f"{path.name}") and one != path and one.is_file())
    stem = [one for one in (path.with_suffix(".data"), path.parent / f"{path.name}_data") if one.is_file() and one not in apart]
    return [path, *config, *apart, *stem]


def parse_model_option(text: str) -> ModelEntry:
    """Parse a `--model` option: NAME=SOURCE, and behind it what a config.pbtxt would say: NAME=FILE,slo=50ms,gpu=1/4. The
    source is a file, a folder or an address (`fetch_model`), which is fetched."""
    given, *more = text.split(",")
    name, equals, path = given.partition("=")
    if not equals or is_address(name):  # a file alone is called as it is
        name, path = Path(urlsplit(given).path.rstrip("/")).stem.lower(), given
    if not name or not path:
        raise BadValue(f"--model: {text!r} is not NAME=FILE", hint="such as resnet=models/resnet50.onnx")
    if not is_address(path) and not Path(path).exists():
        raise BadValue(f"--model: no file {path!r}", hint="give the path of an .onnx, .pt2 or .safetensors file, or an address")
    settings: dict[str, Any] = {}
    sha256 = ""
    for pair in more:
        key, _, value = pair.partition("=")
        if key == "sha256":
            sha256 = value
            continue
        if key not in _SETTINGS or not value:
            raise BadValue(
                f"--model: {pair!r} is no setting", hint=f"there is {', '.join(_SETTINGS)}, sha256: {name}=FILE,slo=50ms"
            )
        if _SETTINGS[key] is int and not value.isdecimal():
            raise BadValue(f"--model: {pair!r} is no whole number")
        settings[_FIELDS.get(key, key)] = _SETTINGS[key](value)
    found = fetch_model(path, sha256=sha256)
    found = model_file(found) if found.is_dir() else found
    return ModelEntry(name=name, path=str(found.resolve()), **settings)


def open_bundle(target: str) -> App:
    from lamina.sdk.app import App
    from lamina.sdk.app_loader import load_app

    bundle = read_bundle(target)
    app = load_app(bundle.file) if bundle.file else App("models")
    newest = {entry.name: entry.version for entry in bundle.entries}
    for entry in bundle.entries:
        add_model(app, entry, newest[entry.name] == entry.version)
    return app


def bundle_samples(app: App, target: str) -> dict[str, list[dict[str, Any]]]:
    """Sample inputs for profiling: zeros of the right shape, unknown lengths 1."""
    import numpy

    from lamina.sdk.model_function import ModelFunction
    from lamina.sdk.sample_inputs import samples_of

    bundle = read_bundle(target)
    found = samples_of(app, bundle.file) if bundle.file else {}
    for function in app.functions.values():
        if isinstance(function, ModelFunction):
            tensors = {port.name: port.tensor for port in function.signature.inputs if port.tensor is not None}
            if all(tensor.dtype != "BYTES" for tensor in tensors.values()):
                zeros = {
                    name: numpy.zeros([max(1, size) for size in tensor.shape], NUMPY[tensor.dtype])
                    for name, tensor in tensors.items()
                }
                found[function.name] = [zeros]
    return found


def add_model(app: App, entry: ModelEntry, is_newest: bool = True) -> None:
    """Add a model to an app. The newest version has the model's name; older ones have their number behind it."""
    from lamina.sdk.model_function import ModelFunction, check_gpu_signature

    name = entry.name if is_newest else f"{entry.name}.v{entry.version}"
    app.claim_name(name, entry.path)
    found, make = _open_file(Path(entry.path), bool(entry.gpu))
    signature, batched = configured_signature(entry, found)
    gpu = GPU(entry.gpu) if entry.gpu else None
    if gpu is not None:
        check_gpu_signature(signature, batched)
    max_batch = min(entry.max_batch or DEFAULT_BATCH, found.most or MAX_ROWS) if batched else 1
    spec = FunctionSpec(
        name=name,
        max_batch=max_batch,
        cores=entry.cores,
        gpu="may" if gpu is not None else "no",
        share=gpu.part if gpu is not None else 0.0,
        memory_mib=entry.memory_mib,
        scale=ScaleSpec(min=1, max=max(1, entry.instances)),
        slo=SLO(entry.slo or None).spec(),
    )
    signature = replace(signature, model=entry.name, version=entry.version)
    unbatched = "" if batched else found.unbatched or "max_batch_size: 0"
    app.functions[name] = ModelFunction(app, spec, signature, partial(make, signature, batched), entry.path, unbatched)


def configured_signature(entry: ModelEntry, found: ModelFileSignature) -> tuple[Signature, bool]:
    """The signature of the file, as the configuration wants it; they must agree."""
    signature, batched = found.signature, found.batched
    if entry.max_batch is not None and bool(entry.max_batch) != batched:
        if entry.max_batch and all(_has_open_first_axis(port) for port in (*signature.inputs, *signature.outputs)):
            signature = replace(
                signature, inputs=_without_batch_axis(signature.inputs), outputs=_without_batch_axis(signature.outputs)
            )
        elif batched:
            signature = replace(signature, inputs=_with_batch_axis(signature.inputs), outputs=_with_batch_axis(signature.outputs))
        else:
            raise BadValue("max_batch_size: the file has no batch axis", hint="write max_batch_size: 0")
        batched = not batched
    _check_tensors(entry.inputs, signature.inputs, "input")
    _check_tensors(entry.outputs, signature.outputs, "output")
    return signature, batched


def _has_open_first_axis(port: Port) -> bool:
    return port.tensor is not None and bool(port.tensor.shape) and port.tensor.shape[0] == -1


def _without_batch_axis(ports: tuple[Port, ...]) -> tuple[Port, ...]:
    return tuple(
        replace(port, tensor=Tensor(port.tensor.dtype, port.tensor.shape[1:])) for port in ports if port.tensor is not None
    )


def _with_batch_axis(ports: tuple[Port, ...]) -> tuple[Port, ...]:
    return tuple(
        replace(port, tensor=Tensor(port.tensor.dtype, (-1, *port.tensor.shape))) for port in ports if port.tensor is not None
    )


def _check_tensors(wanted: dict[str, tuple[str, list[int]]], ports: tuple[Port, ...], what: str) -> None:
    known = {port.name: port.tensor for port in ports if port.tensor is not None}
    for name, (dtype, dims) in wanted.items():
        if name not in known:
            raise BadValue(f"{what} {name!r}: the file has none", hint=f"there is {', '.join(known)}")
        tensor = known[name]
        fits = len(dims) == len(tensor.shape) and all(-1 in (a, b) or a == b for a, b in zip(dims, tensor.shape, strict=True))
        if dtype != tensor.dtype or not fits:
            raise BadValue(f"{what} {name!r}: {dtype} {dims}, but the file has {tensor.dtype} {list(tensor.shape)}")


def _open_file(path: Path, on_gpu: bool) -> tuple[ModelFileSignature, Any]:
    """Signature of a model file, and a factory of its function."""
    from lamina.sdk.model_function import OnnxFunction, TorchFileModel, TorchFunction, load_exported, read_safetensors
    from lamina.sdk.model_signatures import read_onnx, read_pt2

    if path.suffix == ".onnx":
        if on_gpu:
            raise BadValue(f"{path}: an .onnx file runs on the CPU", hint="export it to a .pt2, or leave gpu out")
        return read_onnx(path), partial(OnnxFunction, path)
    if path.suffix == ".pt2":
        found: ModelFileSignature = read_pt2(path)
        build: Callable[[], Any] = partial(load_exported, path)
    elif path.suffix == ".safetensors":
        found, build = read_safetensors(path)
    else:
        raise BadValue(f"{path}: no kind of model that can be served", hint="an .onnx, .pt2 or .safetensors file")
    return found, partial(TorchFileModel if on_gpu else TorchFunction, build, found.least)
