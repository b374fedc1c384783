"""Time the products of one layer in int8, bfloat16 and float32, by the number of tokens.

    python benchmarks/engine/products.py
    python benchmarks/engine/products.py --rows 1,8 --threads 1 --json FILE

The shapes are those of SmolLM2-135M. Each product reads another copy of its weight, until the
copies take more memory than the caches, as in a step. ``ours`` are the compiled products of
`tasc_engine.kernels.cpu.products`: ``int8`` with rounding of the inputs, and the float types that
this processor multiplies by AVX-512. ``oneDNN int8`` is ``torch.ops.onednn.qlinear_pointwise`` of
rounded inputs, and ``torch int8`` is ``torch._int_mm``, without scales. The other bfloat16 and
float32 are torch's products of weights that oneDNN has laid out. The ceiling is the time of reading
the int8 weight. Calls come in turn. A table goes to stdout, and the last line is one JSON object.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor, nn

from benchmarks.common import (
    about,
    add_json,
    add_repeats,
    at_least,
    digits,
    finish,
    listed,
    parser_of,
    show_table,
    use_one_thread,
    versions,
)
from benchmarks.engine.steps import bandwidth
from tasc_engine.kernels.cpu.products import multiplies
from tasc_engine.model.linears import CompiledLinear, Linear, packed

SHAPES = {"qkv": (960, 576), "out": (576, 576), "gate, up": (3072, 576), "down": (576, 1536)}
SHAPES["head"] = (49152, 576)
CACHES = 128 << 20  # bytes, more than a core can keep
DTYPES = (torch.bfloat16, torch.float32)
OURS = {
    f"our {dtype}".replace("torch.", ""): dtype for dtype in DTYPES if multiplies(dtype.itemsize)
}
_SHIFT = 128
_onednn: Any = torch.ops.onednn

Product = Callable[[Tensor], Any]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--rows", type=numbers, default=(1, 8, 32, 128), help="tokens of a step (1,8,32,128)"
    )
    parser.add_argument("--threads", type=at_least(1), default=1, help="threads (1)")
    add_repeats(parser, 9)
    add_json(parser)
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(at_least(1), listed(text)))


def ours(layer: nn.Linear) -> Product:
    return CompiledLinear.rounding(layer)


def onednn(layer: nn.Linear) -> Product:
    weight = layer.weight.detach()
    scales = weight.abs().amax(1) / 127
    packed = _onednn.qlinear_prepack((weight / scales[:, None]).round().to(torch.int8), None)
    points = torch.zeros(len(scales), dtype=torch.int32)

    def product(x: Tensor) -> Any:
        return _onednn.qlinear_pointwise(
            x, 1.0, _SHIFT, packed, scales, points, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return product


def int_mm(layer: nn.Linear) -> Product:
    weight = torch.randint(-127, 128, layer.weight.shape, dtype=torch.int8).T
    return lambda x: torch._int_mm(x, weight)


def cast(layer: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    made = nn.Linear(layer.in_features, layer.out_features, bias=False)
    made.weight.data = layer.weight.detach().to(dtype)
    return made


def of_ours(dtype: torch.dtype) -> Callable[[nn.Linear], Product]:
    return lambda layer: CompiledLinear(packed([[cast(layer, dtype)]]))


def of_torch(dtype: torch.dtype) -> Callable[[nn.Linear], Product]:
    return lambda layer: Linear(cast(layer, dtype).weight)


MAKERS: dict[str, Callable[[nn.Linear], Product]] = {
    "our int8": ours,
    "oneDNN int8": onednn,
    "torch int8": int_mm,
    **{name: of_ours(dtype) for name, dtype in OURS.items()},
    **{f"{dtype}".replace("torch.", ""): of_torch(dtype) for dtype in DTYPES},
}
KINDS = tuple(MAKERS)


def bytes_of(kind: str) -> int:
    """Bytes of a weight."""
    return 4 if "float32" in kind else 2 if "bfloat16" in kind else 1


def inputs(kind: str, rows: int, width: int) -> Tensor:
    x = torch.randn(rows, width)
    if kind == "oneDNN int8":
        return torch.randint(1, 256, x.shape, dtype=torch.uint8)
    if kind == "torch int8":
        return torch.randint(-127, 128, x.shape, dtype=torch.int8)
    return x.bfloat16() if "bfloat16" in kind else x


@torch.inference_mode()
def micros(rows: tuple[int, ...], shape: tuple[int, int], repeats: int) -> dict[str, list[float]]:
    """Microseconds of a product of each kind, by number of rows."""
    products, layer = dict[str, list[Product]](), nn.Linear(shape[1], shape[0], bias=False)
    for kind in KINDS:
        copies = min(math.ceil(CACHES / (math.prod(shape) * bytes_of(kind))), 100)
        products[kind] = [MAKERS[kind](layer) for _ in range(copies)]
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for count in rows:
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for repeat in range(repeats + 1):
            for kind in KINDS:
                x = inputs(kind, count, shape[1])
                began = time.perf_counter()
                for product in products[kind]:
                    product(x)
                took = (time.perf_counter() - began) / len(products[kind])
                times[kind] += [took] * bool(repeat)  # the first run warms up
        for kind in KINDS:
            found[kind].append(1e6 * median(times[kind]))
    return found


def main() -> None:
    options = arguments()
    use_one_thread()
    torch.set_num_threads(options.threads)
    rate = bandwidth(CACHES)
    table, records = list[list[str] | None](), dict[str, Any]()
    for name, shape in SHAPES.items():
        least = 1e6 * math.prod(shape) / rate
        found = micros(options.rows, shape, options.repeats)
        for at, count in enumerate(options.rows):
            cells = [digits(found[kind][at]) for kind in KINDS]
            table.append([f"{name}, {shape[0]} x {shape[1]}", str(count), *cells, digits(least)])
        table.append(None)
        records[name] = {"shape": shape, "read_us": least, **found}
    headings = ("weight", "tokens", *KINDS, "reading int8")
    show_table("microseconds of a product", headings, table[:-1])
    finish(
        {
            "benchmark": "products",
            "rows": options.rows,
            "threads": options.threads,
            "products": records,
            "versions": versions("torch", "numba"),
            **about(),
        },
        options.json,
    )


if __name__ == "__main__":
    main()
