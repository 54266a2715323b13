"""A problem to choose kernel configurations for where there are no tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from jfa.kernels.base import Problem
from jfa.masks import Band


def example_problem(head_dim: int, band: Band | None = None, rows_q: int = 4096, **changes) -> Problem:
    """Return one sequence of ``rows_q`` queries and 4096 keys, in bf16 with 4 heads; ``changes`` are other fields."""
    offsets = torch.tensor([0, 4096], dtype=torch.int32)
    problem = Problem(
        num_batches=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=head_dim,
        head_dim_v=head_dim,
        rows_q=rows_q,
        rows_kv=4096,
        rows_out=rows_q,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        sm_scale=head_dim**-0.5,
        band=band or Band(),
        broadcast_q=False,
        deterministic=False,
        query_offset=offsets,
        key_offset=offsets,
    )
    return replace(problem, **changes)
