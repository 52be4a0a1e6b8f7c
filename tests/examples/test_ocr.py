"""The real models read pages whose text is known."""

from __future__ import annotations

import contextlib
import io
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import encoding
from lamina.core.workflow.flow import Each, Task
from lamina.errors import BadValue
from lamina.sdk.app import App

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def read(ocr: App, page: bytes) -> list[str]:
    return [line["text"] for line in ocr.workflows["read_page"].local(page)]


def crop(png: bytes) -> dict[str, Any]:
    import pixels

    return {"box": None, "image": pixels.decode(png)}


@pytest.fixture(scope="module")
def lines(ocr: App) -> list[dict[str, Any]]:
    """The lines of a sample page, as the detector cuts them out."""
    import sample

    return ocr.functions["detect"].local(sample.invoice(seed=0)[0])


# ------------------------------------------------------------------ the whole page


@pytest.mark.parametrize("seed", range(5))
def test_a_page_is_read_nearly_without_error(ocr: App, seed: int) -> None:
    import sample

    page, truth = sample.invoice(seed)
    assert sample.accuracy(read(ocr, page), truth) >= 0.97


def test_a_jpeg_is_read_like_a_png(ocr: App) -> None:
    from PIL import Image

    import sample

    page, truth = sample.invoice(seed=3)
    file = io.BytesIO()
    Image.open(io.BytesIO(page)).save(file, "JPEG", quality=85)
    assert sample.accuracy(read(ocr, file.getvalue()), truth) >= 0.97


@pytest.mark.parametrize("degrees", [-4, 7])
def test_a_crooked_page_is_read(ocr: App, degrees: int) -> None:
    from PIL import Image

    import sample

    page, truth = sample.invoice(seed=1)
    file = io.BytesIO()
    Image.open(io.BytesIO(page)).rotate(degrees, expand=True, fillcolor="white", resample=Image.Resampling.BICUBIC).save(
        file, "PNG"
    )
    found = read(ocr, file.getvalue())
    assert sample.accuracy(sorted(found), sorted(truth)) >= 0.95  # sorted: rows of a crooked page may swap


@pytest.mark.parametrize("degrees", [90, 270])
def test_a_line_that_runs_up_or_down_is_read(ocr: App, degrees: int) -> None:
    from PIL import Image

    import sample

    line = Image.open(io.BytesIO(sample.line("Sideways 1234", size=30))).rotate(degrees, expand=True)
    page = Image.new("RGB", (200, 320), "white")
    page.paste(line, (80, 40))
    file = io.BytesIO()
    page.save(file, "PNG")
    assert read(ocr, file.getvalue()) == ["Sideways 1234"]


def test_an_empty_page_has_no_lines(ocr: App) -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (300, 200), "white").save(file, "PNG")
    assert read(ocr, file.getvalue()) == []


def test_boxes_lie_on_the_page_and_go_round_from_the_top_left(ocr: App, lines: list[dict[str, Any]]) -> None:
    import sample

    for left_top, right_top, right_bottom, left_bottom in (line["box"] for line in lines):
        assert 0 <= left_top[0] < right_top[0] < sample.WIDTH_PX
        assert 0 <= right_top[1] < right_bottom[1] < sample.HEIGHT_PX
        assert left_bottom[0] < right_bottom[0]
        assert left_top[1] < left_bottom[1]


# ------------------------------------------------------------------- single stages


def test_a_batch_reads_what_each_line_says_alone(ocr: App, lines: list[dict[str, Any]]) -> None:
    runner = ocr.functions["recognise"].open()
    together = runner.run([{"line": line} for line in lines])
    alone = [runner.run([{"line": line}])[0] for line in lines]
    assert [line["text"] for line in together] == [line["text"] for line in alone]
    assert [line["score"] for line in together] == pytest.approx([line["score"] for line in alone], abs=2e-3)


def test_lines_survive_the_way_between_workers(ocr: App, lines: list[dict[str, Any]]) -> None:
    travelled = encoding.decode(encoding.encode(lines[0]))  # its image is read-only now, as a worker gets it
    recognise, orient = ocr.functions["recognise"], ocr.functions["orient"]
    assert recognise.local(orient.local(travelled)) == recognise.local(orient.local(lines[0]))


@pytest.mark.parametrize("text", ["TOTAL 431.50 EUR", "Bill to: Harbour Coffee Ltd"])
def test_a_line_on_its_head_is_turned_and_read(ocr: App, text: str) -> None:
    import sample

    line = ocr.functions["orient"].local(crop(sample.line(text, upside_down=True)))
    assert ocr.functions["recognise"].local(line)["text"] == text


def test_without_turning_a_line_on_its_head_cannot_be_read(ocr: App) -> None:
    import sample

    text = "TOTAL 431.50 EUR"
    assert ocr.functions["recognise"].local(crop(sample.line(text, upside_down=True)))["text"] != text


@pytest.mark.parametrize(
    "text",
    [
        "INVOICE 2024-117",
        "from sheep over the the sheep 27 the hill lazy the the over jumps the watch The",
        "while the hill the jumps hill quick sheep dog bank fox river quick watch sheep",
    ],
)
def test_an_upright_line_is_left_alone_however_long(ocr: App, text: str) -> None:
    import sample

    line = crop(sample.line(text, size=20))
    np.testing.assert_array_equal(ocr.functions["orient"].local(line)["image"], line["image"])


def test_a_core_grows_on_every_side_by_area_over_perimeter_times_the_ratio(ocr: App) -> None:
    import detection

    chances = np.zeros((64, 256), np.float32)
    chances[20:31, 40:161] = 1.0  # dilation adds one row and one column
    found = detection.lines(np.zeros((64, 256, 3), np.uint8), chances)
    height, width = 11, 121
    grow = detection.GROW_RATIO * height * width / (2 * (height + width))
    (left, top), _, (right, bottom), _ = found[0]["box"]
    assert (right - left, bottom - top) == pytest.approx((width + 2 * grow, height + 2 * grow), abs=1.5)


def test_a_page_of_specks_does_not_become_thousands_of_jobs(ocr: App) -> None:
    import detection

    chances = np.zeros((320, 480), np.float32)
    for row in range(4, 316, 10):
        for column in range(4, 470, 12):
            chances[row : row + 5, column : column + 6] = 1.0
    found = detection.lines(np.zeros((320, 480, 3), np.uint8), chances)
    assert len(found) == detection.MAX_LINES


def test_the_flow_reads_every_line_as_a_job_of_its_own(ocr: App) -> None:
    (each,) = [node for node in ocr.workflows["read_page"].flow.nodes.values() if isinstance(node, Each)]
    assert [node.function for node in each.body.nodes.values() if isinstance(node, Task)] == ["orient", "recognise"]


# ---------------------------------------------------------------------- bad inputs


def png_header(width: int, height: int) -> bytes:
    return SIGNATURE + b"\x00\x00\x00\x0dIHDR" + struct.pack(">II", width, height) + b"\x08\x02\x00\x00\x00"


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ("page.png", "is text where bytes are needed"),
        ({"a": 1}, "is an object where bytes are needed"),
        (b"", "0 bytes"),
        (b"once upon a time", "neither PNG nor JPEG"),
        (SIGNATURE, "neither PNG nor JPEG"),
        (b"\xff\xd8\xff", "neither PNG nor JPEG"),
        (b"\xff\xd8\xff\xe0\x00\x00" * 20, "neither PNG nor JPEG"),
        (png_header(1, 1), "1 x 1 pixels are too few"),
        (png_header(0, 100), "too few"),
        (png_header(100_000, 100_000), "100000 x 100000 pixels are too many"),
        (png_header(640, 480), "damaged"),
    ],
)
def test_what_is_no_image_is_refused_with_a_reason(ocr: App, image: object, says: str) -> None:
    with pytest.raises(BadValue, match=says):
        ocr.functions["detect"].local(image)


@given(st.binary(max_size=200), st.sampled_from([b"", SIGNATURE, png_header(64, 64), b"\xff\xd8", b"\xff\xd8\xff\xe0\x00\x04ab"]))
def test_no_bytes_bring_the_decoder_down(ocr: App, tail: bytes, head: bytes) -> None:
    import pixels

    with contextlib.suppress(BadValue):  # and nothing else
        assert pixels.decode(head + tail).ndim == 3


@pytest.mark.parametrize(
    "line", [None, {}, {"image": [1, 2]}, {"image": np.zeros((4, 4), np.uint8)}, {"image": np.zeros((0, 4, 3), np.uint8)}]
)
@pytest.mark.parametrize("function", ["orient", "recognise"])
def test_a_line_without_an_image_is_refused(ocr: App, function: str, line: object) -> None:
    with pytest.raises(BadValue, match=r"^line: "):
        ocr.functions[function].local(line)


def test_one_bad_line_does_not_spoil_its_batch(ocr: App, lines: list[dict[str, Any]]) -> None:
    runner = ocr.functions["recognise"].open()
    bad, good = runner.run([{"line": {}}, {"line": lines[0]}])
    assert isinstance(bad, BadValue)
    assert good["text"].startswith("INVOICE")


# ------------------------------------------------------------------------ the sample


@pytest.mark.parametrize(
    ("found", "truth", "share"),
    [(["abcd"], ["abcd"], 1.0), (["abxd"], ["abcd"], 0.75), ([], ["abcd"], 0.0), (["ab", "cd"], ["abcd"], 0.75)],
)
def test_accuracy_counts_edits(ocr: App, found: list[str], truth: list[str], share: float) -> None:
    import sample

    assert sample.accuracy(found, truth) == share


def test_a_seed_gives_one_page_and_another_seed_another(ocr: App) -> None:
    import sample

    assert sample.invoice(5) == sample.invoice(5)
    assert sample.invoice(5)[1] != sample.invoice(6)[1]
