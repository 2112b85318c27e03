"""The page over real tiers: keys, a chat streamed and stopped, the status, a killed replica."""

import json

import httpx2
import pytest
import pytest_asyncio

from baton.common.model_files.named_models import demo_model_path
from tests.support.browser import running_browser
from tests.support.cluster import WORKER_CALL, running_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

KEY = "a-key-of-this-test"
TOKEN = WORKER_CALL[0][1].removeprefix("Bearer ")
HOSTILE = "<img/src=x/onerror=window.hacked=1>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    async with running_cluster(
        folder,
        model=demo_model_path(),
        kv_connector=f"file://{folder}/kv",
        num_decode=2,
        router_flags=[
            "--max-local-prefill-tokens=0",
            f"--served-model-name={HOSTILE}",
            f"--api-key={KEY}",
        ],
        http=True,
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory):
    async with running_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


async def enter_keys(tab, **keys):
    """Writes keys into the dialogue, by their fields."""
    await tab.until("document.getElementById('keys').open")
    for field, key in keys.items():
        await tab.evaluate(f"document.getElementById('{field}').value = ''")
        await tab.write(f"#{field}", key)
    await tab.click("#keys [value=save]")
    await tab.until("!document.getElementById('keys').open")


async def test_talk_asks_for_a_key_and_streams_and_stops(cluster, browser):
    tab = await browser.open(cluster.http_url)
    await tab.until("document.getElementById('keys').open")  # as the models could not be read
    await enter_keys(tab, **{"api-key": KEY})
    await tab.until("document.querySelectorAll('#setting-model option').length === 2")
    assert HOSTILE in await tab.evaluate("document.getElementById('setting-model').textContent")
    tab.problems.clear()  # the refused call
    await tab.write("#setting-temperature", "1")
    await tab.write("#setting-seed", "7")  # the answer has 161 tokens, not a few by chance
    await tab.write("#prompt", "Return a list of the files in a folder.")
    await tab.press("Enter")
    await tab.until("document.querySelector('.message.assistant > .text')?.innerText.length > 0")
    await tab.until("document.getElementById('stop').hidden")
    assert "tokens/s" in await tab.text(".message.assistant .facts")
    # A stop comes while the answer streams: a script presses it with the first text.
    await tab.evaluate("""new MutationObserver((_, observer) => {
      if (!document.querySelector('.message.assistant > .text')?.innerText) return;
      document.getElementById('stop').click();
    }).observe(document.getElementById('messages'), {childList: true, subtree: true})""")
    for _ in range(5):
        await tab.click("#regenerate")
        await tab.until("document.getElementById('stop').hidden")
        if "stopped by you" in await tab.text(".message.assistant .facts"):
            break
    else:
        pytest.fail("no answer was stopped")
    await cluster.wait_pools_full()
    assert tab.problems == []


async def test_status_asks_for_the_token_and_shows_a_killed_replica(cluster, browser):
    request = {"prompt": "Return a list of", "max_tokens": 40, "model": HOSTILE}
    request |= {"ignore_eos": True}  # so that decode has a stage
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": HOSTILE}
    async with httpx2.AsyncClient(base_url=cluster.http_url, verify=False, timeout=60) as client:
        for _ in range(2):
            response = await client.post("/v1/completions", json=request, headers=headers)
            assert response.status_code == 200
        assert (await client.get("/status", headers=headers)).status_code == 401  # a client's key
        state = await client.get("/status", headers=dict(WORKER_CALL))
    assert "Return a list" not in state.text  # no text of requests
    tab = await browser.open(f"{cluster.http_url}/#status")
    # The dialogue opens again before the browser has told that it was closed.
    await tab.until("document.getElementById('keys').open")
    await tab.evaluate("""
      document.getElementById('operator-token').value = 'wrong';
      document.querySelector('#keys [value=save]').click();
      document.getElementById('open-keys').click()""")
    assert await tab.evaluate("document.getElementById('operator-token').value") == "wrong"
    await tab.until("document.querySelector('#status .notice.bad')")
    await enter_keys(tab, **{"operator-token": TOKEN, "api-key": KEY})
    await tab.until("document.querySelectorAll('#status td.ready').length === 3")
    tab.problems.clear()  # refused calls
    assert HOSTILE[-20:] in await tab.text("[data-key=recent]")
    await tab.click("[data-key=recent] summary")
    stages = await tab.text("[data-key=recent] .stages")
    assert "prefill" in stages
    assert "decode" in stages
    # A worker that does not answer within a second has none in this look.
    await tab.until("document.querySelectorAll('.drawing .edge.kv').length === 3")
    killed = cluster.decode[1]
    killed.kill()
    rows = "Array.from(document.querySelectorAll('#status tr'))"
    row = f"{rows}.find((row) => row.dataset.key?.includes({json.dumps(killed.address)}))"
    await tab.until(f"{row}?.querySelector('td.lost')")
    assert await tab.evaluate(f"{row}.querySelector('td.bad').innerText")
    assert killed.address in await tab.text("[data-key=changes]")
    assert await tab.evaluate("document.querySelectorAll('.drawing .box.lost').length") == 1
    # What was unfolded stays so while the state goes on.
    assert await tab.evaluate("document.querySelector('[data-key=recent] details').open")
    for name, size in {"desktop": (1280, 900), "phone": (390, 844)}.items():
        await tab.resize(*size)
        width = await tab.evaluate("document.documentElement.scrollWidth")
        assert width <= size[0], name
    assert await tab.evaluate("window.hacked ?? null") is None
    assert tab.problems == []
    await killed.restart()
    await tab.until(f"{row}?.querySelector('td.ready')")
    assert "it is back after being lost" in await tab.text("[data-key=changes]")
