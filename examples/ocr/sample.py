"""Sample pages whose text is known, so that reading them can be marked.

python examples/ocr/sample.py page.png --seed 1
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

WIDTH_PX, HEIGHT_PX = 640, 480
_MARGIN_PX = 40
_CUSTOMERS = ("Harbour Coffee Ltd", "Northern Light Studio", "Green Valley Farm", "Atlas Bicycle Works", "Old Mill Bakery")
_GOODS = ("Paper, white A4", "Desk lamp, brass", "Coffee beans 2 kg", "Printer ribbon", "Oak shelf, small", "Wall clock")
_MONTHS = ("January", "March", "May", "July", "September", "November")


def invoice(seed: int = 0) -> tuple[bytes, list[str]]:
    """An invoice as a PNG file, and its lines in reading order."""
    rng = random.Random(seed)
    prices = [rng.randrange(300, 60_000) for _ in range(2)]
    goods = rng.sample(_GOODS, 2)
    amounts = [f"{price / 100:.2f}" for price in prices]
    ink = rng.randrange(0, 70)
    page = Image.new("RGB", (WIDTH_PX, HEIGHT_PX), (rng.randrange(235, 256),) * 3)
    draw = ImageDraw.Draw(page)
    lines: list[str] = []

    def write(text: str, y: int, size: int, *, right: bool = False) -> None:
        place = (WIDTH_PX - _MARGIN_PX, y) if right else (_MARGIN_PX, y)
        draw.text(place, text, fill=(ink,) * 3, font=ImageFont.load_default(size), anchor="ra" if right else "la")
        lines.append(text)

    write(f"INVOICE {rng.randrange(2020, 2030)}-{rng.randrange(100, 1000)}", 36, 40)
    write(f"Date: {rng.randrange(1, 29)} {rng.choice(_MONTHS)} {rng.randrange(2020, 2030)}", 110, 24)
    write(f"Bill to: {rng.choice(_CUSTOMERS)}", 152, 24)
    for row, (what, amount) in enumerate(zip(goods, amounts, strict=True)):
        write(what, 226 + 48 * row, 24)
        write(amount, 226 + 48 * row, 24, right=True)
    draw.line((_MARGIN_PX, 334, WIDTH_PX - _MARGIN_PX, 334), fill=(ink,) * 3, width=2)
    write(f"TOTAL {sum(prices) / 100:.2f} EUR", 360, 34)
    return _png(page), lines


def line(text: str, *, size: int = 32, upside_down: bool = False) -> bytes:
    """One line of text and nothing else, as a PNG file."""
    font = ImageFont.load_default(size)
    left, top, right, bottom = font.getbbox(text)
    image = Image.new("RGB", (round(right - left) + 16, round(bottom - top) + 12), "white")
    ImageDraw.Draw(image).text((8 - left, 6 - top), text, fill="black", font=font)
    return _png(image.rotate(180) if upside_down else image)


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def accuracy(read: list[str], truth: list[str]) -> float:
    """Share of the characters that are right: 1 - edits / length. Line breaks count as characters."""
    ours, theirs = "\n".join(read), "\n".join(truth)
    return max(0.0, 1 - _edits(ours, theirs) / max(1, len(theirs)))


def _edits(a: str, b: str) -> int:
    """Fewest insertions, deletions and replacements that turn `a` into `b`."""
    costs = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, costs[0] = costs[0], i
        for j, y in enumerate(b, 1):
            diagonal, costs[j] = costs[j], min(costs[j] + 1, costs[j - 1] + 1, diagonal + (x != y))
    return costs[-1]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Write a sample page and print its text.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    page, lines = invoice(options.seed)
    options.file.write_bytes(page)
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
