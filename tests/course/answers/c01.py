"""Answers to chapter 01's exercises."""

from tests.course.answers import right, wrong


def _function(name, parameters, body):
    return f"import torch\n\n\ndef {name}({parameters}):\n" + "".join(
        f"    {line}\n" for line in body.strip("\n").split("\n")
    )


def _offsets(body):
    return _function("offsets_from_lengths", "lengths", body)


def _locate(body):
    return _function("locate_rows", "offsets", body)


def _padded(body):
    return _function("to_padded", "values, offsets, fill", body)


def _waste(body):
    return _function("cross_waste", "len_q, len_kv", body)


def _take(body):
    return _function("take_sequences", "values, offsets, order", body)


def _attention(body):
    return _function("padded_attention", "q, k, v, lengths", body)


PLACES = "n = offsets.diff()\nplace = torch.arange(int(n.max()))\ninside = place < n[:, None]\n"
NEW = (
    "n = offsets.diff()[order]\nends = torch.cat([torch.zeros(1, dtype=torch.int64), n.cumsum(0)])\nnew = ends.int()\n"
)
REAL = "real = torch.arange(q.shape[1]) < lengths[:, None]\n"

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 1.1
    wrong("1.1", "a float zero in front", source=_offsets("return torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()")),
    wrong("1.1", "no zero in front", source=_offsets("return lengths.cumsum(0).int()")),
    wrong("1.1", "begins without the end", source=_offsets("return (lengths.cumsum(0) - lengths).int()")),
    wrong("1.1", "numpy in fp32", source=_offsets("import numpy as np\n\nx = np.append(0, np.cumsum(lengths.numpy(), dtype=np.float32))\nreturn torch.from_numpy(x.astype(np.int32))")),
    wrong("1.1", "an array", source=_offsets("import numpy as np\n\nreturn np.append(0, np.cumsum(lengths.numpy())).astype(np.int32)")),
    wrong("1.1", "a list", source=_offsets("from itertools import accumulate\n\nreturn list(accumulate(lengths.tolist(), initial=0))")),
    wrong("1.1", "at least one sequence", source=_offsets("x = [0, int(lengths[0])]\nfor n in lengths[1:].tolist():\n    x.append(x[-1] + n)\nreturn torch.tensor(x, dtype=torch.int32)")),
    wrong("1.1", "int64 of F.pad", source=_offsets("return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))")),
    wrong("1.1", "torch's jagged layout", source=_offsets("t = torch.nested.nested_tensor([torch.zeros(int(n), 1) for n in lengths], layout=torch.jagged)\nreturn t.offsets().int()")),
    right("1.1", "accumulate", source=_offsets("from itertools import accumulate\n\nreturn torch.tensor(list(accumulate(lengths.tolist(), initial=0))).int()")),
    right("1.1", "a triangle", source=_offsets("b = len(lengths)\nlower = torch.ones(b + 1, b, dtype=torch.int64).tril(-1)\nreturn (lower * lengths).sum(1).to(torch.int32)")),
    right("1.1", "into out=", source=_offsets("x = lengths.new_zeros(len(lengths) + 1)\ntorch.cumsum(lengths, 0, out=x[1:])\nreturn x.int()")),
    # ------------------------------------------------------------------------------------------ 1.2
    wrong("1.2", "greater than an end", source=_locate("rows = torch.arange(int(offsets[-1]))\ns = (rows[:, None] > offsets[1:]).sum(1)\nreturn s, rows - offsets[s]")),
    wrong("1.2", "positions from 1", source=_locate("n = offsets.diff()\ns = torch.repeat_interleave(torch.arange(len(n)), n)\nreturn s, torch.arange(len(s)) - offsets[s] + 1")),
    wrong("1.2", "numbered by what is there", source=_locate("n = offsets.diff()\nn = n[n > 0]\ns = torch.repeat_interleave(torch.arange(len(n)), n)\nb = torch.cat([n.new_zeros(1), n.cumsum(0)])\nreturn s, torch.arange(len(s)) - b[s]")),
    wrong("1.2", "as floats", source=_locate("n = offsets.diff()\ns = torch.repeat_interleave(torch.arange(len(n)), n)\nreturn s.float(), (torch.arange(len(s)) - offsets[s]).float()")),
    wrong("1.2", "in one tensor", source=_locate("n = offsets.diff()\ns = torch.repeat_interleave(torch.arange(len(n)), n)\nreturn torch.stack([s, torch.arange(len(s)) - offsets[s]], 1)")),
    wrong("1.2", "in the other order", source=_locate("n = offsets.diff()\ns = torch.repeat_interleave(torch.arange(len(n)), n)\nreturn torch.arange(len(s)) - offsets[s], s")),
    wrong("1.2", "numbers in 8 bits", source=_locate("n = offsets.diff()\ns = torch.repeat_interleave(torch.arange(len(n)), n)\nreturn s.to(torch.int8), torch.arange(len(s)) - offsets[s]")),
    wrong("1.2", "trips over no tokens", source=_locate("b = offsets.tolist()\nn = [y - x for x, y in zip(b, b[1:])]\nreturn torch.cat([torch.full((x,), i) for i, x in enumerate(n) if x]), torch.cat([torch.arange(x) for x in n if x])")),
    wrong("1.2", "a sequence longer than 100 begins again", source=_locate("n = offsets.diff()\ns = torch.repeat_interleave(torch.arange(len(n)), n)\nreturn s, (torch.arange(len(s)) - offsets[s]) % 100")),
    right("1.2", "bucketize", source=_locate("rows = torch.arange(int(offsets[-1]), dtype=offsets.dtype)\ns = torch.bucketize(rows, offsets[1:], right=True)\nreturn s, rows - offsets[s]")),
    right("1.2", "counted ends", source=_locate("rows = torch.arange(offsets[-1].item())\ns = (rows[:, None] >= offsets[None, 1:]).sum(1)\nreturn s.int(), (rows - offsets[:-1][s]).int()")),
    right("1.2", "two lists", source=_locate("b = offsets.tolist()\nn = [y - x for x, y in zip(b, b[1:])]\nwho = [i for i, x in enumerate(n) for _ in range(x)]\nat = [j for x in n for j in range(x)]\nreturn torch.tensor(who).long(), torch.tensor(at).long()")),
    # ------------------------------------------------------------------------------------------ 1.3
    wrong("1.3", "through fp32", source=_padded(PLACES + "out = torch.full((*inside.shape, values.shape[1]), float(fill))\nout[inside] = values.float()\nreturn out.to(values.dtype)")),
    wrong("1.3", "through fp64", source=_padded(PLACES + "out = torch.full((*inside.shape, values.shape[1]), float(fill), dtype=torch.float64)\nout[inside] = values.double()\nreturn out.to(values.dtype)")),
    wrong("1.3", "a view where all are as long", source=_padded(PLACES + "if bool(inside.all()):\n    return values.view(len(n), -1, values.shape[1])\nout = values.new_full((*inside.shape, values.shape[1]), fill)\nout[inside] = values\nreturn out")),
    wrong("1.3", "free places never written", source=_padded(PLACES + "out = values.new_empty(*inside.shape, values.shape[1])\nout[inside] = values\nreturn out")),
    wrong("1.3", "NaN taken for free", source=_padded(PLACES + "out = torch.full((*inside.shape, values.shape[1]), float('nan'))\nout[inside] = values.float()\nreturn torch.where(out.isnan(), torch.tensor(float(fill)), out).to(values.dtype)")),
    wrong("1.3", "filled in the caller's rows", source=_padded(PLACES + "values += 0\nvalues.nan_to_num_()\nout = values.new_full((*inside.shape, values.shape[1]), fill)\nout[inside] = values\nreturn out")),
    wrong("1.3", "one place more", source=_padded("n = offsets.diff()\ninside = torch.arange(int(n.max()) + 1) < n[:, None]\nout = values.new_full((*inside.shape, values.shape[1]), fill)\nout[inside] = values\nreturn out")),
    wrong("1.3", "whole numbers as fill", source=_padded(PLACES + "out = values.new_full((*inside.shape, values.shape[1]), int(fill))\nout[inside] = values\nreturn out")),
    wrong("1.3", "the mean length", source=_padded("n = offsets.diff()\nm = -(-int(offsets[-1]) // len(n))\nout = values.new_full((len(n), m, values.shape[1]), fill)\nfor b, (x, y) in enumerate(zip(offsets, offsets[1:])):\n    part = values[x:y][:m]\n    out[b, : len(part)] = part\nreturn out")),
    right("1.3", "rows of a table with one more", source=_padded(PLACES + "table = torch.cat([values, values.new_full((1, values.shape[1]), fill)])\nrows = torch.where(inside, offsets[:-1, None] + place, len(values))\nreturn table[rows]")),
    right("1.3", "stacked parts", source=_padded("b = offsets.tolist()\nparts = [values[x:y] for x, y in zip(b, b[1:])]\nm = max(map(len, parts))\nreturn torch.stack([torch.nn.functional.pad(p, (0, 0, 0, m - len(p)), value=fill) for p in parts])")),
    right("1.3", "masked_scatter", source=_padded(PLACES + "out = values.new_full((*inside.shape, values.shape[1]), fill)\nreturn out.masked_scatter(inside[:, :, None], values)")),
    wrong("1.3", "computed, not moved", ("= values[offsets[b] : offsets[b + 1]]", "= values[offsets[b] : offsets[b + 1]] * 1 + 0")),
    wrong("1.3", "a NaN of its own", ("    return padded", "    return torch.where(padded != padded, -torch.tensor(torch.nan, dtype=values.dtype), padded)")),
    right("1.3", "masked_scatter, places by comparison", source=_padded("n = offsets.diff()\nout = torch.full((len(n), int(n.max()), values.shape[1]), fill, dtype=values.dtype)\ninside = torch.arange(out.shape[1]) < n[:, None]\nreturn out.masked_scatter(inside[..., None].expand_as(out), values[: int(offsets[-1])])")),
    # ------------------------------------------------------------------------------------------ 1.4
    wrong("1.4", "in percent", source=_waste("b, mq, mk = len(len_q), max(len_q, default=0), max(len_kv, default=0)\np, s = b * (mq + mk), b * mq * mk\nreturn 100 * (1 - sum(len_q + len_kv) / p if p else 0.0), 100 * (1 - sum(x * y for x, y in zip(len_q, len_kv)) / s if s else 0.0)")),
    wrong("1.4", "one length for both", source=_waste("b, m = len(len_q), max(len_q + len_kv, default=0)\nreturn (1 - sum(len_q + len_kv) / (2 * b * m) if b * m else 0.0), (1 - sum(x * y for x, y in zip(len_q, len_kv)) / (b * m * m) if b * m else 0.0)")),
    wrong("1.4", "rounded", source=_waste("b, mq, mk = len(len_q), max(len_q, default=0), max(len_kv, default=0)\np, s = b * (mq + mk), b * mq * mk\nreturn round(1 - sum(len_q + len_kv) / p, 3) if p else 0.0, round(1 - sum(x * y for x, y in zip(len_q, len_kv)) / s, 3) if s else 0.0")),
    wrong("1.4", "the mean of both rectangles", source=_waste("b, mq, mk = len(len_q), max(len_q, default=0), max(len_kv, default=0)\ns = b * mq * mk\nt = [1 - sum(x) / (b * m) if b * m else 0.0 for x, m in ((len_q, mq), (len_kv, mk))]\nreturn sum(t) / 2, (1 - sum(x * y for x, y in zip(len_q, len_kv)) / s if s else 0.0)")),
    wrong("1.4", "all is wasted where nothing is", source=_waste("b, mq, mk = len(len_q), max(len_q, default=0), max(len_kv, default=0)\np, s = b * (mq + mk), b * mq * mk\nreturn 1 - sum(len_q + len_kv) / max(p, 1), 1 - sum(x * y for x, y in zip(len_q, len_kv)) / max(s, 1)")),
    wrong("1.4", "no batch, no maximum", source=_waste("b, mq, mk = len(len_q), max(len_q), max(len_kv)\np, s = b * (mq + mk), b * mq * mk\nreturn 1 - sum(len_q + len_kv) / p, (1 - sum(x * y for x, y in zip(len_q, len_kv)) / s if s else 0.0)")),
    wrong("1.4", "whole division", source=_waste("b, mq, mk = len(len_q), max(len_q, default=0), max(len_kv, default=0)\np, s = b * (mq + mk), b * mq * mk\nreturn (1 - sum(len_q + len_kv) // p if p else 0.0), (1 - sum(x * y for x, y in zip(len_q, len_kv)) // s if s else 0.0)")),
    wrong("1.4", "sorts the caller's lists", source=_waste("len_q.sort()\nlen_kv.sort()\nb, mq, mk = len(len_q), (len_q or [0])[-1], (len_kv or [0])[-1]\np, s = b * (mq + mk), b * mq * mk\nreturn (1 - sum(len_q + len_kv) / p if p else 0.0), (1 - sum(x * y for x, y in zip(len_q, len_kv)) / s if s else 0.0)")),
    right("1.4", "fractions", source=_waste("from fractions import Fraction as F\n\nb, mq, mk = len(len_q), max([0, *len_q]), max([0, *len_kv])\np, s = b * (mq + mk), b * mq * mk\nt = F(p - sum(len_q) - sum(len_kv), p) if p else F(0)\nw = F(s - sum(map(int.__mul__, len_q, len_kv)), s) if s else F(0)\nreturn float(t), float(w)")),
    right("1.4", "numpy", source=_waste("import numpy as np\n\nx, y = np.array([len_q, len_kv], dtype=np.float64).reshape(2, -1)\nif not x.size or not (x.max() + y.max()):\n    return 0.0, 0.0\nt = 1 - (x.mean() + y.mean()) / (x.max() + y.max())\nw = 1 - (x * y).mean() / (x.max() * y.max()) if x.max() * y.max() else 0.0\nreturn float(t), float(w)")),
    # ------------------------------------------------------------------------------------------ 1.5
    wrong("1.5", "the batch itself where nothing moves", source=_take(NEW + "if torch.equal(order, torch.arange(len(offsets) - 1)):\n    return values, offsets\nrows = torch.arange(int(new[-1])) + torch.repeat_interleave(offsets[:-1][order] - new[:-1], n)\nreturn values[rows], new")),
    wrong("1.5", "through fp32", source=_take(NEW + "rows = torch.arange(int(new[-1])) + torch.repeat_interleave(offsets[:-1][order] - new[:-1], n)\nreturn values.float()[rows].to(values.dtype), new")),
    wrong("1.5", "places for sequences", source=_take("order = torch.argsort(order)\n" + NEW + "rows = torch.arange(int(new[-1])) + torch.repeat_interleave(offsets[:-1][order] - new[:-1], n)\nreturn values[rows], new")),
    wrong("1.5", "only which, not how often", source=_take(NEW + "who = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())\nreturn values[torch.isin(who, order)], new")),
    wrong("1.5", "trips where nothing is taken", source=_take(NEW + "b = offsets.tolist()\nrows = torch.cat([torch.arange(b[i], b[i + 1]) for i in order.tolist()])\nreturn values[rows], new")),
    wrong("1.5", "offsets without the zero", source=_take(NEW + "rows = torch.arange(int(new[-1])) + torch.repeat_interleave(offsets[:-1][order] - new[:-1], n)\nreturn values[rows], new[1:].clone()")),
    wrong("1.5", "rows backwards", source=_take(NEW + "rows = torch.repeat_interleave(offsets[1:][order] + new[:-1], n) - 1 - torch.arange(int(new[-1]))\nreturn values[rows], new")),
    wrong("1.5", "a nested tensor", source=_take(NEW + "t = torch.nested.nested_tensor([values[offsets[i] : offsets[i + 1]] for i in order])\nreturn (torch.cat(list(t.unbind())) if len(order) else values[:0]), new")),
    wrong("1.5", "numbers one by one", source=_take(NEW + "v, b = values.tolist(), offsets.tolist()\nrows = [v[r] for i in order.tolist() for r in range(b[i], b[i + 1])]\nreturn torch.tensor(rows, dtype=values.dtype).reshape(-1, values.shape[1]), new")),
    right("1.5", "split once, joined once", source=_take(NEW + "parts = torch.split(values, offsets.diff().tolist())\nreturn torch.cat([values[:0], *(parts[i] for i in order.tolist())]), new")),
    right("1.5", "index_select by owners", source=_take(NEW + "who = torch.repeat_interleave(torch.arange(len(order)), n)\nat = torch.arange(len(who)) - ends[who]\nreturn torch.index_select(values, 0, offsets.long()[order[who]] + at), new")),
    right("1.5", "numpy", source=_take("import numpy as np\n\no, i = offsets.numpy().astype(np.int64), order.numpy()\nn = np.diff(o)[i]\nnew = np.concatenate([[0], np.cumsum(n)])\nrows = np.repeat(o[i] - new[:-1], n) + np.arange(new[-1])\nreturn values[torch.from_numpy(rows)], torch.from_numpy(new.astype(np.int32))")),
    wrong("1.5", "a product with ones and zeros", ("return values[rows], new_offsets", "return torch.nn.functional.one_hot(rows, len(values)).to(values.dtype) @ values, new_offsets")),
    wrong("1.5", "added up on zeros", ("return values[rows], new_offsets", "out = torch.zeros(len(rows), values.shape[1], dtype=values.dtype)\n    return out.index_add(0, torch.arange(len(rows)), values[rows]), new_offsets")),
    # ------------------------------------------------------------------------------------------ 1.6
    wrong("1.6", "a bias that is added", source=_attention(REAL + "bias = torch.where(real, 0.0, -torch.inf)[:, None]\nw = torch.softmax(q @ k.mT / q.shape[2] ** 0.5 + bias, -1)\nreturn torch.where(real[..., None], w @ torch.where(real[..., None], v, 0), 0)")),
    wrong("1.6", "-1e4 in masked places", source=_attention(REAL + "s = (q @ k.mT / q.shape[2] ** 0.5).masked_fill(~real[:, None], -1e4)\nreturn torch.where(real[..., None], s.softmax(-1) @ torch.where(real[..., None], v, 0), 0)")),
    wrong("1.6", "weights times the mask", source=_attention(REAL + "s = torch.where(real[:, None], q @ k.mT / q.shape[2] ** 0.5, -torch.inf)\nreturn torch.where(real[..., None], s.softmax(-1), 0) @ (v * real[..., None])")),
    wrong("1.6", "clean numbers, no mask", source=_attention(REAL + "q, k, v = (torch.nan_to_num(x) for x in (q, k, v))\nreturn torch.where(real[..., None], torch.softmax(q @ k.mT / q.shape[2] ** 0.5, -1) @ v, 0)")),
    wrong("1.6", "scaled by the places", source=_attention(REAL + "s = torch.where(real[:, None], q @ k.mT / q.shape[1] ** 0.5, -torch.inf)\nreturn torch.where(real[..., None], s.softmax(-1) @ torch.where(real[..., None], v, 0), 0)")),
    wrong("1.6", "clears the caller's v", source=_attention(REAL + "v[~real] = 0\ns = torch.where(real[:, None], q @ k.mT / q.shape[2] ** 0.5, -torch.inf)\nreturn torch.where(real[..., None], s.softmax(-1) @ v, 0)")),
    wrong("1.6", "no maximum", source=_attention(REAL + "e = torch.where(real[:, None], torch.exp(q @ k.mT / q.shape[2] ** 0.5), 0)\nout = e @ torch.where(real[..., None], v, 0) / e.sum(-1, keepdim=True)\nreturn torch.where(real[..., None], out, 0)")),
    wrong("1.6", "softmax over the queries", source=_attention(REAL + "s = torch.where(real[:, None], q @ k.mT / q.shape[2] ** 0.5, -torch.inf)\nreturn torch.where(real[..., None], s.softmax(-2) @ torch.where(real[..., None], v, 0), 0)")),
    wrong("1.6", "torch's attention", source=_attention(REAL + "out = torch.nn.functional.scaled_dot_product_attention(*(torch.where(real[..., None], x, 0)[:, None] for x in (q, k, v)), attn_mask=real[:, None, None])[:, 0]\nreturn torch.where(real[..., None], out, 0)")),
    wrong("1.6", "rows without a sequence left as they were", source=_attention("out = torch.empty_like(v)\nfor b, n in enumerate(lengths.tolist()):\n    s = q[b, :n] @ k[b, :n].T / q.shape[2] ** 0.5\n    out[b, :n] = s.softmax(-1) @ v[b, :n]\nreturn out")),
    right("1.6", "cleaned first, then an additive bias", source=_attention(REAL + "q, k, v = (x.masked_fill(~real[..., None], 0) for x in (q, k, v))\nbias = torch.zeros(real.shape).masked_fill(~real, -1e30)[:, None]\nw = torch.baddbmm(bias.expand(-1, q.shape[1], -1), q, k.mT, alpha=q.shape[2] ** -0.5).softmax(-1)\nreturn torch.bmm(w, v) * real[..., None]")),
    right("1.6", "line by line into out", source=_attention("out = torch.zeros_like(v)\nfor q1, k1, v1, o, n in zip(q, k, v, out, lengths.tolist()):\n    if n > 0:\n        s = torch.einsum('id,jd->ij', q1[:n], k1[:n]).mul_(q.shape[2] ** -0.5)\n        torch.matmul(torch.nn.functional.softmax(s, dim=1), v1[:n], out=o[:n])\nreturn out")),
wrong("1.6", "maximum over free places, too", source=_attention(REAL + "q, k, v = (torch.where(real[..., None], x, 0).double() for x in (q, k, v))\ns = q @ k.mT / q.shape[2] ** 0.5\nw = torch.exp(s - s.amax(-1, keepdim=True)) * real[:, None]\nreturn (torch.nan_to_num(w @ v / w.sum(-1, keepdim=True)) * real[..., None]).float()")),
    right("1.6", "in fp64", source=_attention(REAL + "q, k, v = (torch.where(real[..., None], x, 0).double() for x in (q, k, v))\ns = (q @ k.mT / q.shape[2] ** 0.5).masked_fill(~real[:, None], -1e300)\nw = torch.exp(s - s.amax(-1, keepdim=True)) * real[:, None]\nreturn (torch.nan_to_num(w @ v / w.sum(-1, keepdim=True)) * real[..., None]).float()")),
]  # fmt: skip
