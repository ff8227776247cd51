"""LoRA adapters over HTTP: as names of models, loaded and unloaded by an admin while serving."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time

import httpx
import pytest

from engine.async_engine import AsyncEngine
from engine.errors import ConfigError, EngineError, RequestError, UnknownAdapterError
from engine.llm_engine import LLMEngine
from engine.lora_request import LoRARequest
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.server.app import build_app
from engine.server.option_files import check_files
from engine.server.replicas.client import ReplicaClient
from engine.server.server_config import ServerConfig, key_hash
from tests.lora_files import Served
from tests.server.loops import TOKEN, connected, eventually, run
from tests.server.loops import served as looped
from tests.server.serving import CannedClient, serve

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("adapters"))


def make_engine(files, modules=(0, 1)):
    names = {f"a{index}": str(files.folders[index]) for index in modules}
    return LLMEngine.from_name(
        str(files.base),
        device="cpu",
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        lora_modules=names,
        debug=True,
    )


@pytest.fixture
def server(files):
    config = ServerConfig(
        admin_key_hashes=(key_hash("root"),),
        served_model_name=("base",),
        lora_root=str(files.base.parent),
        access_log=False,
    )
    with serve(lambda: AsyncEngine(make_engine(files)), config) as found:
        yield found


def post(server, path, key=None, **body):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, headers=headers, json=body, timeout=60)


def completion(server, files, row, model):
    body = {"prompt": files.prompts[row], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    response = post(server, "/v1/completions", model=model, return_token_ids=True, **body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return response.json()["choices"][0]["token_ids"]


def test_models_are_adapters_too(server, files):
    cards = httpx.get(server.url + "/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("base", None),
        ("a0", "base"),
        ("a1", "base"),
    ]
    assert httpx.get(server.url + "/v1/models/a1").json()["root"] == "a1"
    for index, model in ((-1, "base"), (0, "a0"), (1, "a1")):
        assert completion(server, files, 0, model) == files.want[0, index]
    body = {"token_ids": files.prompts[0], "model": "a1"}
    body["sampling_params"] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    found = post(server, "/inference/v1/generate", **body).json()
    assert found["choices"][0]["token_ids"] == files.want[0, 1]


def test_an_adapter_with_the_name_of_the_model():
    client = CannedClient("a")
    client.adapters = ("sql",)
    with pytest.raises(ConfigError, match="lora_modules must not have a name of the model"):
        build_app(client, ServerConfig(served_model_name=("base", "sql")))


def test_names_that_are_no_model(server):
    response = post(server, "/v1/completions", model="a7", prompt=[5])
    assert response.status_code == 404
    assert "this server has base, a0, a1" in response.json()["error"]["message"]
    response = post(server, "/v1/embeddings", model="a0", input=[[5]])
    assert response.status_code == 400
    assert "serves no adapters; got 'a0'" in response.json()["error"]["message"]


def test_loading_and_unloading(server, files):
    assert post(server, LOAD, lora_name="new", lora_path="a2").status_code == 401
    response = post(server, LOAD, "root", lora_name="new", lora_path="a2")
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'new' added successfully."
    assert completion(server, files, 1, "new") == files.want[1, 2]
    again = post(server, LOAD, "root", lora_name="new", lora_path=str(files.folders[3]))
    assert again.status_code == 400
    assert "until the adapter is removed" in again.json()["error"]["message"]
    replaced = post(
        server, LOAD, "root", lora_name="new", lora_path=str(files.folders[3]), load_inplace=True
    )
    assert replaced.status_code == 200
    assert completion(server, files, 1, "new") == files.want[1, 3]
    assert post(server, UNLOAD, "root", lora_name="new").status_code == 200
    assert post(server, "/v1/completions", model="new", prompt=[5]).status_code == 404
    missing = post(server, UNLOAD, "root", lora_name="new")
    assert missing.status_code == 400
    assert "lora_name must be one of the adapters ('a0', 'a1')" in missing.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_that_is_removed_before_its_request_reaches_the_engine(
    server, monkeypatch, stream
):
    """As any unknown model; the engine may remove it while the request is on its way."""
    monkeypatch.setattr(AsyncEngine, "adapters", ("a0", "a1", "gone"))
    response = post(server, "/v1/completions", model="gone", prompt=[5], stream=stream)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gone'; held: 'a0', 'a1'" in error["message"]


def test_adapters_of_a_server_that_sleeps(server, files):
    """None is read meanwhile, one is unloaded, and the rest serve as before."""
    assert completion(server, files, 0, "a0") == files.want[0, 0]
    assert post(server, "/sleep", "root").status_code == 200
    response = post(server, LOAD, "root", lora_name="new", lora_path="a2")
    assert response.status_code == 503 and "asleep" in response.text
    assert post(server, UNLOAD, "root", lora_name="a1").status_code == 200
    cards = httpx.get(server.url + "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["base", "a0"]
    assert post(server, "/v1/completions", model="a0", prompt=[5]).status_code == 503
    assert post(server, "/wake_up", "root").status_code == 200
    assert completion(server, files, 0, "a0") == files.want[0, 0]
    assert post(server, LOAD, "root", lora_name="new", lora_path="a2").status_code == 200
    assert completion(server, files, 1, "new") == files.want[1, 2]


def test_new_weights(files):
    config = ServerConfig(
        admin_key_hashes=(key_hash("root"),),
        weights_root=str(files.base.parent),
        access_log=False,
        served_model_name=("base",),
    )
    path = "/update_weights_from_disk"
    with serve(lambda: AsyncEngine(make_engine(files)), config) as server:
        assert completion(server, files, 3, "base") == files.want[3, -1]
        assert post(server, path, model_path="merged2").status_code == 401
        response = post(server, path, "root", model_path="merged2")
        assert response.status_code == 200, response.text
        assert response.json()["success"] and response.json()["num_weights"] > 5
        assert completion(server, files, 3, "base") == files.want[3, 2]
        for wrong, message in (("/etc", "must lie in the server's --weights-root"), ("a0", "a0")):
            response = post(server, path, "root", model_path=wrong)
            assert response.status_code == 400 and message in response.text
        assert completion(server, files, 3, "base") == files.want[3, 2]


def test_paths_and_names_that_are_refused(server, files, tmp_path):
    shutil.copytree(files.folders[0], tmp_path / "outside")
    inside = files.base.parent / "link"
    os.symlink(tmp_path / "outside", inside)
    try:
        for path in (str(tmp_path / "outside"), "../outside", "link", "a\0b", "/etc"):
            response = post(server, LOAD, "root", lora_name="x", lora_path=path)
            assert response.status_code == 400, path
            assert "lora_path must lie in the server's --lora-root" in response.text
    finally:
        inside.unlink()
    cases = {
        "lora_name must not be a name of the model": {"lora_name": "base", "lora_path": "a2"},
        "must be a folder with adapter_config.json": {"lora_name": "x", "lora_path": "nothing"},
        "lora_name must be a str of 1 to 256": {"lora_name": "", "lora_path": "a2"},
    }
    for message, body in cases.items():
        response = post(server, LOAD, "root", **body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
    assert completion(server, files, 0, "a0") == files.want[0, 0]


def test_a_server_without_a_folder_loads_none(files):
    config = ServerConfig(admin_key_hashes=(key_hash("root"),), access_log=False)
    with serve(lambda: CannedClient("a"), config) as server:
        response = post(server, LOAD, "root", lora_name="x", lora_path="a2")
        assert response.status_code == 403 and "--lora-root" in response.text
    with serve(lambda: CannedClient("a"), ServerConfig(access_log=False)) as server:
        assert post(server, LOAD, "root", lora_name="x", lora_path="a2").status_code == 404


@pytest.mark.parametrize("name", ["lora_root", "weights_root"])
def test_a_folder_that_does_not_exist_ends_the_start(name, tmp_path):
    check_files(ServerConfig(**{name: str(tmp_path)}))
    (tmp_path / "file").touch()
    for wrong in ("nowhere", "file"):
        path = str(tmp_path / wrong)
        with pytest.raises(
            ConfigError, match=f"{name} must be a folder that exists; got .*{wrong}"
        ):
            check_files(ServerConfig(**{name: path}))


async def tokens(client, files, row, request):
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    outputs = client.generate(files.prompts[row], params, lora_request=request)
    return [list(output.outputs[0].token_ids) async for output in outputs][-1]


def test_an_engine_in_another_process(files):
    async def main(address):
        async with connected(address) as one, connected(address) as two:
            assert one.adapters == two.adapters == ("a0", "a1")
            await one.add_lora(LoRARequest("new", 1, files.folders[2]))
            assert one.adapters == ("a0", "a1", "new")
            await eventually(lambda: two.adapters == one.adapters)
            found = await asyncio.gather(
                *(tokens(two, files, row, LoRARequest("new")) for row in range(3))
            )
            assert found == [files.want[row, 2] for row in range(3)]
            with pytest.raises(RequestError, match="until the adapter is removed"):
                await two.add_lora(LoRARequest("new", 1, files.folders[0]))
            with pytest.raises(RequestError, match="must be a folder with"):
                await two.add_lora(LoRARequest("other", 1, files.base))
            await two.remove_lora("new")
            with pytest.raises(UnknownAdapterError, match="needs a lora_path for 'new'"):
                await tokens(one, files, 0, LoRARequest("new"))
            with pytest.raises(RequestError, match="lora_name must be one of the adapters"):
                await one.remove_lora("new")

    with looped(make_engine(files)) as (_, address):
        run(main(address))


def test_a_change_is_told_to_every_client_at_once(files, monkeypatch):
    """Not with the next of the regular heartbeats: the next request may come by any client."""
    monkeypatch.setattr("engine.server.messages.BEAT_SECONDS", 4.0)

    async def main(address):
        async with connected(address) as one, connected(address) as two:
            await one.add_lora(LoRARequest("new", 1, files.folders[2]))
            await eventually(lambda: two.adapters == ("a0", "a1", "new"), 0.5)
            await two.remove_lora("new")
            await eventually(lambda: one.adapters == ("a0", "a1"), 0.5)
            await one.sleep()
            await eventually(lambda: two.seems_asleep, 0.5)
            await two.wake_up()
            await eventually(lambda: not one.seems_asleep, 0.5)

    with looped(make_engine(files)) as (_, address):
        run(main(address))


def test_reading_an_adapter_stops_no_step(files):
    """Steps go on while files are read."""
    engine = make_engine(files)
    read = engine.read_lora
    may_read = threading.Event()

    def slowly(request):
        may_read.wait(20)
        return read(request)

    engine.read_lora = slowly

    async def main(address):
        async with connected(address) as client:
            adding = asyncio.ensure_future(client.add_lora(LoRARequest("n", 1, files.folders[2])))
            await asyncio.sleep(0.05)
            assert await tokens(client, files, 0, LoRARequest("a0")) == files.want[0, 0]
            assert not adding.done()
            may_read.set()
            await adding
            assert await tokens(client, files, 0, LoRARequest("n")) == files.want[0, 2]

    with looped(engine) as (_, address):
        run(main(address))


def test_a_fault_while_an_adapter_is_read_or_weights_are_updated(files):
    """The caller is told, and the engine goes on."""
    engine = make_engine(files)

    def broken(_):
        raise MemoryError("no room")

    engine.read_lora = engine.update_weights = broken

    async def main(address):
        async with connected(address) as client:
            for call in (client.add_lora(LoRARequest("n", 1, "n")), client.update_weights("w")):
                with pytest.raises(EngineError, match="no room"):
                    await call
            assert await tokens(client, files, 0, LoRARequest("a0")) == files.want[0, 0]

    with looped(engine) as (_, address):
        run(main(address))


def test_replicas_hold_the_same_adapters(files):
    """Also one that joins later."""

    async def main(first, second):
        client = await ReplicaClient.connect({0: first}, TOKEN, has_peers=False)
        try:
            await client.add_lora(LoRARequest("new", 1, files.folders[3]))
            replaced = LoRARequest("a0", 1, files.folders[2])
            await client.add_lora(replaced, load_inplace=True)
            await client.remove_lora("a1")
            await client.update_weights(str(files.base))
            assert await client.update_weights(str(files.base.parent / "merged0"))
            assert await tokens(client, files, 2, None) == files.want[2, 0]
            await client.set_replicas({0: first, 1: second})
            await eventually(lambda: len(client._clients) == 2)
            late = client._clients[1]
            assert late.adapters == ("a0", "new")
            assert await tokens(late, files, 2, None) == files.want[2, 0]
            await client.update_weights(str(files.base))
            assert await tokens(late, files, 2, LoRARequest("new")) == files.want[2, 3]
            assert await tokens(late, files, 2, LoRARequest("a0")) == files.want[2, 2]
            assert await tokens(client, files, 2, LoRARequest("new")) == files.want[2, 3]
            await client.remove_lora("new")
            assert all("new" not in one.adapters for one in client._clients.values())
            with pytest.raises(EngineError, match="lora_name must be one of the adapters"):
                await client.remove_lora("new")
        finally:
            await client.close()

    with looped(make_engine(files)) as (_, first), looped(make_engine(files)) as (_, second):
        run(main(first, second))


def test_a_replica_that_cannot_read_an_adapter(files):
    """No replica keeps the adapter; one that joins without it gets no request for it."""
    broken = make_engine(files)

    def fail(_):
        raise RequestError("no such folder here")

    broken.read_lora = fail

    async def main(first, second):
        new = LoRARequest("new", 1, files.folders[3])
        client = await ReplicaClient.connect({0: first, 1: second}, TOKEN, has_peers=False)
        try:
            await eventually(lambda: len(client._clients) == 2)
            with pytest.raises(RequestError, match="no such folder here"):
                await client.add_lora(new)
            assert client.adapters == ("a0", "a1")
            await client.set_replicas({0: first})
            await client.add_lora(new)
            await client.set_replicas({0: first, 1: second})
            await eventually(lambda: len(client._clients) == 2)
            assert client._clients[1].adapters == ("a0", "a1")
            found = await asyncio.gather(
                *(tokens(client, files, row % 3, LoRARequest("new")) for row in range(6))
            )
            assert found == [files.want[row % 3, 3] for row in range(6)]
        finally:
            await client.close()

    with looped(make_engine(files)) as (_, first), looped(broken) as (_, second):
        run(main(first, second))


def test_an_answer_is_not_late_for_a_closed_client(files):
    """The engine reads on for a client that has gone, and serves the others."""
    engine = make_engine(files)

    async def main(address):
        async with connected(address) as client:
            adding = asyncio.ensure_future(client.add_lora(LoRARequest("n", 1, files.folders[2])))
            await asyncio.sleep(0)
            adding.cancel()
        async with connected(address) as other:
            assert await tokens(other, files, 0, None) == files.want[0, -1]

    with looped(engine) as (_, address):
        run(main(address))
        time.sleep(0.05)
    assert set(engine.list_loras()) <= {"a0", "a1", "n"}
