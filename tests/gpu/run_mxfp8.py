"""The MXFP8 quantiser on a GPU: its bits against the PyTorch form, its speed against a copy of as many bytes.

python tests/gpu/run_mxfp8.py check            random jagged tensors, both encodings, NaN and infinities among the values
python tests/gpu/run_mxfp8.py time --out F     bytes per second of each encoding and head dim beside torch's copy_, one run
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from jfa import mxfp8  # noqa: E402
from jfa.bench import runner  # noqa: E402
from jfa.kernels.common import quantize  # noqa: E402
from jfa.layout import log_uniform_lengths, offsets_from_lengths  # noqa: E402
from jfa.verify.mxfp8_checks import wrong_bytes  # noqa: E402

CUDA = torch.device("cuda")


def check(count: int) -> int:
    """Print each problem that is wrong; return how many."""
    bad = 0
    for seed in range(count):
        found = wrong_bytes(seed)
        if found:
            bad += 1
            print(f"seed {seed}: {'; '.join(found)}", flush=True)
    print(f"{count} problems: {bad} wrong", flush=True)
    print(f"the conversion by itself: {facts()}", flush=True)
    return bad


@triton.jit
def _cast(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(tl.float8e4nv).to(tl.uint8, bitcast=True))


def facts() -> dict[str, str]:
    """Return the byte that the conversion to e4m3 gives for numbers where the emulator had to choose."""
    numbers = (math.nan, -math.nan, math.inf, -math.inf, 1e30, -0.0, 2.0**-10, 448.0, 464.0)
    x, y = torch.tensor(numbers, device=CUDA), torch.zeros(16, dtype=torch.uint8, device=CUDA)
    _cast[(1,)](torch.nn.functional.pad(x, (0, 16 - len(numbers))), y, 16)
    names = ("nan", "-nan", *map(str, numbers[2:]))
    return {name: f"0x{byte:02X}" for name, byte in zip(names, y.tolist())}


# ----------------------------------------------------------------------------------------------------------------- timing
def moved(x: torch.Tensor, found) -> int:
    """Return the bytes that a quantiser reads and writes."""
    return sum(t.numel() * t.element_size() for t in (x, *(t for y in found for t in (y.data, y.scales))))


def copy_ms(size: int) -> float:
    """Return the time of torch's copy_ that reads and writes ``size`` bytes in all."""
    source = torch.empty(size // 2, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    return runner.median_ms(lambda: target.copy_(source), CUDA)


def time(args) -> dict:
    """Time each encoding of each head dim."""
    lengths = log_uniform_lengths(args.sequences, 64, 8192, seed=1)
    offsets, rows = offsets_from_lengths(lengths.cuda()), int(lengths.sum())
    found = []
    for dim in args.dims:
        x = torch.randn(rows, args.heads * 128 // dim, dim, device=CUDA).bfloat16()
        calls = {"both": lambda x=x: quantize.quantize_both(x, offsets)}
        for axis in mxfp8.AXES:
            calls[axis] = lambda x=x, axis=axis: (quantize.quantize_jagged(x, offsets, axis),)
        for name, call in calls.items():
            size, ms = moved(x, call()), runner.median_ms(call, CUDA)
            beside = copy_ms(size)
            share = beside / ms
            found.append(dict(encoding=name, head_dim=dim, bytes=size, ms=ms, copy_ms=beside, of_copy=share))
            print(
                f"D {dim:3d} {name:9s} {ms:.4f} ms, {size / ms / 1e9:.2f} TB/s, copy {size / beside / 1e9:.2f} TB/s: {share:.1%}"
            )
    found.append(
        dict(encoding="block records alone", ms=runner.median_ms(lambda: quantize.block_records(offsets, rows), CUDA))
    )
    shape = dict(sequences=args.sequences, rows=rows, lengths="log-uniform 64..8192, seed 1", dtype="bfloat16")
    return dict(environment=runner.environment(CUDA), shape=shape, conversion=facts(), quantizer=found)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--count", type=int, default=300, help="check: problems")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8, help="time: of head dim 128; as many columns with others")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--out", type=Path, help="time: write the result as JSON")
    args = parser.parse_args()
    if args.what == "check":
        return 1 if check(args.count) else 0
    result = time(args)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
