"""Photos become inputs as torchvision and EfficientNet do it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lapilli import InvalidInputError, Preprocess
from lapilli.runtime.preprocess import open_photo, softmax, top

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photo(width: int, height: int) -> Image.Image:
    """Smooth colours, so that a shifted crop shows."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 / width, y * 255 / height, (x + y) % 256], -1)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.mark.parametrize("size", [(451, 300), (300, 451), (224, 224), (100, 640), (257, 255)])
def test_agrees_with_torchvision(size: tuple[int, int]) -> None:
    import torch
    import torchvision_without_ops

    torchvision_without_ops.allow()
    from torchvision.transforms import v2

    expected = v2.Compose(
        [v2.Resize(256), v2.CenterCrop(224), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    )(photo(*size))
    expected = v2.functional.normalize(expected, list(MEAN), list(STD))[None].numpy()
    given = Preprocess(size=(224, 224), resize=256, mean=MEAN, std=STD)(photo(*size))
    assert given.shape == (1, 3, 224, 224) and given.dtype == np.float32 and given.flags.c_contiguous
    np.testing.assert_allclose(given, expected, atol=1e-5)


def test_crop_before_scaling() -> None:
    prepare = Preprocess(size=(4, 4), crop_pct=0.5, interpolation="nearest", scale=1.0, mean=(127.0,), std=(128.0,))
    grey = Image.fromarray((np.arange(64, dtype=np.uint8) * 4).reshape(8, 8))
    expected = (np.asarray(grey)[2:6, 2:6].astype(np.float32) - 127) / 128
    np.testing.assert_array_equal(prepare(grey)[0, 0], expected)


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (3, 5)])
def test_tiny_photos_work(size: tuple[int, int]) -> None:
    assert Preprocess(size=(24, 32), crop_pct=0.875)(photo(*size)).shape == (1, 3, 24, 32)
    assert Preprocess(size=(24, 32), resize=32)(photo(*size)).shape == (1, 3, 24, 32)


def test_json_round_trip() -> None:
    prepare = Preprocess(size=(224, 320), crop_pct=7 / 8, interpolation="bicubic", scale=1.0, mean=MEAN, std=STD)
    assert Preprocess.loads(prepare.dumps()) == prepare


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": [224]}, "size must be"),
        ({"resize": 100}, "resize at least as large"),
        ({"interpolation": "cubic"}, "bilinear, bicubic, nearest, lanczos, not 'cubic'"),
        ({"std": [1, 0, 1]}, "std no zero"),
        ({"crop_pct": 0}, "crop_pct"),
        ({"men": [1]}, "unknown men"),
        ({"size": 3}, "cannot be read"),
    ],
)
def test_bad_metadata(change: dict[str, object], message: str) -> None:
    node = json.loads(Preprocess(size=(224, 224)).dumps()) | change
    with pytest.raises(InvalidInputError, match=message):
        Preprocess.loads(json.dumps(node))
    with pytest.raises(InvalidInputError, match="cannot be read"):
        Preprocess.loads("[1")


def test_photos_are_turned_and_other_files_refused(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6  # turned by 90 degrees
    buffer = io.BytesIO()
    photo(40, 20).save(buffer, "JPEG", exif=exif)
    (tmp_path / "turned.jpg").write_bytes(buffer.getvalue())
    assert open_photo(tmp_path / "turned.jpg").size == (20, 40)
    for name, data in (("text.jpg", b"not a photo"), ("half.jpg", buffer.getvalue()[:200])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidInputError, match="cannot be read as a photo"):
            open_photo(tmp_path / name)


def test_top_classes() -> None:
    logits = np.array([[0.0, 3.0, 1.0]], np.float32)
    labels = [label for label, _ in top(logits, 2, ["a", "b", "c"])]
    assert labels == ["b", "c"] and top(logits, 1)[0][0] == "class 1"
    assert softmax(np.array([0.25, 0.75])).tolist() == [0.25, 0.75]  # probabilities already
    assert softmax(np.array([1e4, 0.0])).tolist() == [1.0, 0.0]
