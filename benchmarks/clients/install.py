"""Where do the agents' programs come from?

npm puts them and the Node that they need into a folder, at the versions that `agents` names. A
folder of the user's, `CAPSERVE_CLIENTS_DIR`, keeps them for the next run. npm's own cache lies in
it too, and nothing is written elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks.clients.agents import Agent

KEEP = "CAPSERVE_CLIENTS_DIR"
NODE = "22.23.3"
"""Two of the agents refuse Node 20. It comes as a package too, so that any npm will do."""

TIMEOUT_S = 900.0


def install(agents: Iterable[Agent], folder: Path) -> Path:
    """The folder of their programs; `folder` is used unless the user named one to keep."""
    home = Path(os.environ.get(KEEP) or folder).resolve()
    home.mkdir(parents=True, exist_ok=True)
    wanted = {"node": NODE, **{agent.package: agent.version for agent in agents}}
    # Their install scripts choose the binary for this platform; npm runs only those allowed here.
    allowed = {f"{name}@{version}": True for name, version in wanted.items()}
    manifest = json.dumps({"private": True, "dependencies": wanted, "allowScripts": allowed})
    done = home / "installed.json"
    if not done.exists() or done.read_text(encoding="utf-8") != manifest:
        done.unlink(missing_ok=True)
        (home / "package.json").write_text(manifest, encoding="utf-8")
        quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
        subprocess.run(
            ["npm", "install", "--cache", str(home / "cache"), *quiet],
            cwd=home,
            check=True,
            timeout=TIMEOUT_S,
        )
        done.write_text(manifest, encoding="utf-8")
    return home / "node_modules" / ".bin"
