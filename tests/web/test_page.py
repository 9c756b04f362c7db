"""The page in Chromium, as a person uses it, served by a real node with a real model."""

import re

import pytest
from agent import MODEL
from playwright.sync_api import expect

# Waits of the page are for a state; a promise is a few seconds, a failure ten times that.
PATIENCE_MS = 40_000


@pytest.fixture
def page(agent, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda line: line.type == "error" and page.problems.append(line.text))
    # Nothing may be asked of anybody but the node.
    page.on("request", lambda r: r.url.startswith(agent.url) or page.problems.append(f"asked {r.url}"))
    page.goto(agent.url)
    yield page
    assert page.problems == []
    page.close()


def test_the_swarm_is_shown(agent, page):
    swarm = agent.call("GET", "/api/v1/swarm")
    expect(page).to_have_title(re.compile("Shoal"))
    expect(page.locator("#nodes")).to_contain_text("python")
    expect(page.locator("#instances")).to_contain_text(MODEL)
    expect(page.locator("#facts")).to_contain_text(swarm["swarm"])
    end = swarm["instances"][0]["stages"][-1]["layers"][1]
    # Layers are shown as people count ranges: the last one included.
    expect(page.locator("main")).to_contain_text(f"layers 0 to {end - 1}")


def test_a_prompt_is_typed_and_the_answer_streams(page):
    page.locator("#prompt").click()
    page.keyboard.type("What is the capital of France?")
    expect(page.locator("#send")).to_be_enabled()
    # How often the answer's text changes, as the page shows it.
    page.evaluate(
        """() => {
            window.changes = 0;
            new MutationObserver(() => { window.changes += 1; })
                .observe(document.getElementById("log"), {childList: true, subtree: true, characterData: true});
        }"""
    )
    page.keyboard.press("Enter")
    answer = page.locator("#log article").nth(1)
    expect(answer).to_contain_text(re.compile(r"\w+"))
    expect(answer.locator(".figures")).to_contain_text("tokens")
    expect(page.locator("#send")).to_have_text("Send")
    assert page.evaluate("window.changes") > 5
    assert len(answer.locator(".bubble-text").inner_text()) > 5


def test_an_answer_can_be_stopped(agent, page):
    page.locator("#prompt").fill("Write a very long story about the sea, with many chapters.")
    page.locator("#send").click()
    answer = page.locator("#log article").nth(1)
    expect(answer.locator(".bubble-text")).to_contain_text(re.compile(r"\w+"))
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_have_text("Send")


def test_model_text_is_never_html(page):
    page.locator("#prompt").fill("<img src=x onerror=window.hit=1><b>bold</b>")
    page.locator("#send").click()
    question = page.locator("#log article").first
    expect(question.locator(".bubble-text")).to_have_text("<img src=x onerror=window.hit=1><b>bold</b>")
    assert page.locator("#log img, #log b, #log script").count() == 0
    assert page.evaluate("window.hit") is None
    page.keyboard.press("Escape")


def test_the_page_fits_a_phone(page):
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
