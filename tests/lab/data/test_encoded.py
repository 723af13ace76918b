"""The scale and the orientation of decoded images."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from graticule.lab.data.images import decode
from image_files import draw_image

GRAY = np.arange(256).reshape(16, 16)


def encoded(values, kind, **options):
    content = io.BytesIO()
    (values if isinstance(values, Image.Image) else Image.fromarray(values)).save(content, kind, **options)
    return content.getvalue()


def color_png(values):
    """Write a PNG of 16-bit color, which Pillow reads but does not write."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width, _ = values.shape
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0))
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "content",
    [
        encoded((GRAY * 257).astype(np.uint16), "TIFF"),
        encoded((GRAY * 257).astype(np.uint16), "PNG"),
        color_png(np.repeat(GRAY[..., None] * 257, 3, -1)),
        encoded(GRAY.astype(np.uint8), "TIFF"),
    ],
    ids=["16 bits", "16 bits of PNG", "16 bits in color", "8 bits"],
)
def test_every_type_of_number_has_the_scale_of_8_bits(content):
    np.testing.assert_array_equal(np.asarray(decode(content)), np.repeat(GRAY[..., None], 3, -1))


def test_transparent_and_animated_images_and_other_scales_are_refused():
    opaque, half = draw_image(1).convert("RGBA"), draw_image(2).convert("RGBA")
    half.putpixel((0, 0), (255, 0, 0, 127))
    palette = draw_image(3).quantize(8)
    for image, options, message in (
        (opaque, {"format": "PNG"}, None),
        (half, {"format": "PNG"}, "opaque, got transparent pixels"),
        (half, {"format": "WEBP"}, "opaque, got transparent pixels"),
        (half.convert("LA"), {"format": "PNG"}, "opaque, got transparent pixels"),
        (palette, {"format": "PNG", "transparency": palette.getpixel((0, 0))}, "opaque, got transparent pixels"),
        *(
            (draw_image(1), {"format": kind, "save_all": True, "append_images": [draw_image(2)]}, "one frame, got 2")
            for kind in ("PNG", "WEBP", "TIFF")
        ),
        *((Image.fromarray(GRAY.astype(of)), {"format": "TIFF"}, "channel, got 32") for of in (np.float32, np.int32)),
    ):
        content = io.BytesIO()
        image.save(content, **options)
        if message is None:
            np.testing.assert_array_equal(np.asarray(decode(content.getvalue())), np.asarray(draw_image(1)))
        else:
            with pytest.raises(ValueError, match=message):
                decode(content.getvalue())


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", [*range(1, 9), 99])
def test_the_orientation_of_exif_data_is_applied(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(draw_image(0, 4, 6), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    image = decode(content)
    np.testing.assert_array_equal(
        np.asarray(image), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    )
    assert image.size == ((4, 6) if orientation in (5, 6, 7, 8) else (6, 4))
