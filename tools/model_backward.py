"""Modelled cycles of the Blackwell backward's variants: the tables of docs/blackwell-notes.md.

    python tools/model_backward.py            the tables; nothing here needs a GPU
    python tools/model_backward.py --plot DIR  and the timelines of the first and the shipped variant, as pictures

The rates are those of jfa/emulator/rates.py for a B200. "Busy" is the tensor cores' share of the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
from pathlib import Path

import torch

import jfa.emulator as emulator
from jfa.emulator.rates import B200
from jfa.emulator.timeline import Timeline
from jfa.kernels.blackwell import examples, launch
from jfa.kernels.blackwell.config import BLOCK, backward_config
from jfa.kernels.common.padded_rows import padded_rows, row_constants
from jfa.kernels.common.ragged import empty_tma_ready
from jfa.layout import offsets_from_lengths
from jfa.masks import Band
from jfa.schedule import key_tiles
from jfa.schedule.assign import zigzag_slot

STEADY = (0.35, 0.8)  # the part of a run that counts as its middle
VARIANTS = {
    "1 staging buffer, no slice held": dict(dq_stages=1, held_slices=0),
    "2, 0": dict(dq_stages=2, held_slices=0),
    "2, 2": dict(dq_stages=2, held_slices=2),
    "4, 0": dict(dq_stages=4, held_slices=0),
    "4, 4": dict(dq_stages=4, held_slices=4),
    "4, 5 (shipped)": dict(dq_stages=4, held_slices=5),
    "4, 8 (spills)": dict(dq_stages=4, held_slices=8),
}


def timed(launch, **options) -> Timeline:
    """Return the timeline of the last launch that ``launch()`` makes; ``options`` are the emulator's."""
    with emulator.options(policy="timed", rates=B200, trace=True, **options):
        launch()
    return Timeline.of(emulator.last())


def staging() -> None:
    """Print cycles of one tile of 128 keys against 1024 queries, D = 128, by staging buffers and held slices."""
    print("one tile, 128 keys, 1024 queries, D = 128\n  variant                          cycles   busy  in the middle")
    for name, choices in VARIANTS.items():
        line = timed(lambda: examples.backward(**choices))
        middle = tuple(line.start + share * line.cycles for share in STEADY)
        print(f"  {name:32} {line.cycles:7,.0f}  {line.busy():5.1%}  {line.busy('tensor', middle):5.1%}")


def wide() -> None:
    """Print cycles of both kernels of the backward of 192 columns (values: 128) on one SM, and the tensor cores' share."""
    saved, launch.EMULATED_SMS = launch.EMULATED_SMS, 1
    print("\nD = 192, Dv = 128              dK, dV: cycles   busy  in the middle    dQ: cycles   busy  in the middle")
    for len_q, len_kv, causal in ((1024, 128, False), (128, 1024, False), (512, 512, False), (512, 512, True)):
        cells = []
        for example in (examples.wide_backward, examples.wide_dq):
            line = timed(lambda: example(len_q, len_kv, causal), max_ctas=1)
            middle = tuple(line.start + share * line.cycles for share in STEADY)
            cells.append(f"{line.cycles:14,.0f}  {line.busy():5.1%}  {line.busy('tensor', middle):13.1%}")
        mask = ", causal" if causal else ""
        print(f"  {f'{len_q} queries, {len_kv} keys{mask}':28}" + "".join(cells))
    launch.EMULATED_SMS = saved


def shared_queries(group: int) -> None:
    """Print cycles of 32 shared queries and six sequences of 512 keys on one SM: dQ resident, or added to memory by every tile."""
    problem, q, k, v, _ = examples.example(32, 6 * 512)
    q = q.repeat(1, group, 1)
    problem = dataclasses.replace(
        problem, num_heads=group, num_batches=6, rows_out=6 * 32, broadcast_q=True, max_seq_len_q=0,
        key_offset=offsets_from_lengths([512] * 6),
    )  # fmt: skip
    dout = torch.randn(problem.rows_out, group, problem.head_dim, generator=torch.Generator().manual_seed(1)).to(
        q.dtype
    )
    rows, lists = padded_rows(problem, BLOCK), launch.key_list(problem)
    constants = row_constants(problem, rows, torch.zeros_like(dout), dout, torch.zeros(group, problem.rows_out), None)
    dk, dv = (empty_tma_ready(x, x.shape[2]).zero_() for x in (k, v))
    sums = torch.zeros(group, BLOCK, problem.head_dim)
    config = backward_config(problem, clc=False, form="single")
    launch.EMULATED_SMS = 1
    resident = timed(lambda: launch.launch_resident(problem, dout, q, k, v, dk, dv, *constants, *lists, config))
    contended = timed(lambda: launch.launch_backward(problem, dout, q, k, v, dk, dv, sums, *constants, *lists, config))
    cycles = f"resident {resident.cycles:,.0f} cycles, contended {contended.cycles:,.0f}"
    print(f"32 shared queries, 6 x 512 keys, query heads per key head {group}, one SM: {cycles}")


def schedules(seeds: int = 20, sms: int = 148, heads: int = 4) -> None:
    """Print the makespan over max(largest tile, mean load) of the backward's key tiles; a tile costs its query blocks plus one."""
    print("\nmakespan / bound, 148 SMs, H4                       round robin  zigzag   queue")
    for name, batches, least, most, causal in (
        ("self, B128, log-uniform 16..4096", 128, 16, 4096, False),
        ("self causal, B128, log-uniform 16..4096", 128, 16, 4096, True),
        ("self, B16, log-uniform 128..8192", 16, 128, 8192, False),
    ):
        ratios = torch.tensor([_ratios(seed, batches, least, most, causal, sms, heads) for seed in range(seeds)]).mean(
            0
        )
        print(f"  {name:48}  {ratios[0]:9.2f}  {ratios[1]:6.2f}  {ratios[2]:6.2f}")


def _ratios(seed: int, batches: int, least: int, most: int, causal: bool, sms: int, heads: int) -> list[float]:
    uniform = torch.rand(batches, generator=torch.Generator().manual_seed(seed))
    lengths = (least * (most / least) ** uniform).long().tolist()
    band = Band.make(causal=causal)
    offsets = offsets_from_lengths(lengths)
    total, block = sum(lengths), BLOCK
    tiles = key_tiles(offsets, offsets, block, block, total_q=total, total_kv=total, band=band, longest_first=False)
    costs = (tiles.cost[: tiles.counts[1]] + 1).repeat_interleave(heads)
    order = costs.sort(descending=True).values.tolist()
    bound = max(max(order), sum(order) / sms)
    dealt = [0.0] * sms
    for i, cost in enumerate(costs.tolist()):
        dealt[i % sms] += cost
    folded = [
        sum(order[s] for r in range(len(order) // sms + 1) if (s := zigzag_slot(r, w, sms)) < len(order))
        for w in range(sms)
    ]
    free = [0.0] * sms
    for cost in order:
        heapq.heappush(free, heapq.heappop(free) + cost)
    return [max(x) / bound for x in (dealt, folded, free)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, metavar="DIR")
    folder = parser.parse_args().plot
    staging()
    wide()
    print()
    for group in (1, 4):
        shared_queries(group)
    schedules()
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("1 staging buffer, no slice held", "4, 5 (shipped)"):
            figure = timed(lambda: examples.backward(**VARIANTS[name])).plot()
            figure.savefig(folder / f"backward-{name.split()[0].strip(',')}.png", dpi=110)


if __name__ == "__main__":
    main()
