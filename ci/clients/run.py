"""Two workers, every client against them, and the page that tells what each of them showed.

    ci/test-clients [--page docs/clients.md] [CLIENT ...]

A client is a script in ``scripts/`` with pinned packages in an environment of its own; ``clients.toml`` lists
them. Without CLIENT all run and the page is written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from clients.page import written
from clients.table import CACHE, HERE, ROOT, Client, Shown, clients
from llorch_serve.artifact.folder import load_artifact
from llorch_serve.files.durable import write_whole
from llorch_serve.python_child import module_command
from support.builders.scripted_model import write_scripted_model
from support.harness.processes import llorch_here, running

LIMIT_S: Final = 600.0  # for one client


def main() -> None:
    """Run the clients that are named, or all of them."""
    parser = argparse.ArgumentParser(prog="ci/test-clients", description=__doc__)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "clients.md")
    parser.add_argument("client", nargs="*", help="a client's name; without one all run")
    asked = parser.parse_args()
    chosen = [one for one in clients() if not asked.client or one.name in asked.client]
    if missing := set(asked.client) - {one.name for one in chosen}:
        parser.error(
            f"no client {', '.join(sorted(missing))}; expected some of {[c.name for c in clients()]}"
        )
    with workers() as variables:
        found = [_show(one, variables) for one in chosen]
    if not asked.client:
        write_whole(asked.page, written(found).encode())
    failed = [one.client.name for one in found if not one.holds]
    sys.stdout.write(f"{len(found) - len(failed)} of {len(found)} clients show all of their rows\n")
    sys.exit(f"not whole: {', '.join(failed)}" if failed else 0)


@contextlib.contextmanager
def workers() -> Iterator[dict[str, str]]:
    """Serve both models; yields the variables by which scripts find them."""
    gguf = Path(os.environ["LLORCH_TEST_MODEL"])
    scripted, real = CACHE / "scripted", CACHE / "smollm2"
    _export(write_scripted_model(CACHE / "scripted-source"), scripted, "--precision", "fp32")
    _export(gguf, real, "--precision", "fp32")
    with contextlib.ExitStack() as stack:
        variables = {}
        for name, folder in (("REAL", real), ("SCRIPTED", scripted)):
            flags = ("--port", "0", "--http", "0", "--max-context", "4096")
            command = stack.enter_context(running("serve", folder, *flags))
            variables[f"{name}_URL"] = command.wait_for_line(r"(http://\S+?)/?$").group(1)
            command.wait_for_line(r"^serving .* at ")
            variables[f"{name}_MODEL"] = load_artifact(folder).manifest.model_id
        yield variables


def _export(source: Path, output: Path, *flags: str) -> None:
    outcome = llorch_here("export", source, "--output", output, "--if-changed", *flags)
    if outcome.code != 0:
        sys.exit(f"the export of {source} failed: {outcome.stderr}")


def _show(client: Client, variables: dict[str, str]) -> Shown:
    """Install a client where need be, run its script, and return what it showed."""
    sys.stdout.write(f"{client.name}\n")
    sys.stdout.flush()
    shown = Shown(client)
    command = [*_interpreter(client), str(_placed(client))]
    # Neither a proxy nor somebody's own settings and keys; a home of its own for what clients write.
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE") if name in os.environ}
    home = client.environment / "home"
    home.mkdir(parents=True, exist_ok=True)
    own = {"HOME": str(home), "NO_PROXY": "*", "PYTHONPATH": str(HERE / "scripts"), "PYTHONUTF8": "1"}
    try:
        done = subprocess.run(
            command,
            env={**kept, **own, **variables},
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        shown.failure = f"not done after {LIMIT_S:g} s"
    else:
        shown.rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"row"')]
        if done.returncode != 0:
            shown.failure = f"ended with {done.returncode}: {done.stderr[-2000:]}"
    for row in shown.rows:
        sys.stdout.write(f"  {'ok  ' if row['holds'] else 'NOT '} {row['row']}\n")
        if not row["holds"]:
            sys.stdout.write(f"{row['saw']}\n")
    if shown.failure:
        sys.stdout.write(f"  {shown.failure}\n")
    return shown


def _interpreter(client: Client) -> list[str]:
    folder, stamp = client.environment, client.environment / "installed"
    wanted = "\n".join(client.packages)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        if client.is_npm:
            subprocess.run(
                [  # noqa: S607 - the npm on the PATH
                    "npm",
                    "install",
                    "--silent",
                    "--no-audit",
                    "--no-fund",
                    "--prefix",
                    folder,
                    *client.packages,
                ],
                check=True,
            )
        else:
            subprocess.run(module_command(sys.executable, "venv", "--clear", str(folder)), check=True)
            if client.packages:
                install = ("install", "--quiet", "--disable-pip-version-check", *client.packages)
                python = str(folder / "bin" / "python")
                subprocess.run(module_command(python, "pip", *install), check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return ["node"] if client.is_npm else [str(folder / "bin" / "python"), "-P"]


def _placed(client: Client) -> Path:
    """Return where the script lies: beside its packages for Node, which looks for them there."""
    script = HERE / "scripts" / client.script
    if not client.is_npm:
        return script
    for name in ("shown.mjs", client.script):
        (client.environment / name).write_bytes((HERE / "scripts" / name).read_bytes())
    return client.environment / client.script
