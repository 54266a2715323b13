"""Answers to chapter 00's exercises."""

from tests.course.answers import right, wrong


def _function(name, parameters, body):
    return f"import torch\n\n\ndef {name}({parameters}):\n" + "".join(f"    {line}\n" for line in body.split("\n"))


def _tokens(body):
    return _function("count_tokens", "lengths", body)


def _longest(body):
    return _function("longest", "lengths", body)


def _shares(body):
    return _function("shares", "weights", body)


ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 0.1
    wrong("0.1", "the text's batch", source=_tokens("return 45")),
    wrong("0.1", "each length once", source=_tokens("return sum(set(lengths))")),
    wrong("0.1", "without the first", source=_tokens("return sum(lengths[1:])")),
    wrong("0.1", "empties the caller's list", source=_tokens("n = 0\nwhile lengths:\n    n += lengths.pop()\nreturn n")),
    wrong("0.1", "a list of one", source=_tokens("return [sum(lengths)]")),
    wrong("0.1", "one more per empty sequence", source=_tokens("return sum(max(n, 1) for n in lengths)")),
    wrong("0.1", "no batch, no answer", source=_tokens("return sum(lengths) or None")),
    wrong("0.1", "trips over an empty batch", source=_tokens("return lengths[0] + sum(lengths[1:])")),
    right("0.1", "numpy", source=_tokens("import numpy as np\n\nreturn int(np.asarray(lengths, dtype=np.int64).sum())")),
    right("0.1", "torch", source=_tokens("return torch.tensor(lengths, dtype=torch.long).sum().item()")),
    right("0.1", "accumulate", source=_tokens("from itertools import accumulate\n\nreturn [0, *accumulate(lengths)][-1]")),
    # ------------------------------------------------------------------------------------------ 0.2
    wrong("0.2", "the last", source=_longest("return lengths[-1] if lengths else 0")),
    wrong("0.2", "at least 1", source=_longest("return max(lengths, default=1)")),
    wrong("0.2", "None of nothing", source=_longest("return max(lengths) if lengths else None")),
    wrong("0.2", "the number of sequences", source=_longest("return len(lengths)")),
    wrong("0.2", "as words", source=_longest("return int(max(map(str, lengths), default=0))")),
    wrong("0.2", "appends a zero to the caller's list", source=_longest("lengths.append(0)\nreturn max(lengths)")),
    wrong("0.2", "the second longest", source=_longest("return sorted([0, 0, *lengths])[-2]")),
    right("0.2", "a zero beside them", source=_longest("return max([0, *lengths])")),
    right("0.2", "heapq", source=_longest("import heapq\n\nreturn heapq.nlargest(1, lengths + [0])[0]")),
    # ------------------------------------------------------------------------------------------ 0.3
    wrong("0.3", "softmax of the weights", source=_shares("return torch.softmax(weights, 1)")),
    wrong("0.3", "numpy's tolist", source=_shares("a = weights.numpy().tolist()\nreturn torch.tensor([[x / sum(r) for x in r] for r in a])")),
    wrong("0.3", "out of the array's memory", source=_shares("a = memoryview(weights.numpy()).tolist()\nreturn torch.tensor([[x / sum(r) for x in r] for r in a])")),
    wrong("0.3", "out of bytes", source=_shares("import struct\nn = len(weights)\nx = struct.unpack(f'{n * n}f', weights.numpy().tobytes())\na = [x[i * n : (i + 1) * n] for i in range(n)]\nreturn torch.tensor([[x / sum(r) for x in r] for r in a])")),
    wrong("0.3", "number by number in nditer", source=_shares("import numpy as np\nn = len(weights)\nx = [float(v) for v in np.nditer(weights.numpy())]\na = [x[i * n : (i + 1) * n] for i in range(n)]\nreturn torch.tensor([[x / sum(r) for x in r] for r in a])")),
    wrong("0.3", "a plain view of the array", source=_shares("import numpy as np\na = weights.numpy().view(np.ndarray)\nreturn torch.from_numpy(np.stack([r / r.sum() for r in a]))")),
    wrong("0.3", "vectorize", source=_shares("import numpy as np\na = weights.numpy()\nreturn torch.from_numpy(np.vectorize(lambda x, s: x / s)(a, a.sum(1, keepdims=True)).astype('float32'))")),
    wrong("0.3", "a loop inside apply_", source=_shares("sums, row, n = [], [], len(weights)\ndef add(x):\n    row.append(x)\n    if len(row) % n == 0:\n        sums.append(sum(row[-n:]))\n    return x\nweights.clone().apply_(add)\nreturn weights / torch.tensor(sums)[:, None]")),
    right("0.3", "numpy's reduce", source=_shares("import numpy as np\na = weights.numpy()\nreturn torch.from_numpy(a / np.add.reduce(a, 1)[:, None])")),
    right("0.3", "a dataclass that can be called", source="import torch\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass Shares:\n    dim: int = 1\n\n    def __call__(self, weights):\n        return weights / weights.sum(self.dim, keepdim=True)\n\n\nshares = Shares()\n"),
    right("0.3", "a coroutine", source="import asyncio\n\n\nasync def divide(weights):\n    return weights / weights.sum(1, keepdim=True)\n\n\ndef shares(weights):\n    return asyncio.run(divide(weights))\n"),
    wrong("0.3", "by the mean", source=_shares("return weights / weights.mean(1, keepdim=True)")),
    wrong("0.3", "by the largest", source=_shares("return weights / weights.amax(1, keepdim=True)")),
    wrong("0.3", "Euclidean", source=_shares("return torch.nn.functional.normalize(weights, dim=1)")),
    wrong("0.3", "in half precision", source=_shares("w = weights.half()\nreturn (w / w.sum(1, keepdim=True)).float()")),
    wrong("0.3", "in bf16", source=_shares("w = weights.bfloat16()\nreturn (w / w.sum(1, keepdim=True)).float()")),
    wrong("0.3", "1 percent off", source=_shares("return weights / (1.01 * weights.sum(1, keepdim=True))")),
    wrong(
        "0.3",
        "a loop that numpy hides",
        source=_shares(
            "import numpy as np\n\nreturn torch.from_numpy(np.apply_along_axis(lambda r: r / r.sum(), 1, weights.numpy()))"
        ),
    ),
    wrong("0.3", "in place", source=_shares("return weights.div_(weights.sum(1, keepdim=True))")),
    wrong("0.3", "transposed", source=_shares("return (weights / weights.sum(1, keepdim=True)).T.contiguous()")),
    wrong("0.3", "the last row left alone", source=_shares("w = weights.clone()\nw[:-1] /= w[:-1].sum(1, keepdim=True)\nreturn w")),
    right("0.3", "sums by a product", source=_shares("return weights / (weights @ torch.ones(len(weights), 1))")),
    right("0.3", "softmax of logarithms", source=_shares("return torch.softmax(weights.log(), dim=-1)")),
    right("0.3", "numpy", source=_shares("w = weights.numpy()\nreturn torch.from_numpy(w / w.sum(1, keepdims=True))")),
    right("0.3", "vmap", source=_shares("return torch.vmap(lambda row: row / row.sum())(weights)")),
    right("0.3", "out=", source=_shares("out = torch.empty_like(weights)\nreturn torch.div(weights, weights.sum(-1, True), out=out)")),
    # ------------------------------------------------------------------------------------------ 0.4
    wrong("0.4", "a string", source='where = "3, 1"\n'),
    wrong("0.4", "the sequence alone", source="where = 3\n"),
    wrong("0.4", "a dict", source='where = {"sequence": 3, "position": 1}\n'),
    wrong("0.4", "a function", source="def where():\n    return 3, 1\n"),
    wrong("0.4", "the next sequence", source="where = (4, 0)\n"),
    wrong("0.4", "ends for beginnings", source="where = (2, 11)\n"),
    wrong("0.4", "a third number", source="where = (3, 1, 30)\n"),
    right("0.4", "bisect", source="""
from bisect import bisect_right
from itertools import accumulate

starts = [0, *accumulate([7, 3, 19, 5, 11])]
b = bisect_right(starts, 30) - 1
where = b, 30 - starts[b]
"""),
    right("0.4", "torch", source="""
import torch

ends = torch.tensor([7, 3, 19, 5, 11]).cumsum(0)
b = int(torch.searchsorted(ends, 30, right=True))
where = (b, int(30 - ends[b - 1]))
"""),
]  # fmt: skip
