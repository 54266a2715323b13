"""fbtriton's own TLX tutorials as test cases: small odd shapes, answers from torch.

Each case is a function that returns `(run, expected, tolerance)`: `run()` launches the unmodified tutorial and returns a
list of tensors,
`expected` are torch's. The tutorial files come from the installed wheel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa.emulator.frontend.driver import EmulatedDriver

TUTORIALS = os.path.join(os.path.dirname(triton.__file__), "language", "extra", "tlx", "tutorials")
NUM_SMS = 2  # what the host code of persistent kernels is told
CASES = {}


def case(*names):
    """Register a case function under each name; it gets the name's suffix arguments through functools.partial."""

    def register(function):
        for label in names or (function.__name__,):
            CASES[label] = function
        return function

    return register


@contextlib.contextmanager
def no_gpu(sms=NUM_SMS):
    """Host code of tutorials asks the GPU for its size and allocates scratch on it: answer for it."""
    properties = types.SimpleNamespace(
        multi_processor_count=sms, total_memory=1 << 37, major=10, minor=0, name="emulated"
    )
    saved = torch.cuda.get_device_properties, torch.cuda.get_device_capability
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_capability = lambda *_: (10, 0)
    try:
        triton.runtime.driver.active.get_current_target()
    except (RuntimeError, AttributeError):
        triton.runtime.driver.set_active(EmulatedDriver())
    _forget_sizes()
    try:
        yield
    finally:
        _forget_sizes()
        torch.cuda.get_device_properties, torch.cuda.get_device_capability = saved


def _forget_sizes():
    """Tutorials remember how many SMs the GPU has."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tutorial_"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and value.__module__ == name:
                    value.cache_clear()


@functools.cache
def load(name):
    """A tutorial module, by its file name."""
    path = os.path.join(TUTORIALS, name + ".py")
    if not os.path.exists(path):
        pytest.skip(f"this Triton has no {name}")
    emulator.install()
    label = "tutorial_" + name.replace("-", "_").replace("/", "_")
    spec = importlib.util.spec_from_file_location(label, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    with no_gpu():
        spec.loader.exec_module(module)
    return module


def _matrices(m, n, k, dtype=torch.float16, seed=0):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=g).to(dtype)
    b = torch.randn(k, n, generator=g).to(dtype)
    return a, b


def _gemm(module, m, n, k, config, dtype=torch.float16):
    def build():
        a, b = _matrices(m, n, k, dtype)
        expected = (a.float() @ b.float()).to(dtype)
        return lambda: [load(module).matmul(a, b, config=config and dict(config))], [expected], 0.02 * k**0.5

    return build


GEMM_WS = dict(
    BLOCK_SIZE_M=128,
    BLOCK_SIZE_N=128,
    BLOCK_SIZE_K=64,
    GROUP_SIZE_M=8,
    NUM_SMEM_BUFFERS=3,
    NUM_TMEM_BUFFERS=2,
    NUM_MMA_GROUPS=1,
    EPILOGUE_SUBTILE=2,
    NUM_CTAS=1,
    SPLIT_K=1,
    INTERLEAVE_EPILOGUE=0,
)
GEMM_CLC = dict(
    BLOCK_SIZE_M=128,
    BLOCK_SIZE_N=128,
    BLOCK_SIZE_K=64,
    GROUP_SIZE_M=8,
    NUM_SMEM_BUFFERS=2,
    NUM_TMEM_BUFFERS=2,
    EPILOGUE_SUBTILE=True,
)
GEMM_PIPELINED = dict(BLOCK_SIZE_M=128, BLOCK_SIZE_N=128, BLOCK_SIZE_K=64, GROUP_SIZE_M=8, NUM_STAGES=3)
HOPPER_WS = dict(
    BM=128,
    BN=128,
    BK=64,
    GROUP_SIZE_M=8,
    NUM_STAGES=3,
    NUM_MMA_WARPS=8,
    NUM_MMA_GROUPS=2,
    EPILOGUE_SUBTILE=False,
    NUM_CTAS=1,
)

CASES["gemm_ws"] = _gemm("blackwell_gemm_ws", 208, 304, 416, GEMM_WS)
CASES["gemm_ws bf16 two groups"] = _gemm(
    "blackwell_gemm_ws",
    304,
    208,
    160,
    GEMM_WS | dict(NUM_MMA_GROUPS=2, BLOCK_SIZE_M=256, EPILOGUE_SUBTILE=4, INTERLEAVE_EPILOGUE=1),
    torch.bfloat16,
)
CASES["gemm_ws split k"] = _gemm("blackwell_gemm_ws", 256, 136, 416, GEMM_WS | dict(SPLIT_K=2))
CASES["gemm_ws warp barrier"] = _gemm("blackwell_gemm_ws", 208, 136, 160, GEMM_WS | dict(USE_WARP_BARRIER=True))
CASES["gemm_ws two ctas"] = _gemm(
    "blackwell_gemm_ws", 304, 136, 160, GEMM_WS | dict(NUM_CTAS=2, ctas_per_cga=(2, 1, 1))
)
CASES["gemm_clc"] = _gemm("blackwell_gemm_clc", 208, 304, 160, GEMM_CLC)
CASES["gemm_clc warp barrier"] = _gemm("blackwell_gemm_clc", 208, 304, 160, GEMM_CLC | dict(USE_WARP_BARRIER=True))
CASES["gemm_2cta"] = _gemm("blackwell_gemm_2cta", 512, 512, 192, None)
CASES["gemm_pipelined"] = _gemm("blackwell_gemm_pipelined", 256, 128, 192, GEMM_PIPELINED)
CASES["hopper gemm_pipelined"] = _gemm("hopper_gemm_pipelined", 208, 136, 160, GEMM_PIPELINED)
CASES["hopper gemm_ws"] = _gemm("hopper_gemm_ws", 256, 256, 192, HOPPER_WS)
CASES["hopper gemm_ws warp barrier"] = _gemm("hopper_gemm_ws", 256, 256, 192, HOPPER_WS | dict(USE_WARP_BARRIER=True))


def _hopper_persistent(name):
    def build():
        a, b = _matrices(256, 256, 256)
        return lambda: [load(name).matmul_tlx_ws_persistent(a, b)], [(a.float() @ b.float()).half()], 0.4

    return build


CASES["hopper gemm cooperative"] = _hopper_persistent("hopper-persistent-gemm-ws-cooperative")
CASES["hopper gemm ping-pong"] = _hopper_persistent("hopper-persistent-gemm-ws-pingpong")


@case("grouped gemm")
def _grouped():
    shapes = [(136, 128, 128), (128, 192, 192)]  # the host code takes square B only
    pairs = [_matrices(m, n, k, seed=i) for i, (m, n, k) in enumerate(shapes)]
    module = load("blackwell-grouped-gemm_test")
    module.supports_tma = lambda: True  # asks for a GPU
    A, B = [p[0] for p in pairs], [p[1] for p in pairs]
    return lambda: module.group_gemm_tlx_fn(A, B), [(a.float() @ b.float()).half() for a, b in pairs], 0.4


@case("addmm 2cta")
def _addmm():
    a, b = _matrices(256, 256, 256)
    module = load("blackwell-triton-addmm-2cta_test")
    return lambda: [module._launch_tlx_2cta(a, b)], [(a.float() @ b.float()).half()], 0.4


def _layernorm(module, function, m, n, **keywords):
    def build():
        g = torch.Generator().manual_seed(1)
        x, w, b = (torch.randn(*s, generator=g).half() for s in ((m, n), (n,), (n,)))
        expected = F.layer_norm(x.float(), (n,), w.float(), b.float()).half()

        def run():
            out = getattr(load(module), function)(x, w, b, 1e-5, **keywords)
            return [out[0] if isinstance(out, tuple) else out]

        return run, [expected], 2e-2

    return build


CASES["layernorm multi-cta"] = _layernorm("blackwell-multi-cta-layernorm_test", "multi_cta_layernorm", 4, 16384)
CASES["layernorm multi-cta ws"] = _layernorm(
    "blackwell_multi_cta_layernorm_ws_test", "multi_cta_layernorm_ws", 5, 16384
)
CASES["layernorm 1d"] = _layernorm("testing/multi_cta_layer_norm", "multi_cta_layernorm", 3, 4096)
CASES["layernorm 2d"] = _layernorm("testing/multi_cta_layer_norm", "multi_cta_layernorm_2d", 5, 4096)


# ---------------------------------------------------------------- attention


def _qkv(z, h, n, d, dtype=torch.float16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(z, h, n, d, generator=g) * 0.5).to(dtype) for _ in range(3)]


def _attention(module, n, d, causal, config, h=1, dtype=torch.float16, takes_causal=True, scale=0.5):
    def build():
        q, k, v = _qkv(1, h, n, d, dtype)
        expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=scale, is_causal=causal).to(
            dtype
        )
        extra = (causal,) if takes_causal else ()
        return lambda: [load(module).attention(q, k, v, scale, *extra, config=dict(config))], [expected], 1e-2

    return build


FA = dict(BLOCK_M=256, BLOCK_N=128, NUM_BUFFERS_KV=3, NUM_BUFFERS_QK=1, NUM_MMA_GROUPS=2)
FA_P = FA | dict(NUM_BUFFERS_Q=1)
FA_PP = FA_P | dict(NUM_MMA_SLICES=2, GROUP_SIZE_N=1, USE_WARP_BARRIER=False, RESCALE_OPT=False, USE_WHERE=False)
FA_HOPPER = dict(BLOCK_M=128, BLOCK_N=128, NUM_BUFFERS=2, NUM_MMA_WARPS=8, NUM_MMA_GROUPS=2)
FA_HOPPER_P = dict(BLOCK_M=128, BLOCK_N=128, NUM_BUFFERS_Q=1, NUM_BUFFERS_KV=2, NUM_MMA_WARPS=8, NUM_MMA_GROUPS=2)

CASES["fa_ws"] = _attention("blackwell_fa_ws", 256, 128, False, FA, takes_causal=False)
CASES["fa_ws d64"] = _attention("blackwell_fa_ws", 512, 64, False, FA | dict(BLOCK_N=64), takes_causal=False)
for _causal in (False, True):
    _tag = " causal" if _causal else ""
    CASES["fa_ws_persistent" + _tag] = _attention("blackwell_fa_ws_persistent", 512, 128, _causal, FA_P)
    CASES["fa_ws_pipelined" + _tag] = _attention("blackwell_fa_ws_pipelined", 512, 128, _causal, FA)
    CASES["fa_ws_pipelined_persistent" + _tag] = _attention(
        "blackwell_fa_ws_pipelined_persistent", 512, 128, _causal, FA_PP | dict(RESCALE_OPT=True)
    )
    CASES["fa_clc" + _tag] = _attention("blackwell_fa_clc", 256, 128, _causal, FA_PP, h=3)
CASES["fa_ws_pipelined_persistent where warp barrier"] = _attention(
    "blackwell_fa_ws_pipelined_persistent",
    256,
    64,
    True,
    FA_PP | dict(RESCALE_OPT=True, USE_WHERE=True, USE_WARP_BARRIER=True),
    h=3,
    dtype=torch.bfloat16,
)
CASES["fa_ws_pipelined_persistent block 128"] = _attention(
    "blackwell_fa_ws_pipelined_persistent", 256, 128, False, FA_PP | dict(BLOCK_M=128)
)
CASES["hopper fa_ws"] = _attention("hopper_fa_ws", 256, 128, False, FA_HOPPER, takes_causal=False)
CASES["hopper fa_ws_pipelined"] = _attention("hopper_fa_ws_pipelined", 384, 128, False, FA_HOPPER, takes_causal=False)
CASES["hopper fa ping-pong"] = _attention(
    "hopper_fa_ws_pipelined_pingpong", 384, 128, False, FA_HOPPER, takes_causal=False
)
CASES["hopper fa ping-pong persistent"] = _attention(
    "hopper_fa_ws_pipelined_pingpong_persistent", 384, 128, False, FA_HOPPER_P, takes_causal=False
)


def _backward(ctas, causal, n=256, d=128, scale=0.5):
    """The backward of fa_ws_pipelined_persistent, launched as its host code does."""

    def build():
        module = load("blackwell_fa_ws_pipelined_persistent")
        q, k, v = (t.requires_grad_() for t in _qkv(1, 1, n, d))
        reference = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=scale, is_causal=causal)
        do = torch.randn(reference.shape, generator=torch.Generator().manual_seed(3)).half()
        reference.backward(do.float())
        expected = [q.grad.float(), k.grad.float(), v.grad.float()]
        q, k, v = (t.detach() for t in (q, k, v))
        with torch.no_grad():
            s = (q.float() @ k.float().transpose(-1, -2)) * scale
            if causal:
                s = s.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
            M = torch.logsumexp(s, -1) * 1.4426950408889634
            delta = (reference.detach() * do.float()).sum(-1)
        return lambda: _run_backward(module, q, k, v, do, M, delta, ctas, causal, scale), expected, 3e-2

    return build


def _run_backward(module, q, k, v, do, M, delta, ctas, causal, scale):
    z, h, n, d = q.shape
    scaled_k = k * (scale * 1.4426950408889634)
    dq = torch.empty(q.shape, dtype=torch.float32)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    partial = torch.zeros([z, h, n, d], dtype=torch.float32)
    shape, strides = [z, h, n, d], [h * n * d, n * d, d, 1]

    def wide(t):
        return TensorDescriptor(t, shape=shape, strides=strides, block_shape=[1, 1, 1, 1])

    desc_dq = TensorDescriptor(
        partial, shape=[z, h, 2 * n, d // 2], strides=[h * n * d, n * d, d // 2, 1], block_shape=[1, 1, 1, 1]
    )
    flat = [TensorDescriptor(t, shape=[z * h * n], strides=[1], block_shape=[1]) for t in (M, delta)]
    configs = module.configs_bwd_1cta[:1] if ctas == 1 else module.configs_bwd_2cta[:1]
    kernel = triton.autotune(configs=configs, key=["N_CTX", "HEAD_DIM"])(module._attn_bwd_ws.fn)

    def grid(meta):
        tiles = triton.cdiv(n, meta["BLOCK_N1"])
        group = meta.get("NUM_CTAS", 1)
        return (triton.cdiv(tiles, group) * group, h, z)

    kernel[grid](
        *(wide(q), wide(scaled_k), wide(v), scale, wide(do), desc_dq, wide(dk), wide(dv), *flat, M, delta, h, z, n),
        *(wide(scaled_k), wide(q), wide(do)),
        BLK_SLICE_FACTOR=2,
        HEAD_DIM=d,
        STAGE=3 if causal else 1,
    )
    block = module._bwd_selected_meta["BLOCK_M1"] // module._bwd_selected_meta["NUM_CTAS"]
    module._attn_bwd_dq_postprocess[(n // 128, z * h)](
        partial, dq, n, BLK=block, HALF_HD=d // 2, BLOCK_M=128, HEAD_DIM=d
    )
    return [dq, dk.float(), dv.float()]


for _causal in (False, True):
    _tag = " causal" if _causal else ""
    CASES["fa backward 1-CTA" + _tag] = _backward(1, _causal)
    CASES["fa backward 2-CTA" + _tag] = _backward(2, _causal)


@case("cross-attention")
def _cross():
    module = load("blackwell-cross-attention")
    g = torch.Generator().manual_seed(5)
    lengths_kv, lengths_q, h, d = torch.tensor([130, 57]), torch.tensor([33, 70]), 1, 128
    kv, qo = (F.pad(torch.cumsum(x, 0), (1, 0)) for x in (lengths_kv, lengths_q))
    q, k, v = ((torch.rand(int(o[-1]), h, d, generator=g) * 0.2 - 0.1).to(torch.bfloat16) for o in (qo, kv, kv))
    alpha, longest = d**-0.5, 256
    expected = torch.zeros(q.shape)
    for b in range(2):
        rows, cols = slice(qo[b], qo[b + 1]), slice(kv[b], kv[b + 1])
        s = torch.einsum("qhd,khd->hqk", q[rows].float(), k[cols].float()) * alpha
        expected[rows] = torch.einsum("hqk,khd->qhd", F.silu(s) / longest, v[cols].float())

    def run():
        return [
            module.triton_hstu_cross_attn_fwd(
                max_seq_len=longest,
                alpha=alpha,
                q=q,
                k=k,
                v=v,
                seq_offsets=kv,
                seq_offsets_q=qo,
                max_q_len=int(lengths_q.max()),
                attn_scale=torch.tensor(1.0 / longest),
                variant="tlx_single_q",
            ).float()
        ]

    return run, [expected], 2e-3


# ---------------------------------------------------------------- MXFP8


def to_mx(x):
    """[rows, K] float -> (fp8 e4m3 [rows, K], scales in the tensor core's packed order, [rows, K / 32] exponents)."""
    rows, k = x.shape
    blocks = x.float().reshape(rows, k // 32, 32)
    ratio = blocks.abs().amax(-1) / 448.0
    exponent = torch.ceil(torch.log2(ratio.clamp_min(2.0**-127)))
    scaled = (blocks * torch.exp2(-exponent)[..., None]).clamp(-448, 448).reshape(rows, k)
    return scaled.to(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8)


def packed(scales, batch):
    """[rows, cols] uint8 scales of `batch` stacked matrices -> [batch, rows / 128, cols / 4, 2, 256]."""
    rows, cols = scales.shape
    per = rows // batch
    padded = F.pad(scales.reshape(batch, per, cols), (0, -cols % 4, 0, -per % 128))
    b, r, c = padded.shape
    blocks = padded.reshape(b, r // 128, 4, 32, c // 4, 4).permute(0, 1, 4, 3, 2, 5)
    return blocks.reshape(b, r // 128, c // 4, 2, 256).contiguous()


def _mx_rows(x):
    """Quantise [1, 1, N, D] along D."""
    data, scale = to_mx(x.reshape(-1, x.shape[-1]))
    return data.reshape(x.shape).contiguous(), packed(scale, 1)


def _mx_columns(x):
    """Quantise [1, 1, N, D] along N: the scales belong to the transpose."""
    data, scale = to_mx(x.reshape(-1, x.shape[-1]).t().contiguous())
    return data.t().reshape(x.shape).contiguous(), packed(scale, 1)


MX = FA_P | dict(NUM_Q_SCALE_TMEM_BUFFERS=1, NUM_KV_SCALE_TMEM_BUFFERS=2, GROUP_SIZE_N=1, RESCALE_OPT=True)


def _mx_module():
    """The MXFP8 tutorial imports torchao for its input generator only; the tests make their own inputs."""
    for name in (
        "torchao",
        "torchao.prototype",
        "torchao.prototype.mx_formats",
        "torchao.prototype.mx_formats.mx_tensor",
    ):
        if name not in sys.modules:
            stub = types.ModuleType(name)
            stub.MXTensor = stub.ScaleCalculationMode = None
            sys.modules[name] = stub
    return load("blackwell_fa_ws_pipelined_persistent_mxfp8")


def _mx_forward(causal, d):
    def build():
        module = _mx_module()
        q, k, v = (t.to(torch.bfloat16) for t in _qkv(1, 1, 256, d))
        expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.5, is_causal=causal)
        (q8, qs), (k8, ks), (v8, vs) = _mx_rows(q), _mx_rows(k), _mx_columns(v)
        return (
            (lambda: [module.attention(q8, k8, v8, qs, ks, vs, 0.5, causal, config=dict(MX)).float()]),
            [expected],
            0.11,
        )

    return build


CASES["mxfp8 forward"] = _mx_forward(False, 128)
CASES["mxfp8 forward causal"] = _mx_forward(True, 128)
CASES["mxfp8 forward d64"] = _mx_forward(False, 64)


def _mx_backward(causal):
    def build():
        module = _mx_module()
        q, k, v = (t.to(torch.bfloat16) for t in _qkv(1, 1, 256, 128))
        leaves = [t.float().requires_grad_() for t in (q, k, v)]
        reference = F.scaled_dot_product_attention(*leaves, scale=0.5, is_causal=causal)
        do = torch.randn(reference.shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
        reference.backward(do.float())
        s = (q.float() @ k.float().transpose(-1, -2)) * 0.5
        if causal:
            s = s.masked_fill(~torch.ones(256, 256, dtype=torch.bool).tril(), float("-inf"))
        M = torch.logsumexp(s, -1) * 1.4426950408889634
        rows, columns = ([f(t) for t in (q, k, v, do)] for f in (_mx_rows, _mx_columns))

        def run():
            grads = module.attention_bwd(
                *(rows[3][0], columns[3][0], rows[0][0], columns[0][0], rows[1][0], columns[1][0], rows[2][0]),
                *(reference.detach().to(torch.bfloat16), M, rows[0][1], columns[0][1], rows[1][1], columns[1][1]),
                *(rows[2][1], rows[3][1], columns[3][1], 0.5),
                do_bf16=do,
                causal=causal,
            )
            return [g.float() for g in grads]

        return run, [t.grad for t in leaves], "cosine"

    return build


CASES["mxfp8 backward"] = _mx_backward(False)
CASES["mxfp8 backward causal"] = _mx_backward(True)


def check(outputs, expected, tolerance):
    """Compare; a tolerance of "cosine" asks for a cosine of 0.98 (what the tutorial's own test asks)."""
    assert len(outputs) == len(expected)
    for index, (out, want) in enumerate(zip(outputs, expected)):
        out, want = out.float(), want.float()
        assert torch.isfinite(out).all(), f"output {index} is not finite"
        if tolerance == "cosine":
            cosine = F.cosine_similarity(out.flatten(), want.flatten(), dim=0).item()
            assert cosine > 0.98, f"output {index}: cosine {cosine}"
        else:
            error = (out - want).abs().max().item()
            assert error <= tolerance, f"output {index}: off by {error}"


def run(name, **options):
    """Run one case on the emulator and compare; returns the outputs."""
    launch, expected, tolerance = CASES[name]()
    with emulator.options(**options), no_gpu(), np.errstate(all="ignore"):
        outputs = launch()
    check(outputs, expected, tolerance)
    return outputs
