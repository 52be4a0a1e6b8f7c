"""Container images: what their files say, and the same steps without a container runtime, in a clean root."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
SCRIPT = DOCKER / "clean_root.sh"
FILES = ["Dockerfile", "Dockerfile.cuda"]
CANNOT = 77


@pytest.mark.parametrize("name", FILES)
def test_an_image_runs_as_a_numbered_user_with_signals_for_the_server_itself(name: str) -> None:
    text = (DOCKER / name).read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001"]  # a name would not do for runAsNonRoot
    assert 'ENTRYPOINT ["lamina"]' in text  # no shell between it and PID 1
    assert not re.search(r"^ADD ", text, re.MULTILINE)


@pytest.mark.parametrize("name", FILES)
def test_an_image_installs_extras_that_there_are_and_an_app_that_there_is(name: str) -> None:
    text = (DOCKER / name).read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = re.search(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    app = re.search(r"^ARG APP=(.*)$", text, re.MULTILINE)
    assert found is not None and app is not None
    assert set(found[1].split(",")) <= set(extras) and (ROOT / app[1] / "app.py").is_file()


def names_imported(app: Path) -> set[str]:
    """Packages that the files of an app need as soon as they are imported or look one up."""
    found: set[str] = set()
    for file in app.glob("*.py"):
        text = file.read_text()
        found |= set(re.findall(r'find_spec\("(\w+)"\)', text))
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import):
                found |= {one.name.partition(".")[0] for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {file.stem for file in app.glob("*.py")} - {"lamina"}


def choices_of_images() -> list[tuple[str, str]]:
    """Extras and app of each image, and of the composition."""
    texts = [(DOCKER / name).read_text() for name in FILES]
    pairs = [(re.findall(r"^ARG EXTRAS=(.*)$", text, re.M)[0], re.findall(r"^ARG APP=(.*)$", text, re.M)[0]) for text in texts]
    composed = (ROOT / "deploy" / "compose" / "compose.yaml").read_text()
    return [*pairs, *re.findall(r'EXTRAS: "([^"]*)", APP: ([^}]*)}', composed)]


@pytest.mark.parametrize(("extras", "app"), choices_of_images())
def test_an_image_has_the_packages_that_its_app_imports(extras: str, app: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chosen = [
        *project["dependencies"],
        *(line for extra in extras.split(",") for line in project["optional-dependencies"][extra]),
    ]
    installed = {re.split(r"[^\w-]", line)[0] for line in chosen}
    assert {
        {"cv2": "opencv-python-headless", "PIL": "pillow"}.get(name, name) for name in names_imported(ROOT / app)
    } <= installed


def test_the_composition_is_read_only_without_capabilities_and_asks_for_a_token() -> None:
    yaml = pytest.importorskip("yaml")
    service = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"]["lamina"]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"] and "LAMINA_TOKEN" in service["environment"]


@pytest.mark.live
def test_the_script_of_a_clean_root_says_what_it_takes() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    done = subprocess.run([bash, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "build ROOT" in done.stderr


APP = """
import os
import lamina

app = lamina.App("clean")


@app.function(scale=lamina.Scale(min=1, max=1))
def about():
    def tried(path):
        try:
            open(path, "w").close()
        except OSError as error:
            return error.strerror
        return "written"

    return {"user": os.getuid(), **{path: tried(path + "/x") for path in ("", "/app", "/opt/lamina", "/tmp")}}
"""


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.timeout(1_800)
@pytest.mark.skipif(not os.environ.get("LAMINA_CLEAN_ROOT"), reason="fetches a Debian: make clean-root")
def test_the_wheel_serves_as_pid_1_without_root_on_a_read_only_root(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "app.py").write_text(APP)
    root, token = tmp_path / "root", "0123456789abcdefghij"
    environment = {**os.environ, "PYTHON": sys.executable, "LAMINA_TOKEN": token}
    built = subprocess.run(
        [SCRIPT, "build", root, tmp_path / "app"], env=environment, capture_output=True, text=True, check=False
    )
    if built.returncode == CANNOT:
        pytest.skip(built.stderr.strip())
    assert built.returncode == 0, built.stderr
    command = [SCRIPT, "run", root, "serve", "app.py", "--host", "0.0.0.0", "--port", "0", "--json"]
    command += ["--store", "/var/lib/lamina/runs.db", "--drain", "1s"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"].replace("0.0.0.0", "127.0.0.1")
            headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/functions/about", b"{}", headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                about = json.load(answer)
            server = next(pid for pid in _below(process.pid) if _status(pid, "NSpid").split()[-1:] == ["1"])
            assert _status(server, "Uid").split()[0] == "10001" and int(_status(server, "CapEff"), 16) == 0
            os.kill(server, signal.SIGTERM)  # as a container runtime does, to PID 1
            assert process.wait(60) == 0
        finally:
            process.kill()
    read_only = "Read-only file system"
    assert about == {"user": 10001, "": read_only, "/app": read_only, "/opt/lamina": read_only, "/tmp": "written"}


def _status(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))


def _below(pid: int) -> list[int]:
    """Processes below one, its own children first."""
    own = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [one for child in own for one in _below(child)]
