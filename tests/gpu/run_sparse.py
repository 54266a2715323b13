"""Block lists on a GPU: right against the fp64 reference, and how much faster than dense attention.

python tests/gpu/run_sparse.py check            random lists on every backend that walks them
python tests/gpu/run_sparse.py time --out F     ratios 0.25 to 1 beside the dense kernels and FlexAttention, one run
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

import jfa  # noqa: E402
from jfa.bench import peers, runner, shapes  # noqa: E402
from jfa.block_sparse import select_blocks  # noqa: E402
from jfa.layout import log_uniform_lengths, offsets_from_lengths  # noqa: E402
from jfa.verify.sparse_checks import wrong  # noqa: E402

BACKENDS = ("hopper", "portable")


def check(count: int) -> int:
    """Print each problem that is wrong; return how many."""
    bad = 0
    for seed in range(count):
        for backend in BACKENDS:
            found = wrong(seed, backend)
            if found:
                bad += 1
                print(f"seed {seed}, {backend}: {'; '.join(found)}", flush=True)
        if seed % 10 == 9:
            print(f"{seed + 1} problems, {bad} wrong so far", flush=True)
    print(f"{count} problems on {', '.join(BACKENDS)}: {bad} wrong", flush=True)
    return bad


# ----------------------------------------------------------------------------------------------------------------- timing
def timed(call, inputs, grad) -> tuple[float, float]:
    """Return (forward ms, backward ms) on the device."""
    forward = runner.median_ms(call, torch.device("cuda"))
    out = call()
    backward = runner.median_ms(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), torch.device("cuda"))
    return forward, backward


def time(args) -> dict:
    """Time dense and block-sparse attention, one run."""
    lengths = (log_uniform_lengths(args.sequences, 2048, 8192, seed=1) + 127) // 128 * 128
    offsets, rows = offsets_from_lengths(lengths.cuda()), int(lengths.sum())
    q, k, v = (torch.randn(rows, args.heads, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    grad, longest = torch.randn(rows, args.heads, 128, device="cuda").bfloat16(), int(lengths.max())
    attend = lambda backend, lists=None: (
        lambda: jfa.jagged_flash_attention(
            q, k, v, offsets, offsets, longest, longest, backend=backend, block_lists=lists
        )
    )
    shape, found = shapes.Shape("lists", args.heads, args.heads, 128, lengths.clone), []

    def note(name: str, ratio: float, times: tuple[float, float], **more):
        found.append(dict(name=name, ratio=ratio, forward_ms=times[0], backward_ms=times[1], **more))
        print(
            f"{name:12s} {ratio:5.2f}  forward {times[0]:7.3f} ms  backward {times[1]:7.3f} ms  {more or ''}",
            flush=True,
        )

    for backend in BACKENDS:
        note(f"{backend} dense", 1.0, timed(attend(backend), (q, k, v), grad))
    for ratio in args.ratios:
        choose = lambda r=ratio: select_blocks(q, k, offsets, offsets, ratio=r, max_seq_len_kv=longest)
        lists = choose()
        pairs = int(lists.starts[-1]) / float((lengths // 128).double().pow(2).sum() * args.heads)
        selection = runner.median_ms(choose, torch.device("cuda"))
        for backend in BACKENDS:
            more = dict(pairs=round(pairs, 4), selection_ms=round(selection, 4))
            note(backend, ratio, timed(attend(backend, lists), (q, k, v), grad), **more)
        if args.flex:
            inputs = shapes.Inputs(shape, q, k, v, grad, offsets, offsets, longest, longest, lists)
            note("flex", ratio, timed(peers.flex(inputs), (q, k, v), grad))
    facts = dict(
        sequences=args.sequences, heads=args.heads, head_dim=128, rows=rows, lengths="log-uniform 2048..8192, seed 1"
    )
    return dict(environment=runner.environment(torch.device("cuda")), shape=facts, block_sparse=found)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--count", type=int, default=60, help="check: problems")
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.0, 0.5, 0.25])
    parser.add_argument("--flex", action="store_true", help="time: FlexAttention over the same blocks, too")
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
