"""What a learner does first: open a chapter, run it, save it, solve an exercise. In a real browser."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

CHAPTERS = sorted(path.name for path in (ROOT / "notebooks").glob("[0-9]*.py"))
PANEL = ".jp-NotebookPanel:not(.lm-mod-hidden)"


def wait_for_notebook(page, path):
    """Until the file is the notebook in front, and its kernel is there and idle.

    The circle in the toolbar is not enough: it is drawn empty before there is a kernel, and Run All then asks for one.
    """
    page.wait_for_function(
        """path => {
            const widget = window.jupyterapp?.shell.currentWidget;
            const session = widget?.sessionContext;
            return widget?.context?.path === path && widget.context.isReady && widget.content.widgets
                && session.isReady && session.session?.kernel?.status === 'idle' && !session.hasNoKernel;
        }""",
        arg=path,
    )
    page.wait_for_selector(PANEL)


def open_notebook(page, lab, path):
    """Open a file as the start page does, and wait for its kernel."""
    page.goto(lab.page(path))
    wait_for_notebook(page, path)


def run_all(page):
    """Run > Run All Cells, and wait until every code cell has its number."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(
        """() => {
            const app = window.jupyterapp.shell.currentWidget.content;
            const code = app.widgets.filter(cell => cell.model.type === 'code' && cell.model.sharedModel.source.trim());
            return code.length && code.every(cell => cell.model.executionCount && cell.model.executionState === 'idle');
        }"""
    )


def save(page):
    """File > Save, and wait until the notebook counts as saved."""
    page.keyboard.press("Control+s")
    page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")


def outputs(page) -> list[dict]:
    """Every output of every code cell, as the notebook's model has it."""
    return page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.content.widgets
            .filter(cell => cell.model.type === 'code')
            .flatMap(cell => cell.model.outputs.toJSON())"""
    )


def errors(page) -> list[str]:
    """What the cells raised."""
    return [f"{out['ename']}: {out['evalue']}" for out in outputs(page) if out["output_type"] == "error"]


@pytest.mark.skipif(not CHAPTERS, reason="no chapters yet")
def test_jfa_lab_lands_on_chapter_00_as_a_notebook(page, lab, screenshot):
    page.goto(lab.page())
    wait_for_notebook(page, "notebooks/00_start_here.py")
    screenshot("start_page")


@pytest.mark.skipif(not CHAPTERS, reason="no chapters yet")
def test_a_double_click_opens_a_chapter_as_a_notebook(page, lab):
    page.goto(lab.page("notebooks"))
    page.locator(".jp-DirListing-item", has_text=CHAPTERS[-1]).dblclick()
    wait_for_notebook(page, f"notebooks/{CHAPTERS[-1]}")
    assert page.locator(PANEL).count() == 1
    assert page.locator(".jp-FileEditor").count() == 0


@pytest.mark.parametrize("chapter", CHAPTERS[:3])
def test_run_all_and_save_leave_the_file_byte_identical(page, lab, screenshot, chapter):
    path = lab.course / "notebooks" / chapter
    before = path.read_bytes()
    open_notebook(page, lab, f"notebooks/{chapter}")
    run_all(page)
    screenshot(f"ran_{chapter.removesuffix('.py')}")
    assert not errors(page)
    save(page)
    assert path.read_bytes() == before


def exercise_cell(text: str, number: str) -> str:
    """The source of the cell tagged ``ex-N.M`` in a percent file."""
    cells = re.split(r"^# %%", text, flags=re.M)
    cell = next(cell for cell in cells if f'"ex-{number}"' in cell.split("\n")[0])
    return cell.split("\n", 1)[1].strip()


def put_into_cell(page, number: str, source: str) -> None:
    """Replace the tagged cell's text, and run it and the check below it, with the keyboard."""
    index = page.evaluate(
        """tag => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            const index = notebook.widgets.findIndex(cell => (cell.model.getMetadata('tags') || []).includes(tag));
            notebook.activeCellIndex = index;
            notebook.widgets[index].model.sharedModel.setSource('');
            notebook.mode = 'edit';
            notebook.scrollToItem(index);
            notebook.widgets[index].editor.focus();
            return index;
        }""",
        f"ex-{number}",
    )
    assert index >= 0
    page.keyboard.insert_text(source)
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Shift+Enter")


def check_report(page, number: str) -> str:
    """The text of the first check below the tagged cell, once it has run."""
    return page.evaluate(
        """async tag => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            const start = notebook.widgets.findIndex(cell => (cell.model.getMetadata('tags') || []).includes(tag));
            const cell = notebook.widgets.slice(start + 1).find(cell => cell.model.type === 'code');
            for (let tries = 0; tries < 600; tries++) {
                if (cell.model.outputs.length && cell.model.executionState !== 'running') break;
                await new Promise(done => setTimeout(done, 100));
            }
            notebook.activeCellIndex = notebook.widgets.indexOf(cell);
            await notebook.scrollToCell(cell);
            return cell.outputArea.node.innerText;
        }""",
        f"ex-{number}",
    )


@pytest.mark.skipif(not list((ROOT / "exercises").glob("01_*.py")), reason="no exercises yet")
def test_an_exercise_shows_a_red_and_then_a_green_check(page, lab, screenshot):
    number = "1.1"
    (exercise,) = (lab.course / "exercises").glob("01_*.py")
    solution = exercise_cell((lab.course / "solutions" / exercise.name).read_text(), number)
    open_notebook(page, lab, f"exercises/{exercise.name}")
    run_all(page)
    assert "not started" in check_report(page, number).lower()
    screenshot("check_not_started")

    put_into_cell(page, number, wrong_answer(solution))
    page.wait_for_timeout(1000)
    red = check_report(page, number)
    screenshot("check_red")
    assert "not right yet" in red and "FAILS" in red, red
    assert "replaced builtins" not in red, "what the notebook's kernel replaces itself is no news to a learner"

    put_into_cell(page, number, solution)
    page.wait_for_timeout(1000)
    green = check_report(page, number)
    screenshot("check_green")
    assert f"{number} " in green and ": passed" in green and "FAILS" not in green, green
    save(page)
    assert solution in exercise.read_text()


def wrong_answer(solution: str) -> str:
    """The solution's function with a body that returns its first argument unchanged."""
    function = next(node for node in ast.parse(solution).body if isinstance(node, ast.FunctionDef))
    arguments = [argument.arg for argument in function.args.args]
    return f"def {function.name}({', '.join(arguments)}):\n    return {arguments[0]}"


def test_nothing_is_written_to_the_home_folder(lab):
    assert not sorted(str(path.relative_to(lab.home)) for path in lab.home.rglob("*"))
