import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import run_cli
from helpers.models import qwen3_directory
from helpers.servers import StandIn
from starlette.responses import JSONResponse

from retrain.engines.server.canary import TEXT

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return qwen3_directory(tmp_path_factory.mktemp("doctor") / "model", [TEXT])


@pytest.fixture(scope="module")
def server(model):
    made = StandIn(model)
    yield made
    made.close()


doctor = partial(run_cli, "doctor")


def test_a_sound_server_passes(model, server):
    result = doctor("--url", server.url, "--url", f"{server.url}/v1/", model)
    assert result.exit_code == 0, result.output
    head, answers, canary = result.output.splitlines()
    assert head == f"vllm at {server.url}, {server.url}/v1/, compared with {model} here"
    assert answers.startswith(f"PASS  answers            {server.url} serves 'base', 2048 tokens  [")
    assert canary.startswith("PASS  canary             canary: base within ")
    assert server.adapters == []
    unnamed = doctor("--url", server.url, "--engine", "openai")  # the model that the server names
    assert (unnamed.exit_code, f"compared with {model} here" in unnamed.output) == (0, True)


def test_a_server_with_other_weights_than_a_file_s_model_fails(server, tmp_path):
    other = qwen3_directory(tmp_path / "other", [TEXT], seed=1)
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\nmodel = "{other}"\nlora_rank = 4\n[training]\ntemperature = 0.8\n')
    result = doctor("--url", server.url, "--file", file)
    assert result.exit_code == 1
    assert "FAIL  canary" in result.output
    assert "another base model" in result.output


class RankSixteen(StandIn):
    """Takes adapters of rank 16 at most, and refuses others in vLLM's words."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].endswith("/load_lora_adapter"):
            message = await receive()
            directory = Path(json.loads(message["body"])["lora_path"])
            rank = json.loads((directory / "adapter_config.json").read_text())["r"]
            if rank > 16:
                text = f"Worker 4017 failed with error 'LoRA rank {rank} is greater than max_lora_rank 16.'"
                await JSONResponse({"error": {"message": text}}, 500)(scope, receive, send)
                return

            async def receive() -> Any:
                return message

        await super().__call__(scope, receive, send)


def test_a_server_that_takes_smaller_adapters_is_checked_with_those(model, tmp_path):
    server = RankSixteen(model)
    try:
        result = doctor("--url", server.url, model)
        assert result.exit_code == 0, result.output
        assert "with an adapter of rank 16: it takes none of rank 32" in result.output
        assert "start it with --max-lora-rank 32" in result.output
        file = tmp_path / "run.toml"
        file.write_text(f'[model]\nmodel = "{model}"\nlora_rank = 32\n')
        chosen = doctor("--url", server.url, "--file", file)
        assert chosen.exit_code == 1
        assert "--max-lora-rank that holds [model] lora_rank" in chosen.output
    finally:
        server.close()


def test_servers_that_cannot_be_checked(model, server, tmp_path):
    quickstart, served = Path(__file__).parents[3] / "campaigns" / "quickstart.toml", tmp_path / "served.toml"
    served.write_text(f'[model]\nmodel = "{model}"\n[inference]\nurl = "{server.url}"\n')
    away = doctor("--url", "http://127.0.0.1:9", model)
    assert away.exit_code == 1
    assert "FAIL  answers            no server answers after 1 s:" in away.output
    for arguments, words in (
        (("--url", "http://127.0.0.1:9"), "name the model after the options"),
        (("--url", server.url, "--device", "cpu"), "type one after the other"),
        (("--engine", "vllm"), "--engine belongs to the check of a server"),
        ((model,), "MODEL belongs to the check of a server"),
        (("--url", server.url, "--engine", "mlx", model), "there is no such engine here"),
        (("--vllm",), "type: retrain doctor --vllm --file FILE"),
        (("--vllm", "--file", quickstart), "this machine shows no GPU"),
        (("--vllm", "--file", served), f"servers that run already: type retrain doctor --url URL --file {served}"),
    ):
        result = doctor(*arguments)
        assert (result.exit_code, words in result.output) == (2, True), result.output
