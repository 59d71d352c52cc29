"""The tutorial in a real browser: Run All, watch, move the slider, stop, reload.

Run it alone, with pictures left in a folder: `pytest tests/browser --basetemp=shots`.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from grpo_lab.notebook_run import with_parameters
from tests.browser.conftest import TOKEN

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("lab"), pytest.mark.timeout(900)]
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "00_tutorial.ipynb"
PARAMETERS = {
    "steps": 400, "prompts_per_step": 2, "num_generations": 4, "wandb_mode": "disabled", "chunk_size": 64,
}  # fmt: skip


def until(condition: Callable[[], Any], what: str, seconds: float = 90) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)
    return value


def scrolled_to(page: Any, selector: str) -> bool:
    """Whether the element is there; the notebook is scrolled on, as JupyterLab draws a cell when it comes near."""
    page.mouse.move(700, 600)
    page.mouse.wheel(0, 400)
    return page.locator(selector).count() >= 1


def rows(root: Path) -> list[dict[str, Any]]:
    lines = [line for path in root.glob("runs/*/metrics.jsonl") for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def status(root: Path) -> str:
    return next((json.loads(path.read_text())["status"] for path in root.glob("runs/*/run.json")), "")


def test_run_all_steer_stop_and_reload(browser: Any, lab: tuple[str, Path], tmp_path: Path) -> None:
    address, root = lab
    notebook = with_parameters(nbformat.read(NOTEBOOK, as_version=4), PARAMETERS)
    nbformat.write(notebook, root / "tutorial.ipynb")
    page = browser.new_page(viewport={"width": 1500, "height": 1100})
    page.goto(f"{address}/lab/tree/tutorial.ipynb?token={TOKEN}")
    page.wait_for_selector(".jp-Notebook", timeout=60_000)
    page.locator("text=/Python 3 .*Idle/").first.wait_for(timeout=60_000)
    page.click("text=Run >> visible=true")
    page.click("text=Run All Cells >> visible=true")

    # Points arrive while training goes on.
    chart = page.locator("svg[aria-label^='Reward of a step']")
    chart.first.wait_for(timeout=120_000)
    labels: set[str] = set()
    until(lambda: labels.add(chart.first.get_attribute("aria-label")) or len(labels) > 3, "a chart that moves")
    assert status(root) == "running"

    # The slider, three times: each new value is that of the next steps.
    slider = page.locator(".jupyter-widgets .noUi-handle").first
    seen = [64]
    for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
        slider.focus()
        page.keyboard.press(key)
        chosen = until(
            lambda: next((r["loss/chunk_size"] for r in rows(root)[-1:] if r["loss/chunk_size"] != seen[-1]), None),
            f"a chunk size other than {seen[-1]}",
            30,
        )
        seen.append(chosen)
    assert seen == [64, 32, 16, 32]
    page.screenshot(path=tmp_path / "running.png")

    # Pause holds, resume goes on.
    page.click("button:has-text('Pause or go on')")
    until(lambda: "paused" in (page.locator("text=/paused, step/").all_text_contents() or [""])[0], "a pause", 30)
    held = len(rows(root))
    time.sleep(0.5)
    assert len(rows(root)) == held
    page.click("button:has-text('Pause or go on')")
    until(lambda: len(rows(root)) > held, "a step after the pause", 30)

    # Stop ends the run.
    done = len(rows(root))
    page.click("button:has-text('Stop') >> nth=-1")
    until(lambda: status(root) == "stopped", "the end of the run", 60)
    # The step in progress ends, and one may have begun before the click came through.
    assert len(rows(root)) <= done + 2

    # Two prices in an answer are no formula.
    page.locator(".jp-OutputArea-output table.mathjax_ignore").wait_for(state="attached", timeout=90_000)
    time.sleep(1)
    assert page.locator(".jp-OutputArea-output mjx-container").count() == 0

    # After the end a picture is there; a reload brings the view back.
    picture = page.locator(".jp-OutputArea-output img")
    until(lambda: picture.count() >= 1, "a picture in the notebook", 30)
    page.keyboard.press("Control+s")
    until(lambda: "image/png" in (root / "tutorial.ipynb").read_text(), "the saved notebook", 30)
    page.reload()
    page.wait_for_selector(".jp-Notebook", timeout=60_000)
    until(lambda: scrolled_to(page, "svg[aria-label^='Reward of a step']"), "the view after a reload", 180)
    page.screenshot(path=tmp_path / "reloaded.png")
