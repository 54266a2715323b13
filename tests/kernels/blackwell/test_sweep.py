"""Every synchronisation of the Blackwell forward dropped in turn: the emulator finds each, or it is argued here why it need not."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

from jfa.block_sparse import lists_from_mask  # noqa: E402
from jfa.emulator import explore, sweep  # noqa: E402
from jfa.kernels.blackwell import launch  # noqa: E402
from jfa.kernels.blackwell.config import forward_config  # noqa: E402
from tests.kernels.blackwell.cases import make  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# The text of a line whose loss nothing finds: why.
SUPERFLUOUS = {
    "tlx.barrier_wait(accs.fulls[0], phase)": "that of half 1, waited for next, is committed later by the same pipe",
    'tlx.fence("async_shared")': "a warning here, not an error: fbtriton puts this fence there by itself",
}


def test_every_dropped_synchronisation_of_the_forward_is_found(monkeypatch):
    monkeypatch.setattr(launch, "EMULATED_SMS", 1)  # one CTA takes all tiles, so that every ring wraps
    problem, q, k, v, _ = make([300, 280], [300, 140])
    config = replace(forward_config(problem, clc=False), kv_slots=3)
    lists = launch.query_list(problem, config.tile_rows)
    result = sweep.sweep(
        lambda: [launch.forward(problem, q, k, v, lists, config)[0].nan_to_num()], select=lambda m: m.how == "drop"
    )
    assert len(result.mutants) > 30
    assert [str(m) for m in result.clean if m.site.text.strip() not in SUPERFLUOUS] == []


@pytest.mark.parametrize("len_q", [[300, 280], [100, 128]], ids=["halves", "split keys"])
def test_every_dropped_synchronisation_of_rows_in_two_boxes_is_found(monkeypatch, len_q):
    monkeypatch.setattr(launch, "EMULATED_SMS", 1)
    problem, q, k, v, _ = make(len_q, [700, 140], head_dim=192, head_dim_v=128)
    config = forward_config(problem, clc=False)
    lists = launch.query_list(problem, config.tile_rows)
    result = sweep.sweep(
        lambda: [launch.forward(problem, q, k, v, lists, config)[0].nan_to_num()], select=lambda m: m.how == "drop"
    )
    assert len(result.mutants) > 30
    assert [str(m) for m in result.clean if m.site.text.strip() not in SUPERFLUOUS] == []


def test_every_dropped_synchronisation_over_block_lists_is_found(monkeypatch):
    """Lists with an odd number of entries, one entry and none; the causal mask has tiles with masked blocks at one end."""
    monkeypatch.setattr(launch, "EMULATED_SMS", 1)
    problem, q, k, v, _ = make([300, 280], [500, 140])
    masks = [torch.tensor([[[1, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]]).bool(), torch.ones(1, 3, 2).bool()]
    lists = lists_from_mask(masks, problem.query_offset, problem.key_offset, total_q=len(q), total_kv=len(k))
    problem = replace(problem, block_lists=lists)
    config = replace(forward_config(problem, clc=False), kv_slots=3)
    tiles = launch.query_list(problem, config.tile_rows)
    result = sweep.sweep(
        lambda: [launch.forward(problem, q, k, v, tiles, config)[0].nan_to_num()], select=lambda m: m.how == "drop"
    )
    assert len(result.mutants) > 25
    assert [str(m) for m in result.clean if m.site.text.strip() not in SUPERFLUOUS] == []


@pytest.mark.parametrize("len_q", [[280], [100]], ids=["halves", "split keys"])
def test_every_schedule_of_rows_in_two_boxes_is_right(monkeypatch, len_q):
    """Two tiles of up to three blocks where queries come in halves: every ring wraps, K's tail at each block, and O's slots do."""
    monkeypatch.setattr(launch, "EMULATED_SMS", 1)
    problem, q, k, v, _ = make(len_q, [300], head_dim=192, head_dim_v=128)
    config = forward_config(problem, clc=False)
    lists = launch.query_list(problem, config.tile_rows)
    found = explore.explore(lambda: [launch.forward(problem, q, k, v, lists, config)[0].nan_to_num()])
    assert found.proved, str(found)
