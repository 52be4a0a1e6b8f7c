"""Reader of `[[tenant]]`: weight and limits of a tenant."""

from __future__ import annotations

from typing import Any

from lamina.sim.fields import Field, given, needed
from lamina.types import Tenant

_KEYS = ("name", "weight", "rate", "burst", "concurrent", "unit_seconds", "memory")


def read_tenant(row: Field) -> Tenant:
    fields = row.table(*_KEYS)
    values: dict[str, Any] = given(
        fields,
        weight=("weight", lambda field: field.number(above=True)),
        rate=("rate_per_s", Field.per_s),
        burst=("burst", Field.number),
        concurrent=("concurrent", Field.whole),
        unit_seconds=("unit_s_per_day", Field.number),
        memory=("memory_mib", Field.memory_mib),
    )
    return Tenant(name=needed(row, fields, "name").text(), **values)
