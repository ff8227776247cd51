"""The process that runs chat templates: its limits, its end, and what it inherits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import TemplateError
from engine.text import template_worker
from engine.text.chat_template import ChatTemplate
from engine.text.template_worker import MAX_MEMORY

HI = [{"role": "user", "content": "Hi"}]
SIMPLE = ChatTemplate("[{{ messages[0].content }}]")
ENDLESS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
HELPERS = """
import os, signal, sys, time
from engine.errors import TemplateError
from engine.text import template_worker
from engine.text.chat_template import ChatTemplate

def render(source="[{{ messages[0].content }}]"):
    return ChatTemplate(source).render([{"role": "user", "content": "Hi"}])
"""


@pytest.fixture(autouse=True)
def own_worker():
    template_worker.close()
    yield
    template_worker.close()


def worker_pid() -> int:
    pid = template_worker.worker_pid()
    assert pid is not None
    return pid


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(pid: int, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.01)


def run(code: str, **options) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new Python; return its outputs."""
    command = [sys.executable, "-c", HELPERS + code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_one_process_serves_many_requests():
    SIMPLE.render(HI)
    pid = worker_pid()
    assert [SIMPLE.render(HI) for _ in range(5)] == ["[Hi]"] * 5
    with pytest.raises(TemplateError, match="line 1"):
        ChatTemplate("{% if %}").render(HI)
    assert worker_pid() == pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_is_replaced(number):
    for _ in range(3):
        SIMPLE.render(HI)
        pid = worker_pid()
        os.kill(pid, number)  # it may still be about to end when the next request is sent
        assert SIMPLE.render(HI) == "[Hi]"
        assert worker_pid() != pid
        assert not Path(f"/proc/{pid}").exists(), "a zombie is left"


def test_after_a_limit_the_next_request_is_served(monkeypatch):
    monkeypatch.setattr(template_worker, "MAX_SECONDS", 0.2)
    for source in (ENDLESS, "{{ [1] * 10**9 }}"):
        template_worker.start()
        pid = worker_pid()
        with pytest.raises(TemplateError, match=r"longer than|more than"):
            ChatTemplate(source).render(HI)
        assert not Path(f"/proc/{pid}").exists(), "a zombie is left"
        assert SIMPLE.render(HI) == "[Hi]"


def test_a_process_that_does_not_answer_is_given_up(monkeypatch):
    SIMPLE.render(HI)
    pid = worker_pid()
    monkeypatch.setattr(template_worker, "MAX_WAIT", 0.3)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TemplateError, match=r"did not answer within 0\.3 s"):
        SIMPLE.render(HI)
    assert not Path(f"/proc/{pid}").exists()
    monkeypatch.undo()
    assert SIMPLE.render(HI) == "[Hi]"


def test_a_process_that_keeps_much_memory_is_replaced(monkeypatch):
    """The compiler leaves memory in pieces, less of which is free for each further template."""
    monkeypatch.setattr(template_worker, "MAX_SECONDS", 60)
    SIMPLE.render(HI)
    pid = worker_pid()
    assert ChatTemplate("{{ x }}" * 25_000).render(HI) == ""
    wait_until_gone(pid)
    assert SIMPLE.render(HI) == "[Hi]"
    assert worker_pid() != pid


def test_threads_share_the_process_and_a_failure_is_its_own(monkeypatch):
    monkeypatch.setattr(template_worker, "MAX_SECONDS", 0.2)

    def one(i: int) -> str:
        if i % 5:
            return ChatTemplate("{{ x }}").render(HI, variables={"x": i})
        with pytest.raises(TemplateError, match="longer than"):
            ChatTemplate(ENDLESS).render(HI)
        return "refused"

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, range(20)))
    assert found == [str(i) if i % 5 else "refused" for i in range(20)]


def test_an_interrupted_request_leaves_no_answer_behind(monkeypatch):
    """Ctrl-C while a template runs: its answer must not become that of the next request."""
    assert threading.current_thread() is threading.main_thread()
    # A job in the background of a shell begins with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    SIMPLE.render(HI)
    slow = ChatTemplate(
        "{% for i in range(100000) %}{% for j in range(40) %}{% endfor %}{% endfor %}"
    )
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(1000):
                slow.render(HI)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert SIMPLE.render(HI) == "[Hi]"


def test_the_kernel_limits_its_files_and_memory():
    SIMPLE.render(HI)
    lines = Path(f"/proc/{worker_pid()}/limits").read_text().splitlines()
    limits = {line[:26].strip(): line[26:].split()[:2] for line in lines}
    for name in ("Max open files", "Max file size", "Max core file size"):
        assert limits[name] == ["0", "0"]
    soft, hard = map(int, limits["Max address space"])
    assert MAX_MEMORY < soft == hard < MAX_MEMORY + (256 << 20)


def test_it_inherits_no_file_and_no_secret(tmp_path):
    with open(tmp_path / "secret", "w") as file:
        os.set_inheritable(file.fileno(), True)
        SIMPLE.render(HI)
        folder = Path(f"/proc/{worker_pid()}/fd")
        found = {os.readlink(entry).split(":")[0] for entry in folder.iterdir()}
        assert found == {"socket", "/dev/null", f"/proc/{worker_pid()}/statm"}
    names = {pair.split("=")[0] for pair in folder.with_name("environ").read_text().split("\0")}
    assert names <= {"", "LD_LIBRARY_PATH", "TZ", "TZDIR", "LC_CTYPE"}
    assert os.getsid(worker_pid()) == worker_pid() != os.getsid(0)


def test_memory_in_use_is_bounded():
    """Templates that fill memory in steps that each are small."""
    done = run(
        """
import resource
template_worker.MAX_SECONDS = 40  # so that it is memory that stops the first two
for source in (
    "{% set ns = namespace(x='a') %}{% for i in range(64) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}"
    "{% set ns.x = [ns.x, 'a' * 100000 ~ i] %}{% endfor %}",
    "{{ ('-a' * 7000000)|title|length }}{{ ('-a' * 7000000)|list|map('title')|list|length }}",
    "{{ ('<a>' * 5000000)|striptags|length }}",
):
    try:
        render(source)
        print("rendered")
    except TemplateError as error:
        print(error)
    template_worker.MAX_SECONDS = 40 if source.startswith("{% set ns = namespace(x='a'") else 2
template_worker.close()
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
"""
    )
    *answers, peak = done.stdout.split("\n")[:-1]
    assert len(answers) == 4, done.stderr
    assert all("1024 MiB" in answer for answer in answers[:2]), answers
    assert 512 < int(peak) < (MAX_MEMORY >> 20) + 128


def test_it_ends_with_its_parent():
    done = run("render(); print(template_worker.worker_pid())")
    wait_until_gone(int(done.stdout), 2)
    done = run("render(); print(template_worker.worker_pid(), flush=True); os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL
    wait_until_gone(int(done.stdout), 5)


def test_it_ends_with_its_parent_while_a_template_runs():
    done = run(
        f"""
import threading
template_worker.start()
threading.Thread(target=lambda: render({ENDLESS!r}), daemon=True).start()
time.sleep(0.5)
print(template_worker.worker_pid(), flush=True)
os.kill(os.getpid(), 9)
"""
    )
    wait_until_gone(int(done.stdout), 10)


def test_a_forked_process_has_its_own():
    done = run(
        """
assert render() == "[Hi]"
first = template_worker.worker_pid()
child = os.fork()
if not child:
    assert template_worker.worker_pid() is None
    assert render() == "[Hi]" and template_worker.worker_pid() != first
    template_worker.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert render() == "[Hi]" and template_worker.worker_pid() == first
if not os.fork():  # it must not keep the first worker alive when its parent is gone
    os.kill(os.getppid(), 9)
    deadline = time.monotonic() + 60
    def is_alive():
        try:
            return open(f"/proc/{first}/stat").read().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False
    while is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    print("alive" if is_alive() else "gone", flush=True)
    os._exit(0)
time.sleep(60)
"""
    )
    assert (done.stdout, done.stderr) == ("gone\n", "")


@pytest.mark.parametrize("closed", [(0,), (2,), (0, 1, 2), (0, 2)], ids=str)
def test_it_works_with_closed_standard_files(closed, tmp_path):
    code = f"""
for number in {closed}:
    os.close(number)
found = [render(), render()]
os.write(2, b"x") if 2 not in {closed} else None
try:
    os.write(2, b"text for stderr")
except OSError:
    pass
found.append(render())
open({str(tmp_path / "found")!r}, "w").write(repr(found))
"""
    assert run(code).returncode == 0
    assert (tmp_path / "found").read_text() == repr(["[Hi]"] * 3)


def test_blocked_and_ignored_signals_are_not_inherited():
    done = run(
        f"""
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
template_worker.MAX_SECONDS = 0.2
try:
    render({ENDLESS!r})
except TemplateError as error:
    print(error)
"""
    )
    assert done.stdout == "the chat template failed: it ran longer than 0.2 s\n"


def test_nothing_is_printed():
    """Python warns about such source when it is compiled."""
    done = run(
        """print(render("{{ 1 is sameas 1 }}{{ '\\\\d' }}{% if 1 is string %}{% endif %}"))"""
    )
    assert done.stdout == "True\\d\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a b c'|wordwrap(3) }}", "a b\nc"),
        ("{{ [1]|pprint }}", "[1]"),
        ("{{ '<b>&eacute;&#65;</b>'|striptags }}", "éA"),
        ("{{ 'http://x.y'|urlize|length > 9 }}", "True"),
        (r"{{ '\N{EM DASH}\u00e9\n' }}", "—é\n"),
        ("{{ {'a': 'é'}|xmlattr }}{{ 'é /'|urlencode }}", ' a="é"%C3%A9%20/'),
        ("{{ strftime_now('%%年😀') }}", "%年😀"),
    ],
)
def test_what_python_imports_late_is_there(source, text):
    """In the process no file can be opened, thus no module imported."""
    assert ChatTemplate(source).render(HI) == text


@pytest.mark.parametrize("zone", ["XXX-5", "America/New_York", None])
def test_the_time_is_local(zone):
    environment = {name: value for name, value in os.environ.items() if name != "TZ"}
    environment |= {"TZ": zone} if zone else {}
    done = run(
        "print(time.strftime('%Z %z')); print(render(\"{{ strftime_now('%Y-%m-%d %H') }}\"))\n"
        "print(time.strftime('%Y-%m-%d %H'))",
        env=environment,
    )
    name, rendered, local = done.stdout.splitlines()
    assert rendered == local, name


def test_a_relative_import_path_is_found(tmp_path):
    root = Path(template_worker.__file__).parents[2]
    done = run("print(render())", cwd=root, env={**os.environ, "PYTHONPATH": "."})
    assert done.stdout == "[Hi]\n"


def test_a_process_that_cannot_start_is_a_template_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(TemplateError, match=r"cannot be started.*No such file"):
        SIMPLE.render(HI)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(TemplateError, match="cannot be started"):
        SIMPLE.render(HI)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TemplateError, match="exit code 1"):
        SIMPLE.render(HI)


def test_the_parent_imports_no_jinja():
    done = run("assert 'jinja2' not in sys.modules; print(render(), 'jinja2' in sys.modules)")
    assert done.stdout == "[Hi] False\n"
