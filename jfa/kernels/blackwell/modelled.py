"""Model how busy a B200's tensor cores are, and how much the result depends on rates that have not been measured there.

``python -m jfa.kernels.blackwell.modelled`` prints two tables, made by running the kernels on the emulator's clock: the forward
next to the plain kernel and the public tutorials of fbtriton, and the same with each rate that no B200 source gives halved and
doubled (:meth:`jfa.emulator.rates.Chip.assumed`). Modelled, not measured. ``--kernels`` prints the first table only, ``--pair``
the backward on pairs of CTAs next to that on single ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch

from jfa.kernels.blackwell import launch, mxfp8_launch
from jfa.kernels.blackwell.config import BLOCK, backward_config, forward_config, mxfp8_backward_config, mxfp8_config
from jfa.kernels.blackwell.examples import example
from jfa.kernels.common.padded_rows import padded_rows, row_constants
from jfa.kernels.common.ragged import empty_tma_ready

FACTORS = (0.5, 1.0, 2.0)
STEADY = (0.35, 0.8)  # of a long tile's run: between the first loads and the last store
# name, queries, keys, causal
PAIR_SHAPES = (
    ("1024 queries, 1024 keys", 1024, 1024, False),
    ("the same, causal", 1024, 1024, True),
    ("512, 512", 512, 512, False),
    ("256, 1024", 256, 1024, False),
    ("128, 1024", 128, 1024, False),
    ("512, 256", 512, 256, False),
)
# Given by public sources, but for other GPUs or equally for all of them.
NOT_BLACKWELL = ("smem_latency", "cvt")
PERSISTENT, STEALING, PIPELINED = (
    "blackwell_fa_ws_pipelined_persistent",
    "blackwell_fa_clc",
    "blackwell_fa_ws_pipelined",
)


def record_one_sm(run: Callable[[], object], chip):
    """Return the timeline of a launch on one SM, whatever the number of its CTAs."""
    from jfa.emulator.cli import record

    saved, launch.EMULATED_SMS = launch.EMULATED_SMS, 1
    try:
        return record(run, chip, max_ctas=1)
    finally:
        launch.EMULATED_SMS = saved


def forward_launch(len_q: int, len_kv: int, clc: bool = False, **choices) -> Callable[[], object]:
    """Return a launch of the forward at D = 128, one sequence, one head; ``choices`` are fields of ForwardConfig."""
    problem, q, k, v, _ = example(len_q, len_kv)
    config = replace(forward_config(problem, clc=clc), **choices)
    return lambda: launch.forward(problem, q, k, v, config=config)


def mxfp8_forward_launch(len_q: int, len_kv: int, clc: bool = False, **choices) -> Callable[[], object]:
    """Return a launch of the MXFP8 forward on the same problem; ``choices`` are fields of Mxfp8Config."""
    problem, q, k, v, _ = example(len_q, len_kv)
    config = replace(mxfp8_config(problem, clc=clc), **choices)
    return lambda: mxfp8_launch.forward(problem, q, k, v, config=config)


def mxfp8_speedup(chip, len_q: int, len_kv: int, clc: bool = False, **choices) -> float:
    """Return the bf16 forward's modelled cycles over the MXFP8 forward's, the kernels alone."""
    before = record_one_sm(forward_launch(len_q, len_kv, clc), chip)
    return before.cycles / record_one_sm(mxfp8_forward_launch(len_q, len_kv, clc, **choices), chip).cycles


def plain_launch(len_q: int, len_kv: int) -> Callable[[], object]:
    """Return a launch of the kernel without specialized warps on the same problem."""
    problem, q, k, v, _ = example(len_q, len_kv)
    return lambda: launch.plain_forward(problem, q, k, v)


def tutorial_launch(name: str) -> Callable[[], object]:
    """Return a launch of a public tutorial on 1024 queries and keys, in the configuration that is best in this model."""
    from jfa.emulator import tutorials

    module = tutorials.load(name)
    config = dict(module.configs[0].kwargs)
    if "RESCALE_OPT" in config:
        config |= {"NUM_BUFFERS_KV": 3, "GROUP_SIZE_N": 1, "RESCALE_OPT": True, "USE_WHERE": False}
    _, q, k, v, _ = example(1024, 1024)
    q, k, v = (x.permute(1, 0, 2)[None].half() for x in (q, k, v))

    def run():
        with tutorials.answering_gpu(1):
            module.attention(q, k, v, 128**-0.5, False, config=config)

    return run


def backward_launch(
    form: str, len_q: int, len_kv: int, causal: bool = False, head_dim: int = 128, **choices
) -> Callable[[], object]:
    """Return a launch of one form of the backward, "single", "pair" or "mxfp8", one sequence, one head, static.

    "mxfp8" is the kernel alone: its inputs are encoded before. ``choices`` are fields of BackwardConfig.
    """
    problem, q, k, v, dout = example(len_q, len_kv, head_dim, causal)
    if form == "mxfp8":
        config = mxfp8_backward_config(problem, clc=False)
    else:
        config = backward_config(problem, clc=False, form=form)
    config = replace(config, **choices)
    rows, lists = padded_rows(problem, BLOCK), launch.key_list(problem, config.tile_rows)
    constants = row_constants(problem, rows, torch.zeros_like(dout), dout, torch.zeros(1, problem.rows_out), None)
    dk, dv = (empty_tma_ready(x, x.shape[2]).zero_() for x in (k, v))
    sums = torch.zeros(1, rows.count, problem.head_dim)
    run = dict(pair=launch.launch_pair, mxfp8=mxfp8_launch.launch_backward).get(form, launch.launch_backward)
    return lambda: run(problem, dout, q, k, v, dk, dv, sums, *constants, *lists, config)


def mxfp8_backward_speedup(chip, len_q: int = 1024, len_kv: int = BLOCK, causal: bool = False, head_dim: int = 128):
    """Return the modelled cycles of the bf16 backward on single CTAs over the MXFP8 backward's, the kernels alone."""
    single, scaled = (
        record_one_sm(backward_launch(form, len_q, len_kv, causal, head_dim), chip) for form in ("single", "mxfp8")
    )
    return single.cycles / scaled.cycles


def record_two_sms(run: Callable[[], object], chip):
    """Return the timeline of a backward on two SMs: a pair of CTAs, or two that work for themselves."""
    from jfa.emulator.cli import record

    saved, launch.EMULATED_SMS = launch.EMULATED_SMS, 2
    try:
        return record(run, chip)
    finally:
        launch.EMULATED_SMS = saved


def smem_cycles_per_block(form: str, chip, queries: int = 4 * BLOCK) -> float:
    """Return for how many cycles a block of 128 queries and 128 keys per SM occupies shared memory: products, copies, stores.

    Counted as the difference between a tile of ``queries`` and one of twice as many.
    """
    keys = BLOCK * (2 if form == "pair" else 1)

    def occupied(len_q: int) -> float:
        line = record_two_sms(backward_launch(form, len_q, keys), chip)
        spans = [spans for (_, unit), spans in line.occupied.items() if unit == "smem"]
        return sum(end - begin for each in spans for begin, end in each) / len(spans)

    return (occupied(2 * queries) - occupied(queries)) / (queries / BLOCK)


def pair_table(chip) -> str:
    """Return the table of the backward on two SMs, by form: cycles, and how busy the tensor cores are from start to end."""
    lines = [
        f"| backward, two SMs, modelled on {chip.name}, D = 128 | single: cycles, busy | pair | ratio of busy, of time |"
    ]
    lines.append("|---" * 4 + "|")
    for name, len_q, len_kv, causal in PAIR_SHAPES:
        single, pair = (
            record_two_sms(backward_launch(form, len_q, len_kv, causal), chip) for form in ("single", "pair")
        )
        cells = [f"{line.cycles:,.0f}, {100 * line.busy():.1f} %" for line in (single, pair)]
        ratio = f"{pair.busy() / single.busy():.2f}, {single.cycles / pair.cycles:.2f}"
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {ratio} |")
    single, pair = smem_cycles_per_block("single", chip), smem_cycles_per_block("pair", chip)
    lines.append(f"| shared memory, cycles per block | {single:,.0f} | {pair:,.0f} | |")
    return "\n".join(lines)


def busy_share(line, begin: float = 0.0, end: float = 1.0) -> float:
    """Return the share of a stretch of a one-SM run in which the tensor cores were busy, whichever CTA had the SM."""
    span = (line.start + begin * line.cycles, line.start + end * line.cycles)
    return line.busy(span=span) * sum(unit == "tensor" for _, unit in line.occupied)


def steady_busy(run: Callable[[], object], chip) -> float:
    """Return the share of the middle of a run in which the tensor cores were busy."""
    return busy_share(record_one_sm(run, chip), *STEADY)


def whole_busy(run: Callable[[], object], chip) -> float:
    """Return the share of a whole run, first load to last store, in which the tensor cores were busy."""
    return busy_share(record_one_sm(run, chip))


def measures() -> dict[str, Callable]:
    """Return the modelled quantities: by name a function from a chip to the share of time in which its tensor cores are
    busy."""
    steady = {
        "forward, long tile": forward_launch(256, 2048),
        "plain, long tile": plain_launch(128, 2048),
    }
    whole = {
        "forward, static": forward_launch(1024, 1024),
        "forward, stealing": forward_launch(1024, 1024, clc=True),
        "plain": plain_launch(1024, 1024),
        "tutorial, pipelined persistent": tutorial_launch(PERSISTENT),
        "tutorial, stealing": tutorial_launch(STEALING),
        "tutorial, pipelined": tutorial_launch(PIPELINED),
    }
    return {name: (lambda chip, f=f: steady_busy(f, chip)) for name, f in steady.items()} | {
        name: (lambda chip, f=f: whole_busy(f, chip)) for name, f in whole.items()
    }


def uncertain(chip) -> list[str]:
    """Return the rates to doubt: assumed ones, and those that only other chips' sources give."""
    return [
        name for name in (*chip.assumed(), *NOT_BLACKWELL) if name != "clock_sustained"
    ]  # no count of cycles depends on it


def kernels_table(chip) -> str:
    """Return the table of all kernels with the rates as they are."""
    lines = [f"| kernel, modelled on {chip.name}, D = 128 | tensor cores busy |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {100 * measure(chip):.1f} % |" for name, measure in measures().items()])


def sensitivity_table(chip, names: tuple[str, ...]) -> str:
    """Return, per doubtful rate, the shares of the measures called ``names`` at half, once and twice its value."""
    chosen = {name: measures()[name] for name in names}
    once = {name: measure(chip) for name, measure in chosen.items()}
    lines = ["| rate, times 0.5 / 1 / 2 | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for rate in uncertain(chip):
        cells = [
            " / ".join(f"{100 * (once[name] if f == 1.0 else measure(chip.scaled(rate, f))):.1f}" for f in FACTORS)
            for name, measure in chosen.items()
        ]
        lines.append(f"| {rate}: {chip[rate]:.4g} {chip.rates[rate].unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the tables."""
    from jfa.emulator.rates import B200

    parser = argparse.ArgumentParser(prog="python -m jfa.kernels.blackwell.modelled", description=main.__doc__)
    parser.add_argument("--kernels", action="store_true", help="only the table of kernels (some ten seconds)")
    parser.add_argument("--pair", action="store_true", help="only the table of the backward on pairs (two minutes)")
    args = parser.parse_args(argv)
    if args.pair:
        print(pair_table(B200), flush=True)
        return 0
    print(kernels_table(B200), flush=True)
    if not args.kernels:
        names = ("forward, long tile", "forward, static", "tutorial, pipelined persistent", "plain")
        print("\n" + sensitivity_table(B200, names), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
