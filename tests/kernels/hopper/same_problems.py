"""Small problems that an H200 has solved, to be solved again: on a GPU to record, on the emulator to compare."""

from __future__ import annotations

import torch

from jfa.attention import jagged_flash_attention

try:
    from tests.attention_cases import Case, make
except ImportError:  # tests/gpu/run_hopper.py has this folder's grandparent on its path
    from attention_cases import Case, make

BF16, FP16 = torch.bfloat16, torch.float16
DETERMINISTIC = dict(deterministic=True)

# name -> (problem, how to call). Each takes another path through the kernels.
PROBLEMS = {
    "full": (Case([70, 0, 33], [130, 5, 40], heads=1, kv_heads=1, dim=64, dtype=BF16), DETERMINISTIC),
    "causal, grouped": (
        Case([60, 40], [60, 90], heads=2, kv_heads=1, dim=64, dtype=FP16, options=dict(causal=True)),
        {},
    ),
    "window, D 128": (
        Case([80, 9], [70, 20], heads=1, kv_heads=1, dim=128, dtype=BF16, options=dict(window_size=20)),
        DETERMINISTIC,
    ),
    "window, D 128, dQ added": (
        Case([80, 9], [70, 20], heads=1, kv_heads=1, dim=128, dtype=BF16, options=dict(window_size=20)),
        {},
    ),
    "shared 20": (Case([1] * 3, [130, 0, 30], heads=2, kv_heads=2, dim=64, dtype=BF16, shared_q=20), DETERMINISTIC),
    "shared 128": (Case([1] * 2, [150, 40], heads=1, kv_heads=1, dim=128, dtype=BF16, shared_q=128), DETERMINISTIC),
    "shared 100, causal": (
        Case([1] * 2, [90, 130], heads=1, kv_heads=1, dim=64, dtype=FP16, shared_q=100, options=dict(causal=True)),
        DETERMINISTIC,
    ),
}


def results(case: Case, device: str, options: dict) -> dict[str, torch.Tensor]:
    """Output, log-sum-exp and the three gradients, on the CPU."""
    arguments = make(case, device)
    out, lse = jagged_flash_attention(**arguments, **options, backend="hopper", return_lse=True)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(case.seed + 1)).to(out)
    grads = torch.autograd.grad(out, [arguments[n] for n in ("query", "key", "value")], grad)
    found = dict(zip(("out", "lse", "dquery", "dkey", "dvalue"), (out, lse, *grads)))
    return {name: x.detach().cpu() for name, x in found.items()}
