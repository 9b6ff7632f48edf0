"""PyTorch on a Vulkan device, operator by operator: the Mandelbrot set, as one would write it for any device.

    python examples/eager.py [--device vulkan] [--width N]

Needs no import but torch where Lapilli is installed. Every operator is queued and returns at once; only the last line, which
wants numbers, waits.
"""

from __future__ import annotations

import argparse
import time

import torch


def mandelbrot(width: int, height: int, steps: int, device: str) -> torch.Tensor:
    """How many steps every point of [-2.2, 0.8] × [-1.2, 1.2] stays within a circle of radius 2: int32 [height, width]."""
    x = torch.linspace(-2.2, 0.8, width).to(device)
    y = torch.linspace(-1.2, 1.2, height).to(device)[:, None]
    real, imaginary = torch.zeros(2, height, width, device=device).unbind()
    count = torch.zeros(height, width, dtype=torch.int32, device=device)
    for _ in range(steps):
        real, imaginary = real * real - imaginary * imaginary + x, 2 * real * imaginary + y
        count += (real * real + imaginary * imaginary < 4).int()
        real.clamp_(-10, 10)
        imaginary.clamp_(-10, 10)
    return count


def draw(count: torch.Tensor, steps: int) -> str:
    """The picture in letters."""
    shades = " .:-=+*#%@"
    rows = (count * (len(shades) - 1) // steps).cpu().tolist()
    return "\n".join("".join(shades[shade] for shade in row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--width", type=int, default=96)
    options = parser.parse_args()
    steps = 40
    for _ in ("compiles its kernels", "finds them"):
        begin = time.perf_counter()
        count = mandelbrot(options.width, options.width * 5 // 16, steps, options.device)
        queued = time.perf_counter()
        picture = draw(count, steps)
        print(f"{queued - begin:.3f} s to queue, {time.perf_counter() - begin:.3f} s until the picture is here")
    print(picture)
    if options.device.startswith("vulkan"):
        memory = torch.vulkan.max_memory_allocated() // 1024
        print(
            f"{torch.vulkan.get_device_name()}: {memory} KiB at most; on the CPU ran {torch.vulkan.fallbacks() or 'nothing'}"
        )


if __name__ == "__main__":
    main()
