"""The page in states that a healthy swarm does not show: a fake node with a scripted swarm and scripted tokens
(`web/examples/fake_node`) behind the real HTTP front. Screenshots are left beside the logs for people to look at."""

import contextlib
import os
import pathlib
import re
import subprocess

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

FAKE_NODE = pathlib.Path(os.environ["SHOAL_BIN"]).parent / "examples" / "fake_node"
PATIENCE_MS = 40_000

SIZES = {"phone": (360, 740), "desk": (1440, 900)}


@contextlib.contextmanager
def fake_node(scene, port=0):
    """A fake node; yields its process and its address."""
    command = [str(FAKE_NODE), "--scene", scene, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def opened(browser, url, size="desk", scheme="light"):
    """The page of a node, with the list of what it complained about."""
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda line: line.type == "error" and page.problems.append(line.text))
    page.goto(url)
    expect(page.locator("#live")).to_have_text("live")
    yield page
    page.close()


@pytest.fixture
def desk(browser):
    with fake_node("desk") as (_, url), opened(browser, url) as page:
        yield page
        assert page.problems == []


def ask(page, text):
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")
    return page.locator("#log article").last


@pytest.mark.parametrize(
    "scene, size, scheme",
    [
        ("desk", "phone", "light"), ("desk", "phone", "dark"), ("desk", "desk", "light"), ("desk", "desk", "dark"),
        ("alone", "phone", "dark"), ("forming", "desk", "light"), ("many", "phone", "light"), ("many", "desk", "dark"),
        ("trouble", "phone", "light"), ("trouble", "desk", "dark"),
    ],
)
def test_every_scene_can_be_read_by_all(browser, scene, size, scheme):
    with fake_node(scene) as (_, url), opened(browser, url, size, scheme) as page:
        expect(page.locator("#nodes .node").first).to_be_visible()
        views = ["swarm", "chat"] if size == "phone" else ["both"]
        for view in views:
            if view == "chat":
                page.locator("[data-show=chat]").click()
            assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
            save(page, f"{scene}-{size}-{scheme}-{view}")
            found = Axe().run(page)
            problems = [
                f"{one['id']}: {one['help']}: {[node['html'] for node in one['nodes']][:3]}"
                for one in found.response["violations"]
            ]
            assert problems == [], view
        assert page.problems == []


def save(page, name):
    folder = pathlib.Path(os.environ.get("SHOAL_TEST_LOGS", "."))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"page-{name}.png", full_page=True)


def test_why_a_model_fits_nowhere_is_said_node_by_node(desk):
    instance = desk.get_by_label("Instance big-model-2wzf")
    expect(instance).to_contain_text("no set of nodes has room")
    expect(instance).to_contain_text("and 4 slots. Try: ")
    row = instance.get_by_role("row", name=re.compile("studio"))
    expect(row).to_contain_text("560 MB")
    expect(instance).to_contain_text("an offer of 1.4 GB on studio would fit")


def test_a_model_is_served_and_stopped(desk):
    desk.get_by_role("button", name="Serve a model").click()
    desk.get_by_label("Model", exact=True).select_option("smollm2-360m")
    desk.get_by_label("Split").select_option("pipeline=2")
    desk.get_by_role("button", name="Check fit").click()
    answer = desk.locator("#serve-answer")
    expect(answer).to_contain_text("It fits")
    expect(answer).to_contain_text("layers 0 to 14")
    desk.get_by_role("button", name="Serve", exact=True).click()
    expect(answer).to_contain_text("is on its way")
    instance = desk.get_by_label(re.compile("Instance smollm2-360m"))
    expect(instance).to_contain_text(re.compile(r"loading \d+ %"))
    expect(instance.locator(".instance-head .pill")).to_have_text("ready")
    expect(desk.locator("#chat-model")).to_contain_text("smollm2-360m")
    stop = instance.get_by_role("button", name=re.compile("Stop"))
    stop.click()
    expect(stop).to_have_text("Really stop?")
    stop.click()
    expect(instance).to_have_count(0)


def test_a_plan_that_does_not_fit_says_why(desk):
    desk.get_by_role("button", name="Serve a model").click()
    desk.get_by_label("Model", exact=True).select_option("big-model")
    desk.get_by_role("button", name="Check fit").click()
    expect(desk.locator("#serve-answer")).to_contain_text("It does not fit.")
    expect(desk.locator("#serve-answer")).to_contain_text("384 MB")


def test_machines_are_let_in(desk):
    button = desk.locator("#add-machines")
    expect(button).to_have_text(re.compile(r"Open 8:\d\d min"))
    button.click()
    expect(button).to_have_text(re.compile(r"Open (10:00|9:5\d) min"))
    expect(desk.locator("#refused")).to_contain_text("guest-laptop was not let in")


def test_elements_stay_while_their_figures_change(desk):
    figures = desk.locator("#downloads .quiet")
    before = figures.text_content()
    desk.locator("#instances button").first.focus()
    desk.evaluate("document.querySelector('#downloads .download').kept = true")
    expect(figures).not_to_have_text(before)
    assert desk.evaluate("document.querySelector('#downloads .download').kept")
    assert desk.evaluate("document.activeElement.closest('#instances') !== null")


def test_waiting_and_failing_are_told(desk):
    answer = ask(desk, "queue first")
    expect(answer.locator(".figures")).to_contain_text(re.compile("queued, [12] before this one"))
    expect(answer.locator(".figures")).to_contain_text("tokens/s")
    expect(desk.locator("#send")).to_have_text("Send")
    answer = ask(desk, "please fail")
    expect(answer.locator(".figures")).to_contain_text("studio is gone")
    expect(answer.locator(".bubble-text")).to_contain_text("This answer is")
    answer = ask(desk, "the queue is full")
    expect(answer.locator(".figures")).to_contain_text("try again in 3 s")
    desk.problems = [line for line in desk.problems if "429" not in line]


def test_an_answer_is_never_markup(desk):
    answer = ask(desk, "markup")
    expect(answer.locator(".bubble-text")).to_contain_text("<script>document.title='owned'</script>")
    assert desk.locator("#log img, #log script").count() == 0
    expect(desk).to_have_title("Shoal: default")


def test_the_conversation_goes_on(desk):
    ask(desk, "one two three")
    expect(desk.locator("#send")).to_have_text("Send")
    bodies = []
    desk.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    ask(desk, "four")
    expect(desk.locator("#log article")).to_have_count(4)
    roles = [message["role"] for message in bodies[0]["messages"]]
    assert roles == ["user", "assistant", "user"] and bodies[0]["messages"][1]["content"].endswith("Paris.")
    desk.get_by_role("button", name="New chat").click()
    expect(desk.locator("#log article")).to_have_count(0)


def test_the_log_follows_only_a_reader_at_its_end(desk):
    desk.set_viewport_size({"width": 1440, "height": 420})
    ask(desk, "a long one")
    log = desk.locator("#log")
    expect(log.locator("article").last).to_contain_text(re.compile("Paris.*Paris.*Paris.*Paris", re.DOTALL))
    log.evaluate("(log) => { log.scrollTop = 0; }")
    expect(desk.get_by_role("button", name="Jump to the end")).to_be_visible()
    text = log.locator("article").last.text_content()
    expect(log.locator("article").last).not_to_have_text(text)
    assert log.evaluate("(log) => log.scrollTop") == 0
    desk.get_by_role("button", name="Jump to the end").click()
    expect(desk.get_by_role("button", name="Jump to the end")).to_be_hidden()


def test_the_keyboard_is_enough(desk):
    desk.keyboard.press("Tab")
    expect(desk.get_by_role("link", name="Skip to chat")).to_be_focused()
    desk.keyboard.press("Enter")
    expect(desk.locator("#prompt")).to_be_focused()
    desk.keyboard.type("a long one")
    desk.keyboard.press("Enter")
    expect(desk.locator("#log article").last).to_contain_text("scripted")
    desk.keyboard.press("Escape")
    expect(desk.locator("#log article").last.locator(".figures")).to_have_text("stopped")


def test_a_node_that_is_gone_makes_the_page_stale_and_back_again(browser):
    with fake_node("desk") as (process, url), opened(browser, url) as page:
        process.kill()
        expect(page.locator("#live")).to_have_text("stale")
        expect(page.locator("#banner")).to_contain_text("Stale since")
        process.wait()
        with fake_node("alone", port=url.rsplit(":", 1)[1]):
            expect(page.locator("#live")).to_have_text("live")
            expect(page.locator("#banner")).to_be_hidden()
            expect(page.locator("#nodes .node")).to_have_count(1)
