"""gRPC reflection, which anyone may ask without a token: a request is part of its response, so it is as short as names are."""

from __future__ import annotations

import pytest

from lamina.errors import BadValue
from lamina.gateway.oip.reflection import MAX_REQUEST_BYTES, Reflection

pytest.importorskip("google.protobuf")


def test_a_request_longer_than_names_are_is_refused_before_it_is_read() -> None:
    reflection = Reflection()
    for method in reflection.methods.values():
        for field in ("host", "file_by_filename", "file_containing_symbol", "list_services"):
            long, short = (reflection.request_type(**{field: "a" * size}) for size in (MAX_REQUEST_BYTES, 100))
            assert method.parse(short.SerializeToString()) == short
            with pytest.raises(BadValue, match="a request of 4099 bytes"):
                method.parse(long.SerializeToString())
