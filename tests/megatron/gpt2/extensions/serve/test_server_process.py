"""Run the server in a separate process: on two ranks, with a browser, and until it is stopped."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mpu
from data_utils import build_tokenizer
from megatron.gpt2.generate.generation import GenerationRequest, generate
from megatron.gpt2.generate.sampling import SamplingParams
from megatron.gpt2.model.gpt2 import GPT2Model
from tests.conftest import ROOT, needs
from tests.megatron.gpt2.dist.started_ranks import wait_until
from tests.megatron.gpt2.extensions.serve.test_app import openai_client
from tests.megatron.gpt2.generate.test_generation import CONFIG, save

pytestmark = [needs("starlette", "uvicorn", extra="serve"), needs("openai", extra="dev")]
TOKENIZER = build_tokenizer("bytes")
PROGRAM = ROOT / "tools" / "run_text_generation_server.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Save a model in a folder named tiny. The model-parallel groups stay until the last test, for `generate_texts`."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    mpu.initialize_model_parallel(1)
    model = GPT2Model(CONFIG).eval()
    save(model, folder)
    yield folder
    mpu.destroy_model_parallel()


def generate_texts(prompts: list[str], **settings: Any) -> list[str]:
    """Generate texts with the model of `saved` in this process."""
    requests = [GenerationRequest(TOKENIZER.encode(prompt), SamplingParams(**settings)) for prompt in prompts]
    generate(GPT2Model(CONFIG).eval(), TOKENIZER, requests)
    return [TOKENIZER.decode(c.ids) for c in requests]


class ServerProcess:
    def __init__(self, saved: Path, *flags: str) -> None:
        self._output = saved.parent / f"server_{time.monotonic_ns()}"
        with self._output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, PROGRAM, "--load", saved, *"--device cpu --precision fp32 --port 0".split(), *flags],
                stderr=file,
                start_new_session=True,
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            )
        wait_until(lambda: "Ctrl-C" in self.said or self.process.poll() is not None)
        self.url = re.search(r"page +(http://127\.0\.0\.1:\d+/)\n", self.said)[1]
        self.client = openai_client(self.url)

    @property
    def said(self) -> str:
        """The standard error of all ranks."""
        return self._output.read_text()

    def end(self) -> None:
        """Send SIGINT to all processes of the server, as a terminal does for Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)
        assert self.process.wait(240) == 0
        assert self.said.endswith("stopped\n") and "Traceback" not in self.said

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def program(saved: Path) -> Iterator[ServerProcess]:
    """Start the server on two ranks, and end it by Ctrl-C while it generates."""
    import openai

    with ServerProcess(saved, *"--nproc-per-node 2 --max-tokens 1000000".split()) as program:
        yield program
        stream = program.client.completions.create(model="tiny", prompt="a", n=8, max_tokens=10**6, stream=True)
        next(iter(stream))
        program.end()
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)


def test_two_ranks_and_32_clients(program: ServerProcess):
    prompts = [f"client {i}" * (1 + i % 3) for i in range(32)]

    def ask(prompt: str) -> str:
        create = program.client.completions.create
        return create(model="tiny", prompt=prompt, max_tokens=25, seed=9).choices[0].text

    with ThreadPoolExecutor(32) as clients:
        texts = list(clients.map(ask, prompts))
    assert texts == generate_texts(prompts, max_new_tokens=25, seed=9)


@contextlib.contextmanager
def open_page() -> Iterator[tuple[Any, Any, list[str]]]:
    """Yield Playwright's API, a page in a headless Chromium (of Playwright or of the system), and the page's errors."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the extra [dev] brings it")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root cannot use the sandbox.
    errors: list[str] = []
    with api.sync_playwright() as playwright:
        for path in (None, *filter(None, map(shutil.which, names))):
            with contextlib.suppress(api.Error):
                chromium = playwright.chromium.launch(executable_path=path, args=sandbox)
                break
        else:
            pytest.skip("no Chromium starts here: python -m playwright install chromium, or the package chromium")
        page = chromium.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        yield api, page, errors
        chromium.close()


def test_the_page_in_a_browser(program: ServerProcess):
    with open_page() as (api, page, errors):
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(program.url)
        api.expect(page.locator("#about")).to_contain_text("tiny, which reads 32 tokens")
        page.locator("#prompt").press_sequentially("Once é")
        for field, value in (("max_tokens", "30"), ("seed", "4"), ("top_p", "1")):
            page.locator(f"#{field}").fill(value)
        page.get_by_role("button", name="Continue").click()
        status = api.expect(page.locator("#status"))
        status.to_contain_text("30 tokens, ", timeout=120_000)
        status.to_contain_text("ended: all tokens are written")
        [text] = generate_texts(["Once é"], max_new_tokens=30, seed=4)
        # Compare textContent, because a browser changes some control characters when it shows them.
        assert page.evaluate("document.getElementById('output').textContent") == "Once é" + text
        # A card over the text shows the probability of the drawn token and other likely tokens.
        page.locator("#output .token").first.hover()
        first = program.client.completions.create(model="tiny", prompt="Once é", max_tokens=1, seed=4, logprobs=5)
        percent = 100 * math.exp(first.choices[0].logprobs.token_logprobs[0])
        api.expect(page.locator("#card tr.drawn td").last).to_have_text(f"{percent:#.3g} %")
        # The page still works after a stopped text and an error.
        for field, value in (("max_tokens", "1000000"), ("top_k", "3")):
            page.locator(f"#{field}").fill(value)
        page.keyboard.press("Enter")
        api.expect(page.locator("#output .token").nth(3)).to_be_attached()
        page.get_by_role("button", name="Stop").click()
        status.to_contain_text("; stopped")
        page.locator("#prompt").fill("x" * 33)
        page.locator("#prompt").press("Control+Enter")
        status.to_contain_text("longer than the 32 tokens")
        assert all(url.startswith(program.url) for url in asked) and len(asked) >= 4, "requests to other hosts"
        assert [error for error in errors if "status of 400" not in error] == []


def test_the_examples_of_the_manual(program: ServerProcess):
    text = (ROOT / "docs" / "how-to" / "server.md").read_text().replace("http://127.0.0.1:5000/", program.url)
    for command in re.search(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1].splitlines():
        done = subprocess.run(["bash", "-c", f"{command} --fail --silent"], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and ("data: [DONE]" if "stream" in command else "{") in done.stdout, command
    example = re.search(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    assert subprocess.run([sys.executable, "-c", example], capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    "flags, named",
    {
        "--port 70000": "70000",
        "--port {taken}": ": Address already in use",
        "--host nowhere.invalid": "--host nowhere.invalid",
        "--max-texts 3": "--batch-size",
        "--load /nowhere": "/nowhere",
    }.items(),
)
def test_bad_flags_are_one_line(flags: str, named: str, capsys: pytest.CaptureFixture[str]):
    from megatron.gpt2.extensions.serve import command

    with socket.create_server(("127.0.0.1", 0)) as listener:
        flags = flags.format(taken=listener.getsockname()[1])
        assert command.main(f"--load x --device cpu --port 0 {flags}".split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and named in error
