"""Scaffold of a Python app for a document: one function to fill in per Resource, and the document itself."""

from __future__ import annotations

import keyword
import pprint
import re
from typing import Any

from lamina.asl.document import resources_of, short_name

_HEAD = '''"""Made from a document in the States Language. Fill in the functions; what they return is their result."""

from __future__ import annotations

import lamina
from lamina.sdk.workflow import Workflow

app = lamina.App({app!r})
'''

_FUNCTION = """

@app.function(name={name!r})
def {identifier}(input):
    raise NotImplementedError({resource!r})
"""

_TAIL = """

DOCUMENT = {document}

{identifier} = Workflow.from_asl(DOCUMENT, app=app, name={name!r}, bind={{{bind}}})
"""


def app_source(document: dict[str, Any], name: str) -> str:
    slug = _slug(name)
    used = {"app", "lamina", "Workflow", "DOCUMENT", _identifier(slug)}
    parts = [_HEAD.format(app=slug)]
    names: dict[str, str] = {}
    for resource in resources_of(document):
        identifier = _identifier(_slug(short_name(resource)))
        while identifier in used:
            identifier += "_"
        used.add(identifier)
        names[resource] = identifier
        parts.append(_FUNCTION.format(name=_slug(identifier), identifier=identifier, resource=resource))
    written = pprint.pformat(document, width=110, sort_dicts=False)
    bind = ", ".join(f"{resource!r}: {identifier}" for resource, identifier in names.items())
    parts.append(_TAIL.format(document=written, identifier=_identifier(slug), name=slug, bind=bind))
    return "".join(parts)


def _slug(text: str) -> str:
    """A name an app or function may have."""
    plain = re.sub(r"[^a-z0-9._-]+", "_", text.lower()).strip("._-")
    return plain[:60] or "workflow"


def _identifier(text: str) -> str:
    name = re.sub(r"\W", "_", text)
    return f"_{name}" if name[:1].isdigit() or keyword.iskeyword(name) else name
