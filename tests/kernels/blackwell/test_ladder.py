"""Chapter 12's ladder ends at the package's forward: same roles, same barriers, copies and products in the same order."""

import ast
import inspect
import math
from dataclasses import asdict

import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("triton.language.extra.tlx")
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import jfa.emulator as emulator  # noqa: E402
from jfa import sass  # noqa: E402
from jfa.emulator.rates import B200  # noqa: E402
from jfa.kernels.blackwell import forward  # noqa: E402
from jfa.kernels.blackwell.config import forward_config  # noqa: E402
from jfa.kernels.blackwell.modelled import example, forward_launch, record_one_sm  # noqa: E402
from jfa.kernels.common import ring  # noqa: E402
from tests.kernels.blackwell.ladder import load, problem, run_last  # noqa: E402
from tests.support import ROOT  # noqa: E402


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    """The chapter's kernels."""
    return load(tmp_path_factory.mktemp("chapter"))


def exact(q, k, v):
    """(out, lse) in fp64."""
    scores = q.double() @ k.double().t() / math.sqrt(128)
    return torch.softmax(scores, dim=1) @ v.double(), torch.logsumexp(scores, dim=1)


@pytest.fixture(scope="module")
def lines(chapter):
    """The timelines of the chapter's last version and of the package's forward: two tiles of three blocks, one SM."""
    tensors = problem(2, 3)
    return record_one_sm(lambda: run_last(chapter, *tensors), B200), record_one_sm(forward_launch(512, 384), B200)


def test_the_roles_are_the_package_s_in_its_order(chapter):
    names = [
        sass.names_of(sass.blocks_of(kernel.fn), 6) for kernel in (chapter.persistent_roles, forward.forward_kernel)
    ]
    assert names[0] == names[1] == ["correction", "softmax 0", "softmax 1", "mma", "load", "store"]


def test_the_compile_time_choices_are_the_package_s(chapter):
    theirs = asdict(forward_config(example(512, 384)[0], clc=False))
    mine = asdict(chapter.LAST)
    common = mine.keys() & theirs.keys()
    assert common == {"kv_slots", "p_slices", "fma_eighths", "o_parts", "o_columns"}
    assert {name: mine[name] for name in common} == {name: theirs[name] for name in common}
    assert theirs["o_slots"] == mine["o_parts"] and not theirs["split_keys"] and mine["halves"] == 2


def test_the_barriers_are_the_package_s_with_the_same_roles_on_both_sides(lines):
    mine, theirs = (line.barriers() for line in lines)
    assert mine == theirs and len(mine) == 13
    assert all(arrives and waits for arrives, waits in mine.values())


def test_each_role_meets_its_barriers_in_the_package_s_order(lines):
    for role in ("correction", "softmax[0]", "softmax[1]", "mma", "load", "store"):
        met = [
            [e.name for e in line.events if e.track == role and e.name.startswith(("pass ", "arrive "))]
            for line in lines
        ]
        assert met[0] == met[1] and len(met[0]) > 8, role


def test_products_and_copies_go_out_in_the_package_s_order(lines):
    def issued(line, track, prefix=""):
        events = sorted((e for e in line.events if e.track == track), key=lambda e: (e.start, e.end))
        return [(e.name, e.args.get("signals")) for e in events if e.name.startswith(prefix)]

    mine, theirs = (issued(line, "MMA") for line in lines)
    assert mine == theirs and sum(" @ " in name for name, _ in mine) == 2 * 3 * 2 * (1 + 2)  # S once, P V in two slices
    for prefix in ("q.", "kv.", "o."):
        mine, theirs = (issued(line, "TMA", prefix) for line in lines)
        assert mine == theirs and mine, prefix


@pytest.mark.parametrize("clc", [False, True], ids=["static", "stealing"])
def test_the_chapter_s_table_has_every_barrier_of_the_package_s_forward(chapter, clc):
    found = record_one_sm(forward_launch(256, 256, clc=clc), B200).barriers()
    queue = {name for name in found if name.startswith(("queue", "clc"))}
    assert set(found) - queue == set(chapter.BARRIERS) and bool(queue) == clc


def barriers_of(node_lists, owner):
    """Names of the barriers that an aggregate of the package's forward holds, rings and aggregates inside it included."""
    found = set()
    for name, kind in node_lists[owner].items():
        if kind.endswith("mbarrier"):
            found.add(name)
        elif kind in node_lists:
            found |= {f"{name}.{inner}" for inner in barriers_of(node_lists, kind)}
    return found


def test_chapter_12_names_every_barrier_that_stands_in_the_package_s_file(chapter):
    """Barriers of launches that the table's run does not have, too: the file's aggregates say which there are."""
    fields = {}
    for module in (forward, ring):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
                fields[node.name] = {line.target.id: ast.unparse(line.annotation) for line in lines}
    assert fields["Memory"]["tails"] == "tl.core.base_value"  # Tails, or None
    fields["Memory"]["tails"] = "Tails"
    named = barriers_of(fields, "Memory")
    text = (ROOT / "notebooks" / "12_blackwell_forward.py").read_text(encoding="utf-8")
    assert len(named) == 15 and named > set(chapter.BARRIERS)
    assert not [name for name in named - set(chapter.BARRIERS) if f"# | `{name}` |" not in text]


@pytest.mark.parametrize("policy, seed", [("eager", 0), ("lazy", 0), ("random", 1), ("random", 7)])
@pytest.mark.parametrize("tiles, blocks, programs", [(1, 1, 1), (3, 1, 2), (2, 2, 1), (3, 2, 2), (1, 3, 3)])
def test_the_last_version_is_right_on_every_schedule(chapter, policy, seed, tiles, blocks, programs):
    """Odd and even numbers of steps and tiles, and programs without a tile."""
    q, k, v = problem(tiles, blocks, seed=tiles + blocks, lift=12.0 if blocks == 2 else 1.0)
    with emulator.options(policy=policy, seed=seed):
        out, lse = run_last(chapter, q, k, v, programs)
    want, want_lse = exact(q, k, v)
    assert (out - want).abs().max() < 0.02 and (lse - want_lse).abs().max() < 2e-3
    assert emulator.last().clean


ROWS = {
    "one_role": 128,
    "two_roles": 128,
    "three_roles": 256,
    "three_roles_apart": 128,
    "four_roles": 256,
    "sliced_roles": 256,
}


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", ROWS)
def test_every_version_is_right_for_few_blocks(chapter, name, blocks):
    q, k, v = problem(1, blocks, seed=blocks, lift=6.0)
    halves = ROWS[name] // 128
    configs = {
        "one_role": [None],
        "sliced_roles": [dict(p_slices=n, fma_eighths=e) for n, e in ((1, 2), (2, 2), (4, 0))],
    }
    for fields in configs.get(name, [dict(halves=halves)]):
        out = torch.full(q.shape, math.nan)
        boxes = [TensorDescriptor.from_tensor(t, [128, 128]) for t in (q, k, v)]
        constants = {} if fields is None else {"cfg": chapter.Config(**fields)}
        with emulator.options(policy="random", seed=blocks):
            getattr(chapter, name)[(2 // halves,)](*boxes, out, chapter.SCALE_LOG2, blocks, **constants)
        assert (out - exact(q, k, v)[0]).abs().max() < 0.01 and emulator.last().clean
