"""The emulator answers as an H200 did (tests/gpu/h200_facts.json, asked by tests/gpu/hardware_facts.py)."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import jfa.emulator as emulator

GPU = Path(__file__).parent.parent / "gpu"
FACTS = json.loads((GPU / "h200_facts.json").read_text())["facts"]
QUESTIONS = [(name, label) for name, answers in FACTS.items() for label in answers]


@pytest.fixture(scope="module")
def questions():
    pytest.importorskip("triton.language.extra.tlx")
    emulator.install()
    spec = importlib.util.spec_from_file_location("hardware_facts", GPU / "hardware_facts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.DEVICE != "cpu":
        pytest.skip("a GPU is present: run hardware_facts.py itself")
    return module.FACTS


@pytest.mark.parametrize("name, label", QUESTIONS, ids=lambda x: x or "all")
@pytest.mark.filterwarnings("ignore")
def test_as_the_h200_answered(questions, name, label):
    said = FACTS[name][label]
    with emulator.options(report="raise"):
        if isinstance(said, str):  # the GPU trapped: so must we, with a name for it
            assert "illegal instruction" in said
            with pytest.raises(emulator.errors.DescriptorError, match="multiple of 16|negative"):
                questions[name]()[label]()
            return
        got = questions[name]()[label]()
    if name == "ragged_attention":
        np.testing.assert_allclose(got, said, atol=4e-6)
    else:
        assert got == said
