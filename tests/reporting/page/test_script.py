"""The page's script in a browser without a window: zoom, keys, pointing, and that nothing hostile runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from gplan.reporting.analysis import analysis_of
from gplan.reporting.page.document import page
from tests.reporting.subjects import make_plan, make_run, named

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

ATTACK = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
# Before the page's own script: a browser without a window draws when it likes, which may be never.
SOON = "<head><script>window.requestAnimationFrame = (draw) => setTimeout(draw, 0);</script>"
PROBE = """
<script>
const seen = { errors: [] };
addEventListener("error", (event) => seen.errors.push(event.message));
addEventListener("load", async () => {
  const frame = () => new Promise((done) => setTimeout(done, 50));
  const canvas = document.querySelector("canvas");
  const tip = () => document.querySelector(".tip");
  const said = () => document.querySelector("[aria-live]").textContent;
  const out = document.querySelector("[data-do=out]");
  const key = (name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
  const point = (kind, x, y, more) => canvas.dispatchEvent(
    new PointerEvent(kind, { clientX: canvas.getBoundingClientRect().left + x, clientY: canvas.getBoundingClientRect().top + y, pointerId: 1, ...more }));
  seen.live = document.querySelector(".pipeline").classList.contains("live");
  seen.height = canvas.getBoundingClientRect().height;
  seen.picture = getComputedStyle(document.querySelector(".pipeline .chart")).display;
  key("ArrowRight"); seen.first = said();
  key("ArrowRight"); seen.second = said();
  key("ArrowDown"); seen.below = said();
  key("ArrowUp"); key("Home"); key("End"); seen.last = said();
  seen.shown = !tip().hidden;
  key("Escape"); seen.gone = tip().hidden;
  seen.whole = out.disabled;
  key("+"); key("+"); await frame(); seen.zoomed = !out.disabled;
  key("0"); await frame(); seen.back = out.disabled;
  point("pointermove", 75, 40); seen.pointed = tip().innerText;
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: 99, cancelable: true })); await frame(); seen.scrolled = out.disabled;
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -600, ctrlKey: true, cancelable: true, clientX: 640 })); await frame();
  seen.wheeled = !out.disabled;
  point("pointermove", 600, 40); seen.before = tip().innerText;
  canvas.setPointerCapture = () => {};
  point("pointerdown", 600, 40); point("pointermove", 300, 40); point("pointerup", 300, 40); await frame();
  point("pointermove", 300, 40); seen.dragged = tip().innerText;
  const layer = document.querySelector(".layers i");
  layer.dispatchEvent(new PointerEvent("pointermove", { clientX: 100, clientY: 100 })); seen.layer = tip().innerText;
  seen.title = document.title;
  seen.scripts = document.scripts.length;
  seen.images = document.images.length;
  const result = document.createElement("pre");
  result.id = "seen";
  result.textContent = JSON.stringify(seen);
  document.body.append(result);
});
</script></body>"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a browser found on the page of a run whose names are hostile."""
    plan = named(make_plan(4, num_stages=2, num_microbatches=2), [ATTACK, "b", "c", ATTACK])
    run = make_run(replace(plan, model=replace(plan.model, name=ATTACK)))
    folder: Path = tmp_path_factory.mktemp("page")
    html = page(run, (), analysis_of(plan, None)).replace("<head>", SOON, 1).replace("</body>", PROBE)
    (folder / "index.html").write_text(html, encoding="utf-8")
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}",
        "--window-size=1280,900", "--virtual-time-budget=8000", "--dump-dom", f"file://{folder / 'index.html'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:]
    return dict(json.loads(unescape(found[1])))


def test_the_script_runs_without_an_error_and_takes_the_place_of_the_picture(seen: dict[str, Any]) -> None:
    assert seen["errors"] == []
    assert seen["live"]
    assert seen["height"] > 100
    assert seen["picture"] == "none"


def test_nothing_that_a_name_says_is_carried_out(seen: dict[str, Any]) -> None:
    assert "taken" not in seen["title"].replace(ATTACK, "")
    assert seen["scripts"] == 4, "the numbers, the page's own, and this test's two"
    assert seen["images"] == 0


def test_arrow_keys_go_from_box_to_box_and_say_where(seen: dict[str, Any]) -> None:
    assert seen["first"].startswith("predicted: forward of micro-batch 0, stage 0 on device 0; starts at 0 s")
    assert "forward of micro-batch 1, stage 0" in seen["second"]
    assert "device 1" in seen["below"]
    assert "optimizer, stage 0 on device 0" in seen["last"] or "waits: optimizer" in seen["last"]
    assert "measured: starts at 0 s, takes" in seen["first"], "and what the other side has"
    assert (seen["shown"], seen["gone"]) == (True, True)


def test_plus_zooms_and_zero_shows_the_whole_step_again(seen: dict[str, Any]) -> None:
    assert (seen["whole"], seen["zoomed"], seen["back"]) == (True, True, True)


def test_the_wheel_zooms_with_ctrl_alone_and_a_box_follows_the_pointer_that_drags_it(seen: dict[str, Any]) -> None:
    assert (seen["scrolled"], seen["wheeled"]) == (True, True)
    assert seen["dragged"] == seen["before"] != ""


def test_pointing_shows_a_box_and_a_layer_with_hostile_names_as_text(seen: dict[str, Any]) -> None:
    assert seen["pointed"].startswith("forward of micro-batch 0, stage 0 on device 0")
    assert ATTACK in seen["pointed"]
    assert seen["layer"].startswith(ATTACK)
