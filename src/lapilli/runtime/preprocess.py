"""Converts a photo to a model's input, as the `preprocess` entry of the program's metadata says.

The metadata value is JSON: `{"size": [height, width], "resize": shorter side or null, "crop_pct": fraction,
"interpolation": "bilinear" | "bicubic" | "nearest" | "lanczos", "scale": factor, "mean": [...], "std": [...]}`.
With `resize` the photo's shorter side is scaled to it and the centre of `size` is cut out (torchvision's presets);
without it the centre, `crop_pct` of what fits, is cut out and scaled to `size` (EfficientNet). A pixel p, 0 to 255,
becomes `(p * scale - mean) / std`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidFileError, InvalidInputError
from lapilli.runtime.extras import require
from lapilli.runtime.limits import load_json

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST_SIDE = 1 << 14
MOST_PIXELS = 1 << 27
"""Of a photo while it is scaled; Pillow's own limit for a file is about as high."""

METADATA_KEY = "preprocess"
LABELS_KEY = "labels"

Interpolation = Literal["bilinear", "bicubic", "nearest", "lanczos"]


@dataclass(frozen=True)
class Preprocess:
    """Converts a photo to an input: float32, (1, channels, height, width).

    The number of channels is len(mean): 1 (grey) or 3 (RGB). Raises InvalidInputError for values out of range.
    """

    size: tuple[int, int]
    """(height, width) in pixels."""
    resize: int | None = None
    """Shorter side in pixels before the centre crop, or None: crop first, then scale."""
    crop_pct: float = 1.0
    interpolation: Interpolation = "bilinear"
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        """Raises InvalidInputError for values out of range."""
        sizes = [*self.size, *([] if self.resize is None else [self.resize])]
        numbers = [self.crop_pct, self.scale, *self.mean, *self.std]
        if not all(type(n) is int for n in sizes) or not all(
            isinstance(n, int | float) and math.isfinite(n) for n in numbers
        ):
            raise InvalidInputError("preprocess: sizes must be whole numbers, and the others finite ones.")
        if any(n > LARGEST_SIDE for n in sizes):
            raise InvalidInputError(
                f"preprocess: a side is at most {LARGEST_SIDE} pixels; got {self.size}, {self.resize}."
            )
        if len(self.size) != 2 or min(self.size) < 1 or (self.resize is not None and self.resize < max(self.size)):
            raise InvalidInputError(
                f"preprocess: size must be [height, width], resize at least as large; got {self.size}, {self.resize}."
            )
        if self.interpolation not in get_args(Interpolation):
            choices = ", ".join(get_args(Interpolation))
            raise InvalidInputError(f"preprocess: interpolation must be one of {choices}, not {self.interpolation!r}.")
        if (
            len(self.mean) not in (1, 3)
            or len(self.std) != len(self.mean)
            or 0 in self.std
            or not 0 < self.crop_pct <= 1
        ):
            raise InvalidInputError(
                "preprocess: mean and std must have 1 or 3 values each, std no zero, and crop_pct be in (0, 1]."
            )

    def dumps(self) -> str:
        """The metadata value."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Preprocess:
        """Parses the metadata value.

        Raises:
            InvalidInputError: it is not of the form above.
        """
        try:
            node: dict[str, Any] = load_json(text, "The metadata 'preprocess'")
            unknown = set(node) - {field.name for field in fields(Preprocess)}
            if unknown:
                raise InvalidInputError(f"preprocess: unknown {', '.join(sorted(unknown))}.")
            values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in node.items()}
            return Preprocess(**values)
        except InvalidInputError:
            raise
        except (InvalidFileError, ValueError, TypeError, AttributeError) as error:
            raise InvalidInputError(f"preprocess: the metadata {text[:80]!r} cannot be read: {error}") from error

    def __call__(self, image: Image) -> NDArray[np.float32]:
        """The input for one photo: float32, (1, channels, height, width)."""
        require("image", "Preprocessing photos", "PIL")
        from PIL import Image as images

        photo = _of_8_bits(image).convert("L" if len(self.mean) == 1 else "RGB")
        filters = {
            "bilinear": images.Resampling.BILINEAR,
            "bicubic": images.Resampling.BICUBIC,
            "nearest": images.Resampling.NEAREST,
            "lanczos": images.Resampling.LANCZOS,
        }
        height, width = self.size
        if self.resize is not None:
            shorter = min(photo.size)
            scaled = [self.resize * side // shorter for side in photo.size]
            if math.prod(scaled) > MOST_PIXELS:
                raise InvalidInputError(
                    f"A photo of {photo.width}×{photo.height} would have {scaled[0]}×{scaled[1]} pixels on its way into the "
                    f"model; at most {MOST_PIXELS} are possible. Cut it first."
                )
            photo = photo.resize((scaled[0], scaled[1]), filters[self.interpolation])
            left, top = round((photo.width - width) / 2), round((photo.height - height) / 2)
            photo = photo.crop((left, top, left + width, top + height))
        else:
            fit = min(photo.width / width, photo.height / height) * self.crop_pct
            box = (max(1, int(fit * width)), max(1, int(fit * height)))
            left, top = (photo.width - box[0]) // 2, (photo.height - box[1]) // 2
            photo = photo.crop((left, top, left + box[0], top + box[1]))
            photo = photo.resize((width, height), filters[self.interpolation])
        pixels = np.asarray(photo, dtype=np.float32).reshape(height, width, len(self.mean))
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        values = (pixels * np.float32(self.scale) - mean) / std
        return np.ascontiguousarray(values.transpose(2, 0, 1)[None], dtype=np.float32)


def open_photo(path: Path) -> Image:
    """Opens a photo and turns it upright, by its EXIF orientation.

    Raises:
        InvalidInputError: the file is no image, or has more pixels than Pillow's limit.
    """
    require("image", "Reading photos", "PIL")
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            image.load()
            photo: Image.Image = ImageOps.exif_transpose(image)
            return photo
    except (
        Exception
    ) as error:  # Pillow's readers raise what they meet: OSError, SyntaxError, ValueError, struct.error, …
        raise InvalidInputError(f"{path} cannot be read as a photo: {error}") from error


def _of_8_bits(image: Image) -> Image:
    """Converts 16-bit grey (PNG, TIFF) to 8 bits; Pillow's own conversion would clip it to white."""
    from PIL import Image as images

    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)
    most, least = (float(values.max()), float(values.min())) if values.size else (0.0, 0.0)
    if image.mode == "F" or not 0 <= least <= most <= 0xFFFF:
        raise InvalidInputError(
            f"A photo has pixels from {least:g} to {most:g}; they must be of 8 or 16 bits. Convert it first."
        )
    if image.mode == "I" and most <= 0xFF and image.format != "PNG":
        return image  # of 8 bits in a wide format
    return images.fromarray(((values.astype(np.uint32) * 255 + 0x7FFF) // 0xFFFF).astype(np.uint8))


def softmax(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Softmax over the last axis. Values that are probabilities already (at least 0, sum 1) are returned unchanged."""
    values = logits.astype(np.float64)
    if values.size and values.min() >= 0 and np.allclose(values.sum(-1), 1, atol=1e-3):
        return values
    exp = np.exp(values - values.max(-1, keepdims=True))
    return np.asarray(exp / exp.sum(-1, keepdims=True))


def top(logits: NDArray[np.floating[Any]], k: int, labels: list[str] | None = None) -> list[tuple[str, float]]:
    """The k most probable classes of one row of logits, as (label, probability)."""
    probabilities = softmax(logits.reshape(-1))
    best = np.argsort(probabilities)[::-1][:k]
    return [(labels[i] if labels and i < len(labels) else f"class {i}", float(probabilities[i])) for i in best.tolist()]
