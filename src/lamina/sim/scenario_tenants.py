"""Reader of `[[tenant]]`: weight and limits of a tenant."""

from __future__ import annotations

from typing import Any

from lamina.sim.toml_fields import Field, read_present, required
from lamina.types import Tenant

_KEYS = ("name", "weight", "rate", "burst", "concurrent", "unit_seconds", "memory")


def read_tenant(row: Field) -> Tenant:
    fields = row.table(*_KEYS)
    values: dict[str, Any] = read_present(
        fields,
        weight=("weight", lambda field: field.number(above=True)),
        rate=("rate_per_s", Field.per_s),
        burst=("burst", Field.number),
        concurrent=("concurrent", Field.integer),
        unit_seconds=("unit_s_per_day", Field.number),
        memory=("memory_mib", Field.memory_mib),
    )
    return Tenant(name=required(row, fields, "name").text(), **values)
