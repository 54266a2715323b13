"""Shared by all tests: one thread, caches inside the checkout, and no GPU tests where there is no GPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Before torch, numpy or triton are imported: two workers on two cores are fastest with one thread each, and a test run
# leaves nothing in the user's home.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
CACHES = {"TRITON_CACHE_DIR": "triton", "MPLCONFIGDIR": "matplotlib", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
for name, folder in CACHES.items():
    os.environ.setdefault(name, str(ROOT / ".jfa" / "cache" / folder))
os.environ.setdefault("MPLBACKEND", "agg")

# A shell's background job ignores SIGINT, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# No test asserts a time, so none fails for being slow; no example database, so a run does not depend on an earlier one.
settings.register_profile("jfa", deadline=None, database=None)
settings.load_profile("jfa")


def pytest_collection_modifyitems(config, items):
    """Skip tests marked ``gpu`` where torch sees none; torch is imported only if there are such tests."""
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout's root folder."""
    return ROOT
