"""The stripper: what stands in an exercise where the solution stood."""

import pytest

from jfa.course.notebook import parse_percent
from jfa.course.strip import has_markers, solution_source, strip_cell, strip_notebook

NBGRADER = ("### BEGIN SOLUTION", "### END SOLUTION")
OTTER = ("# BEGIN SOLUTION", "# END SOLUTION")


@pytest.mark.parametrize("begin, end", [NBGRADER, OTTER])
def test_a_functions_body_becomes_not_started(begin, end):
    source = f'def f(x):\n    """Doc."""\n    {begin}\n    y = x\n\n    return y\n    {end}\n\n\nz = 1'
    stub = 'def f(x):\n    """Doc."""\n    raise NotImplementedError("2.3: not started")  # YOUR CODE\n\n\nz = 1'
    assert strip_cell(source, "2.3") == stub
    assert solution_source(source) == 'def f(x):\n    """Doc."""\n    y = x\n\n    return y\n\n\nz = 1'


DECORATORS = ["@triton.jit", "@jit", "@triton.autotune([], key=[])\n@triton.jit", "@triton.jit(debug=True)"]


@pytest.mark.parametrize("decorator", DECORATORS)
def test_a_kernels_body_compiles_and_does_nothing(decorator):
    body = "    i = tl.program_id(0)\n    ### BEGIN SOLUTION\n    tl.store(x_ptr + i, 1)\n    ### END SOLUTION"
    source = f"{decorator}\ndef k(x_ptr):\n{body}"
    assert strip_cell(source, "3.1").endswith("    i = tl.program_id(0)\n    pass  # YOUR CODE")


def test_regions_in_nested_blocks_keep_their_indentation():
    source = (
        "def f(x):\n    for i in x:\n        # BEGIN SOLUTION\n        x += i\n        # END SOLUTION\n    return x"
    )
    assert (
        strip_cell(source, "1.1").split("\n")[2] == '        raise NotImplementedError("1.1: not started")  # YOUR CODE'
    )


def test_names_at_module_level_hold_an_ellipsis():
    source = "### BEGIN SOLUTION\na = 1\nb: int = a + 1\nprint(b)\n### END SOLUTION\nc = 3"
    assert strip_cell(source, "0.1") == "a = ...  # YOUR CODE\nb = ...  # YOUR CODE\nc = 3"


def test_otters_single_lines_and_silent_regions():
    assert strip_cell("x = 5 * 7  # SOLUTION\ny = 2", "0.1") == "x = ...  # YOUR CODE\ny = 2"
    assert strip_cell("# BEGIN SOLUTION NO PROMPT\nhelper = 1\n# END SOLUTION\ny = 2", "0.1") == "y = 2"
    assert solution_source("x = 5  # SOLUTION") == "x = 5"


def test_two_regions_in_a_cell():
    body = "(x):\n    # BEGIN SOLUTION\n    return 1\n    # END SOLUTION\n\n"
    source = f"def f{body}def g{body}"
    assert strip_cell(source, "1.1").count("YOUR CODE") == 2 and "return" not in strip_cell(source, "1.1")


UNBALANCED = ["# BEGIN SOLUTION\nx = 1", "x = 1\n# END SOLUTION", "# BEGIN SOLUTION\n# BEGIN SOLUTION\n# END SOLUTION"]


@pytest.mark.parametrize("source", UNBALANCED)
def test_unbalanced_markers_are_refused(source):
    assert has_markers(source)
    with pytest.raises(ValueError, match="SOLUTION"):
        strip_cell(source, "1.1")


def test_cells_for_the_solution_only_are_dropped():
    text = '# %%\nx = 1\n\n# %% tags=["solution-only"]\nplot(x)\n\n# %%\ny = 2\n'
    assert [c.source for c in strip_notebook(parse_percent(text)).cells] == ["x = 1", "y = 2"]


def test_a_starter_region_gives_the_faulty_code_and_the_solution_keeps_its_own():
    region = (
        "    ### BEGIN SOLUTION\n    free(x)\n    ### STARTER\n    # if x:\n    #     free(0)\n    ### END SOLUTION\n"
    )
    source = "@triton.jit\ndef k(x):\n" + region + "    end()"
    assert strip_cell(source, "9.1") == "@triton.jit\ndef k(x):\n    if x:\n        free(0)\n    end()"
    assert solution_source(source) == "@triton.jit\ndef k(x):\n    free(x)\n    end()"
