"""The built-in page in a real headless Chromium: chat, stop, figures, token, a phone's screen."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from llorch_serve.cluster.interfaces import ReplicaLoad
from support.fakes.generator import LOAD
from support.harness.http import fake_front, send
from support.harness.processes import serving

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser():
    """Return a function that opens the page in a new profile, and fails if the page broke its own rules."""
    from playwright.sync_api import sync_playwright

    with contextlib.ExitStack() as stack:
        chromium = stack.enter_context(sync_playwright()).chromium

        @contextlib.contextmanager
        def open_page(url, profile, **screen):
            context = chromium.launch_persistent_context(
                str(profile), executable_path=os.environ["LLORCH_CHROMIUM"], args=list(FLAGS), **screen
            )
            with contextlib.closing(context):
                page = context.new_page()
                complaints, reached = [], set()
                page.on("pageerror", lambda error: complaints.append(str(error)))
                page.on(
                    "console", lambda m: complaints.append(m.text) if "Content Security" in m.text else None
                )
                page.on("request", lambda request: reached.add(request.url.split("/")[2]))
                page.goto(url)
                yield page
                assert complaints == []
                assert reached <= {url.split("/")[2]}

        yield open_page


def keep(page, name):
    """Keep a picture of the page, if a folder is named for it."""
    if folder := os.environ.get("LLORCH_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def say(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def test_a_chat_streams(browser, tmp_path):
    with fake_front(free_running=False) as (front, generator), browser(front.base, tmp_path) as page:
        page.get_by_text("fake-1M").wait_for()
        page.get_by_label("Most tokens").evaluate("field => { field.value = '3'; }")
        say(page, "Hello")
        for count in range(3):
            generator.wait_for(lambda g: g.live_ids)
            generator.step()
            page.locator(".turn.assistant .text", has_text=f"w{count}").wait_for()
        page.locator(".turn.assistant .note", has_text="3 tokens").wait_for()
        assert page.locator(".turn.assistant .text").inner_text() == "w0 w1 w2 "
        assert generator.submitted[0].sampling.max_tokens == 3
        say(page, "And then")
        generator.run_freely()
        page.locator(".turn.assistant").nth(1).locator(".note", has_text="tokens").wait_for()
        roles = [message.role for message in generator.submitted[1].prompt.messages]
        assert roles == ["user", "assistant", "user"]


def test_an_answer_is_stopped(browser, tmp_path):
    with fake_front(free_running=False) as (front, generator), browser(front.base, tmp_path) as page:
        say(page, "Hello")
        generator.wait_for(lambda g: g.live_ids)
        generator.step()
        page.locator(".turn.assistant .text", has_text="w0").wait_for()
        page.get_by_role("button", name="Stop").click()
        generator.wait_for(lambda g: not g.live_ids)
        page.locator(".turn.assistant .note", has_text="stopped").wait_for()


@pytest.mark.parametrize("words", [0, 1])
def test_what_is_cleared_while_it_is_answered_is_forgotten(browser, tmp_path, words):
    with fake_front(free_running=False) as (front, generator), browser(front.base, tmp_path) as page:
        say(page, "Secret")
        generator.wait_for(lambda g: g.live_ids)
        for count in range(words):
            generator.step()
            page.locator(".turn.assistant .text", has_text=f"w{count}").wait_for()
        page.get_by_role("button", name="Clear").click()
        generator.wait_for(lambda g: not g.live_ids)
        page.locator("#stop").wait_for(state="hidden")
        assert page.get_by_label("Message", exact=True).input_value() == ""
        generator.run_freely()
        say(page, "Hello")
        page.locator(".turn.assistant .note", has_text="tokens").wait_for()
        assert [message.content for message in generator.submitted[1].prompt.messages] == ["Hello"]


def test_markup_stays_text(browser, tmp_path):
    with fake_front() as (front, _), browser(front.base, tmp_path) as page:
        say(page, "<img src=x onerror=alert(1)>")
        page.locator(".turn.user", has_text="<img src=x").wait_for()
        assert page.locator(".turn img").count() == 0


def test_figures_are_shown(browser, tmp_path):
    with fake_front() as (front, _), browser(front.base, tmp_path) as page:
        page.get_by_text(f"{LOAD.running} of {LOAD.slots}").wait_for()
        assert page.locator("#waiting").inner_text() == str(LOAD.waiting)
        assert page.locator("#cells li").count() == LOAD.slots
        assert page.locator("#cells li.on").count() == LOAD.running
        assert page.locator("#state").inner_text() == "ready"


def test_replicas_are_shown_and_their_names_stay_text(browser, tmp_path):
    hostile = "<img src=x onerror=alert(1)>"
    load = replace(LOAD, running=3, tokens_per_second=12.34)
    found = [ReplicaLoad(f"{place:02}", "f", LOAD) for place in range(64)]
    found[0] = ReplicaLoad(hostile, "f", load)
    with fake_front(replicas=lambda: found) as (front, _), browser(front.base, tmp_path) as page:
        rows = page.locator("#replica-rows tr")
        rows.first.wait_for()
        assert rows.first.locator("td").all_inner_texts() == [
            hostile,
            f"3 of {load.slots}",
            str(load.waiting),
            "12.3",
        ]
        assert page.locator("#replicas img").count() == 0
        assert (page.locator("#replica-count").inner_text(), rows.count()) == ("64", 64)
        assert page.locator("#replicas-more").inner_text() == ""
        found.extend(ReplicaLoad(f"{place:02}", "f", LOAD) for place in range(64, 70))
        page.get_by_text("and 6 more").wait_for()
        assert rows.count() == 64
        found.clear()
        page.locator("#replica-count", has_text=re.compile("^0$")).wait_for()
        assert rows.count() == 0
        keep(page, "replicas")


def test_a_worker_alone_shows_no_replicas(browser, tmp_path):
    with fake_front() as (front, _), browser(front.base, tmp_path) as page:
        page.get_by_text(f"{LOAD.running} of {LOAD.slots}").wait_for()
        assert not page.locator("#replicas").is_visible()


def test_a_token_is_asked_for_and_kept_in_the_tab(browser, tmp_path):
    with fake_front(token="open sesame") as (front, _), browser(front.base, tmp_path) as page:
        field = page.get_by_label("Token", exact=True)
        field.fill("wrong")
        field.press("Enter")
        page.get_by_text("This worker asks for a token").wait_for()
        field.fill("open sesame")
        field.press("Enter")
        page.get_by_text("fake-1M").wait_for()
        page.reload()
        page.get_by_text("fake-1M").wait_for()
        assert not page.locator("#ask").is_visible()
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")


def test_a_phone_shows_all_without_scrolling_sideways(browser, tmp_path):
    screen = {"viewport": {"width": 375, "height": 720}, "has_touch": True, "is_mobile": True}
    with fake_front() as (front, _), browser(front.base, tmp_path, **screen) as page:
        page.get_by_text("fake-1M").wait_for()
        say(page, "Hello")
        page.locator(".turn.assistant .note", has_text="tokens").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        small = page.evaluate(
            "[...document.querySelectorAll('button')].filter(b => b.offsetHeight && b.offsetHeight < "
            "44).length"
        )
        assert small == 0
        keep(page, "phone")


def test_everything_is_named_and_reached_by_keyboard(browser, tmp_path):
    with fake_front() as (front, _), browser(front.base, tmp_path) as page:
        page.get_by_text("fake-1M").wait_for()
        unnamed = page.evaluate(
            """[...document.querySelectorAll('input, textarea, button, [role=meter], [role=img], [role=log]')]
               .filter(e => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label')
                              || e.getAttribute('aria-labelledby'))).map(e => e.id)"""
        )
        assert unnamed == []
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        page.locator(".turn.assistant .note", has_text="tokens").wait_for()


@pytest.mark.real_model
def test_the_real_model_answers(browser, smollm2, tmp_path):
    with serving(smollm2("int8"), "--http", "0", "--max-context", "2048") as worker:
        base = worker.command.wait_for_line(r"HTTP at (\S+)").group(1)
        screen = {"viewport": {"width": 1120, "height": 720}}
        with browser(base, tmp_path, **screen) as page:
            page.get_by_text("SmolLM2-135M-Instruct").first.wait_for()
            page.locator("#temperature").evaluate("field => { field.value = '0'; }")
            say(page, "What is the capital of France? Answer in one sentence.")
            page.locator(".turn.assistant .note", has_text="tokens/s").wait_for(timeout=120_000)
            assert "Paris" in page.locator(".turn.assistant .text").inner_text()
            say(page, "Name three things to see there.")
            page.locator(".turn.assistant").nth(1).locator(".text", has_text=". ").wait_for(timeout=120_000)
            keep(page, "page")
            page.locator(".turn.assistant").nth(1).locator(".note", has_text="tokens").wait_for(
                timeout=120_000
            )
        assert send(int(base.rpartition(":")[2]), "GET", "/health").status == 200
