"""Chapter 12's kernels, taken out of its notebook, and small problems for them."""

import ast
import importlib.util
import math

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.support import ROOT

CONSTANTS = ("DIM, BLOCK, BLOCKS", "D, BM, BN", "TILE, QUERIES", "SCALE_LOG2", "LAST", "BARRIERS")


def load(folder):
    """The chapter's definitions as a module, written into ``folder``; what it computes is left out."""
    source = (ROOT / "notebooks" / "12_blackwell_forward.py").read_text(encoding="utf-8")
    lines, found = source.split("\n"), []
    for node in ast.parse(source).body:
        constant = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).strip("()") in CONSTANTS
        if constant or isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
            found.append(node)
        elif isinstance(node, ast.FunctionDef) and node.decorator_list:
            found.append(node)
    begin = lambda node: min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    text = "\n\n\n".join("\n".join(lines[begin(node) - 1 : node.end_lineno]) for node in found)
    path = folder / "ladder.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("ladder", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem(tiles, blocks, seed=0, lift=1.0):
    """q [tiles * 256, 128], k and v [blocks * 128, 128] in bf16; ``lift`` makes scores large, so that maxima move."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, 128, generator=g) for n in (256 * tiles, 128 * blocks, 128 * blocks))
    return (lift * q).bfloat16(), k.bfloat16(), v.bfloat16()


def run_last(chapter, q, k, v, programs=1):
    """(out, lse) of the chapter's last version."""
    out, lse = torch.full_like(q, math.nan), torch.full((len(q),), math.nan)
    boxes = [TensorDescriptor.from_tensor(t, [128, 128]) for t in (q, k, v)]
    o_box = TensorDescriptor.from_tensor(out, [128, 64])
    numbers = (len(q) // 256, chapter.SCALE_LOG2, len(k) // 128)
    chapter.persistent_roles[(programs,)](*boxes, o_box, lse, *numbers, cfg=chapter.LAST)
    return out, lse
