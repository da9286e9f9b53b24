"""LiteLLM's proxy in front of both workers, asked by OpenAI's client."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

import openai
from litellm_calls import show
from shown import KEY, REAL, SCRIPTED

with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]

entries = [
    {
        "model_name": name,
        "litellm_params": {"model": f"openai/{served.model}", "api_base": served.url, "api_key": KEY},
    }
    for name, served in (("real", REAL), ("scripted", SCRIPTED))
]
config = Path("proxy.json")
config.write_text(
    json.dumps({"model_list": entries, "litellm_settings": {"num_retries": 0}}), encoding="utf-8"
)
master = secrets.token_hex(32)
variables = {
    **os.environ,
    "LITELLM_MASTER_KEY": f"sk-{master}",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
}
command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config)]
command += ["--host", "127.0.0.1", "--port", str(port)]
with Path("proxy.log").open("w", encoding="utf-8") as log:
    proxy = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
try:
    base = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{base}/health/liveliness", timeout=5)  # noqa: S310 - our own proxy
            break
        except OSError:
            assert proxy.poll() is None, Path("proxy.log").read_text(encoding="utf-8")[-2000:]
            time.sleep(0.2)
    client = openai.OpenAI(base_url=f"{base}/v1", api_key=f"sk-{master}", max_retries=0)
    create = client.chat.completions.create
    show(partial(create, model="real"), partial(create, model="scripted"))
finally:
    proxy.terminate()
    proxy.wait()
