"""A recurrent layer with its length known (steps unrolled) and varying (a loop in one kernel), beside torch.

python benchmarks/recurrent.py [--units 256] [--steps 100] [--batches 1 8 64] [--device NAME]
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from common import RESULTS, median, report
from torch.export import Dim

import lapilli


def torch_ms(layer: torch.nn.Module, x: torch.Tensor) -> str:
    """Torch on the CPU, and by CUDA where there is one (tensors that stay there)."""
    cpu = median(lambda: layer(x)) * 1e3
    if not torch.cuda.is_available():
        return f"{cpu:.2f}"
    there, on_device = torch.nn.LSTM(layer.input_size, layer.hidden_size).cuda().eval(), x.cuda()

    def run() -> None:
        there(on_device)
        torch.cuda.synchronize()

    return f"{cpu:.2f}, CUDA {median(run) * 1e3:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--device", help="index or part of a name")
    given = parser.parse_args()
    rows, raw = [], []
    RESULTS.mkdir(exist_ok=True)
    torch.manual_seed(0)
    layer = torch.nn.LSTM(given.units, given.units).eval()
    with torch.no_grad():
        for batch in given.batches:
            x = torch.randn(given.steps, batch, given.units)
            cells = [str(batch)]
            for shapes in (None, ({0: Dim("time", max=4 * given.steps)},)):
                lapilli.compile(layer, (x,), dynamic_shapes=shapes).save(RESULTS / "recurrent.lap")
                program = lapilli.load(RESULTS / "recurrent.lap", device=given.device)
                torch.testing.assert_close(program(x)[0], layer(x)[0], rtol=1e-4, atol=1e-4)
                cells.append(f"{median(partial(program, x)) * 1e3:.2f}")
            cells.append(torch_ms(layer, x))
            rows.append(cells)
            raw.append(cells)
            print(cells, flush=True)
    names = ["batch", "length known, ms", "length varies, ms", "torch, ms"]
    report("recurrent", program.device.name, names, rows, raw)


if __name__ == "__main__":
    main()
