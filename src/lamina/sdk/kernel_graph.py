"""Functions of kernel graphs: `@app.kernel_graph()` makes one, and it is served, called and mapped like any other."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lamina.errors import BadValue
from lamina.kernels.graph import KernelGraph
from lamina.kernels.validation import check_graph
from lamina.sdk.binding import NOTHING, Param
from lamina.sdk.function import Function
from lamina.sdk.loaded_kernel_graph import OIP_DTYPES, LoadedKernelGraph
from lamina.sdk.model_function import no_code
from lamina.sdk.tensors import Port, Signature, Tensor
from lamina.types import FunctionSpec

if TYPE_CHECKING:
    from lamina.sdk.app import App


class KernelGraphFunction(Function[..., Any]):
    """A function that runs a kernel graph. The graph is checked here, when its app is imported: nothing unsound is deployed."""

    def __init__(self, app: App, graph: KernelGraph, spec: FunctionSpec, place: str, doc: str, *, home: bool) -> None:
        super().__init__(app, no_code, spec, place, home=home)
        try:
            self.plan = check_graph(graph)
            inputs = tuple(_port(graph, one.name) for one in graph.of_kind("input"))
            outputs = tuple(_port(graph, one.name) for one in graph.of_kind("output"))
        except BadValue as error:
            raise BadValue(f"{place}: {error.message}", hint=error.hint) from None
        self.graph = graph
        self.target = partial(LoadedKernelGraph, graph, self.plan)
        self.is_class = self.runs_in_graphs = True
        self.signature = Signature(inputs, outputs, "lamina_kernel_graph", graph=graph.digest)
        optional = [one.name for one in graph.of_kind("constant", "output")]  #: which may be given keys
        self.params = (*(Param(port.name, True) for port in inputs), *(Param(name, False) for name in optional))
        self.defaults = {param.name: NOTHING if param.required else None for param in self.params}
        self._doc = doc

    @property
    def doc(self) -> str:
        return self._doc

    def __repr__(self) -> str:
        return f"<kernel graph {self.name!r} of app {self.app.name!r}: {self.graph.digest}>"


def _port(graph: KernelGraph, name: str) -> Port:
    buffer = graph.buffer(name)
    if buffer.dtype not in OIP_DTYPES:
        raise BadValue(
            f"buffer {name!r}: {buffer.dtype} as {buffer.kind}",
            hint="requests have no complex numbers: two buffers, or one more axis",
        )
    return Port(name, Tensor(OIP_DTYPES[buffer.dtype], buffer.shape))
