"""The live view without a browser: what it draws, how often, and what its controls set."""

import asyncio
import base64
import gc
import re
import threading
import time
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ipywidgets import Widget

from grpo_lab.widgets import Dashboard
from grpo_lab.widgets import dashboard as dashboard_module
from tests.widgets.fake_run import FakeRun


class Shown:
    """Stands where the front end would: keeps what is displayed."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, Any]] = []

    def __call__(self, bundle: dict[str, Any], **_: object) -> "Shown":
        self.bundles.append(bundle)
        return self

    update = __call__


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    monkeypatch.setattr(dashboard_module, "display", shown)
    return shown


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 3
    while any(thread.name in ("dashboard", "fake-run") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread outlives its run"
        time.sleep(0.02)


def texts(dashboard: Dashboard) -> str:
    """All HTML of the view."""
    return "".join(getattr(child, "value", "") for child in dashboard.view.children)


def controls(dashboard: Dashboard) -> tuple[Any, Any, Any]:
    place, pause, stop = dashboard.view.children[1].children
    return place.children[0], pause, stop


def count_draws(dashboard: Dashboard) -> list[float]:
    times: list[float] = []
    dashboard.view.children[2].observe(lambda _: times.append(time.monotonic()), names="value")
    return times


def test_a_run_in_a_thread_is_followed_to_its_end(shown):
    run = FakeRun(total_steps=40, gap_s=0.005)
    dashboard = Dashboard(run, refresh_hz=20)
    draws = count_draws(dashboard)
    dashboard.show()
    run.start()
    assert dashboard.wait() == "finished"
    assert 2 <= len(draws) <= 15
    assert "finished, step 40 of 40" in texts(dashboard)
    assert "at step 40" in texts(dashboard)
    assert run.subscribers == []


def test_a_run_in_the_cell_is_drawn_too(shown):
    run = FakeRun(total_steps=5)
    dashboard = Dashboard(run)
    dashboard.show()
    run.start(background=False)
    assert dashboard.wait() == "finished"
    assert "at step 5" in texts(dashboard)


def test_what_is_displayed_outlives_the_widget(shown):
    run = FakeRun(total_steps=5)
    dashboard = Dashboard(run)
    dashboard.show()
    run.start(background=False)
    dashboard.wait()
    assert "application/vnd.jupyter.widget-view+json" in shown.bundles[0]
    for bundle in shown.bundles:
        assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG\r\n")
        assert "\n" not in bundle["text/plain"]
    # The cell that shows the view gets its picture, and the cell that waits one of its own.
    assert "finished, step 5 of 5" in shown.bundles[-2]["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in shown.bundles[-2]
    assert "application/vnd.jupyter.widget-view+json" not in shown.bundles[-1]


def in_own_loop(cell: Callable[[], Coroutine[Any, Any, str]]) -> str:
    """What the cell returns; in a thread, since Playwright leaves a loop running in that of the tests."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(cell())).result()


def test_an_awaited_run_ends_while_other_tasks_go_on(shown):
    run = FakeRun(total_steps=30, gap_s=0.01)
    dashboard = Dashboard(run, refresh_hz=20)
    dashboard.show()
    turns = 0

    async def cell() -> str:
        async def kernel() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.02)

        other = asyncio.create_task(kernel())
        try:
            return await asyncio.wait_for(dashboard.finished(), 30)
        finally:
            other.cancel()

    run.start()
    assert in_own_loop(cell) == "finished"
    assert turns > 3
    assert "finished, step 30 of 30" in shown.bundles[-1]["text/plain"]
    assert "image/png" in shown.bundles[-1]


def test_an_interrupt_of_the_awaiting_cell_stops_the_run(shown):
    run = FakeRun(total_steps=300, gap_s=0.01)
    dashboard = Dashboard(run)

    async def cell() -> str:
        waiting = asyncio.create_task(dashboard.finished())
        await asyncio.sleep(0.2)
        waiting.cancel()
        return await waiting

    run.start()
    assert in_own_loop(cell) == "stopped"
    assert run.calls == ["stop"]
    assert run.step < 300


def test_a_failed_run_shows_its_error_and_raises_it(shown):
    run = FakeRun(total_steps=20, gap_s=0.005, fails_at=4)
    dashboard = Dashboard(run, refresh_hz=20)
    dashboard.show()
    run.start()
    with pytest.raises(RuntimeError, match="step 4 failed"):
        dashboard.wait()
    assert "ValueError: no &lt;memory&gt; left &amp; none to come" in texts(dashboard)
    assert "failed, step 3 of 20" in shown.bundles[-1]["text/plain"]


def test_a_fast_run_is_drawn_at_the_pace_asked_for(shown):
    """Case N01: 5,000 steps as fast as they come, few draws, flat memory, a small message."""
    run = FakeRun(total_steps=5000)
    dashboard = Dashboard(run, refresh_hz=4)
    draws = count_draws(dashboard)
    sizes: dict[int, int] = {}
    began = time.monotonic()
    dashboard.show()
    run.start()
    dashboard.wait()
    seconds = time.monotonic() - began
    assert len(draws) <= 4 * seconds + 3
    assert len(dashboard.view.children[2].value) < 200_000
    assert "at step 5000" in texts(dashboard)
    # Drawing again and again keeps nothing.
    tracemalloc.start()
    for count in range(1, 9):
        dashboard._draw()
        if count in (2, 8):
            gc.collect()
            sizes[count] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert sizes[8] - sizes[2] < 100_000


def test_the_slider_offers_powers_of_two_and_sets_the_run():
    run = FakeRun()
    dashboard = Dashboard(run)
    slider, _, _ = controls(dashboard)
    assert slider.options == (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert slider.value == 2048
    slider.value = 64
    assert run.chunk_size == 64
    next_slider, _, _ = controls(dashboard)
    assert next_slider.value == 64
    next_slider.value = 128
    assert run.chunk_size == 128
    alive = len(Widget.widgets)
    for size in (256, 512, 1024) * 5:
        controls(dashboard)[0].value = size
    assert len(Widget.widgets) == alive


def test_a_chunk_size_that_is_no_power_of_two_is_on_the_slider():
    run = FakeRun()
    run.chunk_size = 100
    slider, _, _ = controls(Dashboard(run))
    assert slider.value == 100
    assert list(slider.options) == sorted(slider.options)


def test_buttons_only_ask_the_run():
    run = FakeRun()
    _, pause, stop = controls(Dashboard(run))
    for button in (pause, pause, stop):
        button.click()
    assert run.calls == ["pause", "resume", "stop"]


def test_the_drawing_thread_leaves_the_controls_alone(shown):
    run = FakeRun(total_steps=30, gap_s=0.005)
    dashboard = Dashboard(run, refresh_hz=20)
    touched: list[str] = []
    for control in controls(dashboard):
        control.observe(lambda change: touched.append(change["name"]))
    dashboard.show()
    run.start()
    dashboard.wait()
    assert touched == []


def test_completions_turn_round():
    run = FakeRun()
    run.add_step()
    dashboard = Dashboard(run)
    turn = dashboard.view.children[3]
    assert "lowest reward first" in texts(dashboard)
    turn.click()
    assert "highest reward first" in texts(dashboard)


def test_notices_record_and_tracker_are_said_escaped():
    run = FakeRun()
    run.notices.append("every <completion> was cut")
    run.status = "running"
    run.add_step()
    text = texts(Dashboard(run))
    assert "every &lt;completion&gt; was cut" in text
    assert str(run.folder) in text
    assert "wandb sync" in text
    assert "Interrupt" in text
    assert re.search(r"about \d+ s left", text)
    assert "near 0" in text


def test_folder_and_tracker_are_text_never_markup():
    run = FakeRun()
    run.folder, run.tracker_description = Path("runs/<script>one"), "<script>two"
    text = texts(Dashboard(run))
    assert "<script>" not in text
    assert "runs/&lt;script&gt;one" in text
    assert "&lt;script&gt;two" in text


def test_the_record_is_named_from_where_the_notebook_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = FakeRun()
    for folder, said in (
        (tmp_path / "runs" / "one", "record: runs/one "),
        (Path("/elsewhere/one"), ": /elsewhere/one "),
    ):
        run.folder = folder
        assert said in texts(Dashboard(run))


def test_a_run_without_rows_says_so():
    text = texts(Dashboard(FakeRun(total_steps=100)))
    assert "new, step 0 of 100" in text
    assert text.count(">no steps yet<") == 4


@pytest.mark.parametrize("pace", [0, -1.0, float("nan")])
def test_a_pace_that_is_none_is_refused(pace):
    with pytest.raises(ValueError, match="refresh_hz must be > 0"):
        Dashboard(FakeRun(), refresh_hz=pace)
