"""Sends JPEG files of lines of text to the server: `python examples/jpeg/send.py LINE.jpg ...`"""

from __future__ import annotations

import sys
from pathlib import Path

import lamina
from app import request


def main(names: list[str]) -> None:
    with lamina.Client() as client:
        for name in names:
            found = client.call("orient", request(Path(name).read_bytes()))
            said = {0: "upright", 1: "upside down", -1: "no baseline JPEG"}[int(found["label"])]
            print(f"{name}: {said} ({found['sureness']:.3f})")


if __name__ == "__main__":
    main(sys.argv[1:])
