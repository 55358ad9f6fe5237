"""Tests the limits of chat templates: memory and time are bounded, and the next template renders."""

import datetime
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pentatron.data import chat_template
from pentatron.data.chat_template import Limits, stop_sandbox
from pentatron.errors import UserError
from tests.data.chats import WholeTemplate

TALK = [{"role": "user", "content": "hello " * 200}, {"role": "assistant", "content": "yes"}]
LIMITS = Limits(cpu_seconds=2.0, wall_seconds=0.3, memory_bytes=96 << 20)
DOUBLED = "{%% set n = namespace(t='x' * 999) %%}{%% for i in range(60) %%}{%% set n.t = %s %%}{%% endfor %%}"

# Each would take gigabytes or hours.
ENDLESS = {
    "doubling by ~": DOUBLED % "n.t ~ n.t",
    "doubling by +": DOUBLED % "n.t + n.t",
    "replace": DOUBLED % "n.t.replace('x', 'x' * 999)",
    "join": DOUBLED % "[n.t, n.t] | join",
    "lists": "{% set n = namespace(t=[1] * 999) %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
    "a percent format": "{{ ('%0' ~ '999999999d') % 1 }}",
    "a format": "{{ '{:>9999999999}'.format('x') }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "center": "{{ 'x' | center(9999999999) }}",
    "indent": "{% set n = namespace(t='x\\n' * 9999) %}{% for i in range(60) %}{% set n.t = n.t | indent(999) %}{% endfor %}",
    "tojson": "{{ [[[[[1]]]]] | tojson(indent=999999999) }}",
    "slices": "{{ messages | slice(999999999) | list | length }}",
    "batches": "{{ messages | batch(9999999999, 1) | list | length }}",
    "loops over texts": "{% set t = messages[0].content %}" + "{% for a in t %}" * 5 + "{% endfor %}" * 5,
    "powers": "{% set a = ((((9 ** 64) ** 64) ** 64) ** 64) ** 64 %}",
    "products": "{% set n = namespace(a=9 ** 64) %}{% for i in range(60) %}{% set n.a = n.a * n.a %}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists of lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a pattern of words": "{{ (messages[0].content * 50) | wordwrap(1) | length }}" * 400,
}  # fmt: skip


def template(source: str, limits: Limits = LIMITS) -> WholeTemplate:
    return WholeTemplate(source, {}, datetime.date(2024, 7, 26), "the chat template of model/x.jinja", limits)


@pytest.fixture(autouse=True, scope="module")
def _one_process() -> Any:
    yield
    stop_sandbox()


@pytest.mark.parametrize("attack", ENDLESS)
def test_memory_and_time_of_a_template_are_bounded(attack: str) -> None:
    template("warm", Limits()).render(TALK)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(UserError, match=r"the chat template of model/x.jinja \w+") as refusal:
        template(ENDLESS[attack]).render(TALK)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600
    assert time.monotonic() - begun < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kB"
    assert template("{{ messages[1].content }}", Limits()).render(TALK).text == "yes", (
        "control: the next one renders"
    )


def test_the_sentence_says_which_limit_was_reached() -> None:
    loop = ENDLESS["loops over texts"]
    with pytest.raises(UserError, match=r"takes longer than 0.3 seconds .* use it only after reading it"):
        template(loop).render(TALK)
    with pytest.raises(UserError, match="computes for longer than 0 seconds"):
        template(loop, Limits(cpu_seconds=0, wall_seconds=30)).render(TALK)
    if sys.platform == "linux":
        with pytest.raises(UserError, match="takes more than 96 MiB of memory"):
            template(ENDLESS["doubling by ~"], Limits(wall_seconds=30, memory_bytes=96 << 20)).render(TALK)
    with pytest.raises(UserError, match=r"nested too deeply to be read.*repair it"):
        template(ENDLESS["parentheses"], Limits()).render(TALK)


def test_the_limit_holds_for_each_conversation_and_not_for_all_together() -> None:
    busy = template("{% for a in messages[0].content %}{% for b in 'x' * 900 %}{% endfor %}{% endfor %}", Limits(cpu_seconds=0.5))  # fmt: skip
    stop_sandbox()
    busy.check()
    process = chat_template._SANDBOX._process
    until = time.monotonic() + 1.3
    while time.monotonic() < until:
        assert busy.render(TALK).text == ""
    assert chat_template._SANDBOX._process is process


def test_a_long_conversation_passes_through_the_pipes() -> None:
    long = [{"role": "user", "content": "é漢🙂\n" * 100_000}]
    assert template("{{ messages[0].content }}", Limits()).render(long).text == long[0]["content"]
    half = [{"role": "user", "content": "\ud800"}]
    assert template("{{ messages[0].content }}").render(half).text == "\ud800"


@pytest.mark.parametrize("levels", [300, 900, 5000])
def test_messages_that_are_nested_deeply_are_a_sentence(levels: int) -> None:
    content: Any = []
    for _ in range(levels):
        content = [content]
    try:
        assert template("{{ messages | length }}").render([{"role": "user", "content": content}]).text == "1"
    except UserError as error:
        assert levels > 300 and "\n" not in str(error)


def _render_in_fork(connection: Any) -> None:
    connection.send(template("{{ messages[1].content }}", Limits()).render(TALK).text)


def test_forked_process_renders_in_its_own_sandbox() -> None:
    plain = template("{{ messages[1].content }}", Limits())
    assert plain.render(TALK).text == "yes"
    process = chat_template._SANDBOX._process
    assert process is not None
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_render_in_fork, args=(theirs,))
    worker.start()
    assert ours.recv() == "yes"
    worker.join()
    assert plain.render(TALK).text == "yes" and chat_template._SANDBOX._process is process


def test_the_process_ends_with_its_parent_though_forks_of_it_live_on() -> None:
    """The parent is killed; its fork must not keep the pipes open."""
    plain = template("{{ messages[1].content }}", Limits())
    reading, writing = os.pipe()
    held, hold = os.pipe()
    parent = os.fork()
    if parent == 0:
        plain.render(TALK)
        process = chat_template._SANDBOX._process
        assert process is not None
        os.close(hold)
        if os.fork() == 0:
            os.read(held, 1)
            os._exit(0)
        os.write(writing, str(process.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    os.waitpid(parent, 0)
    number = int(os.read(reading, 32))
    os.close(reading)
    until = time.monotonic() + 5
    while time.monotonic() < until and _lives(number):
        time.sleep(0.02)
    assert not _lives(number)
    os.close(held), os.close(hold)


def _lives(number: int) -> bool:
    found = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True, check=False
    )
    return bool(found.stdout.strip()) and not found.stdout.strip().startswith("Z")


def test_modules_of_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stop_sandbox()
    assert template("{{ messages[1].content }}", Limits()).render(TALK).text == "yes"
