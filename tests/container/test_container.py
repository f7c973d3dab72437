"""The image is built, and a store's owner and a worker run in containers of it, over one volume.

buildah needs no daemon, and with its isolation by chroot no further rights than root's. The base is Debian's Python,
from mmdebstrap, unless PERCO_BASE names an image; packages come from the machine on which the test runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

import perco
import perco.sync

ROOT: Final = Path(__file__).parents[2]
BASE: Final = os.environ.get("PERCO_BASE", "")
NEEDS: Final = ["buildah"] if BASE else ["buildah", "mmdebstrap"]
USER: Final = 10001
SECONDS_MAX: Final = 120  # for a program to end, or to say the next thing

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, NEEDS)), reason=f"it needs root, and {' and '.join(NEEDS)}"
)

docs = perco.Table("docs", key=perco.TEXT)
body = docs.column("body", perco.TEXT)
size = docs.column("size", perco.INT64)
PROGRAM: Final = """
import perco

docs = perco.Table("docs", key=perco.TEXT)
body = docs.column("body", perco.TEXT)
size = docs.column("size", perco.INT64)
schema = perco.Schema(docs)


@schema.observe(body, id="measure")
async def measure(txn, change):
    txn.set(size, change.key, len(change.value))
"""


@dataclass(frozen=True, slots=True)
class Image:
    """An image in a store of buildah's."""

    folder: Path

    def buildah(self, *words: object) -> str:
        """Run buildah; returns what it prints."""
        done = subprocess.run(self.argv(*words), capture_output=True, text=True, check=False, env=_environment())
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def argv(self, *words: object) -> list[str]:
        return [
            *("buildah", "--storage-driver", "vfs", "--root", f"{self.folder}/root", "--runroot", f"{self.folder}/run"),
            *map(str, words),
        ]

    @property
    def config(self) -> dict[str, Any]:
        found = json.loads(self.buildah("inspect", "--type", "image", "perco"))
        config: dict[str, Any] = found["Docker"]["config"]
        return config


@dataclass(frozen=True, slots=True)
class Running:
    """A program in a container."""

    process: subprocess.Popen[str]

    def until(self, pattern: str) -> str:
        """Read its lines until one has a pattern; returns the pattern's group."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError(f"it ended without {pattern!r}")


def _environment() -> dict[str, str]:
    return {**os.environ, "BUILDAH_ISOLATION": "chroot"}


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with TemporaryDirectory() as folder:
        yield _made(Path(folder))


def _made(folder: Path) -> Image:
    image = Image(folder)
    base = BASE
    if not base:
        sources = list(Path("/etc/apt").glob("sources.list.d/*.sources")) or [Path("/etc/apt/sources.list")]
        packages = "--include=python3,python3-venv,python3-dev,gcc,ca-certificates"
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=apt", packages, "bookworm", folder / "base.tar", *sources], check=True
        )
        container = image.buildah("from", "scratch")
        image.buildah("add", "--quiet", container, folder / "base.tar", "/")
        image.buildah("commit", "--quiet", container, "base")
        image.buildah("rm", container)
        base = "localhost/base"
    # The container's pip finds what the machine's pip has found, however that is set up.
    wheels = folder / "wheels"
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(wheels)]
    subprocess.run([*wheel, "--no-deps", str(ROOT)], check=True)
    subprocess.run([*wheel, f"{ROOT}[cli,metrics,ui]", "hatchling", "setuptools"], check=True)
    (folder / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheelhouse\n")
    volumes = ("--volume", f"{wheels}:/wheelhouse:ro", "--volume", f"{folder}/pip.conf:/etc/pip.conf:ro")
    image.buildah("build", "--format", "docker", "--build-arg", f"BASE={base}", *volumes, "-t", "perco", ROOT)
    return image


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = tmp_path / "volume"
    path.mkdir()
    shutil.chown(path, USER, USER)
    return path


@contextmanager
def container_of(image: Image) -> Iterator[str]:
    made = image.buildah("from", "--pull-never", "localhost/perco")
    # Otherwise, buildah sometimes mounts an empty folder over the volume: it mounts in no order.
    image.buildah("config", "--volume", "/srv/store-", made)
    yield made
    image.buildah("rm", made)


@contextmanager
def started(image: Image, container: str, volume: Path, argv: Sequence[str], *more: str) -> Iterator[Running]:
    """A program in a container, with the volume; killed at the end, if it still runs."""
    words = image.argv("run", "--volume", f"{volume}:/srv/store", *more, container, "--", *argv)
    out = subprocess.PIPE
    with subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, text=True, env=_environment()) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


def ended(running: Running, pid: int, with_: signal.Signals) -> int:
    """Send a signal to the program in the container; returns its exit code."""
    os.kill(pid, with_)
    assert running.process.stdout is not None
    running.process.stdout.read()
    return running.process.wait(SECONDS_MAX)


def test_the_image_says_how_it_runs(image: Image) -> None:
    config = image.config
    assert (config["User"], config["StopSignal"]) == ("perco", "SIGTERM")
    assert config["Healthcheck"]["Test"] == ["CMD", "perco", "ping", "/srv/store"]
    assert set(config["Volumes"]) == {"/srv/store"}
    assert config["Entrypoint"] == ["perco"]
    assert config["Cmd"][:2] == ["serve", "/srv/store"]


def test_an_owner_and_a_worker_share_a_volume(image: Image, volume: Path, tmp_path: Path) -> None:
    config = image.config
    serve, check = [*config["Entrypoint"], *config["Cmd"]], config["Healthcheck"]["Test"][1:]
    serve[serve.index("--metrics") + 1] = "127.0.0.1:0"
    app = tmp_path / "app"
    app.mkdir()
    (app / "app.py").write_text(PROGRAM)
    schema = perco.Schema(docs)
    for n, end in enumerate((signal.SIGKILL, signal.SIGTERM)):
        with ExitStack() as stack:
            container = stack.enter_context(container_of(image))
            with started(image, container, volume, check) as none:
                assert none.process.wait(SECONDS_MAX) == 2, "no owner answers"
            owner = stack.enter_context(started(image, container, volume, serve))
            pid = int(owner.until(r"serving /srv/store at .* \(process (\d+)\)"))
            with started(image, container, volume, check) as ping:
                assert int(ping.until(r"process (\d+) answered")) == pid
                assert ping.process.wait(SECONDS_MAX) == 0
            with ExitStack() as within:
                db = within.enter_context(perco.sync.open(f"unix:{volume}/socket", schema))
                with db.transaction() as txn:
                    assert (txn.get(size, "0"), n) in ((None, 0), (5, 1)), "rows outlive a container"
                    txn.set(body, str(n), "hello")
                work = ["perco", "worker", "app:schema", "--store", "unix:/srv/store/socket"]
                mounted = ("--volume", f"{app}:/app:ro", "--workingdir", "/app")
                worker = within.enter_context(started(image, container, volume, work, *mounted))
                worker_pid = int(worker.until(r"running measure on .* \(process (\d+)\)"))
                assert [each.id for each in db.observers()] == ["measure"], "it has the same store"
                db.wait_idle(timeout=SECONDS_MAX)
                with db.snapshot() as snap:
                    assert snap.get(size, str(n)) == 5
                assert ended(worker, worker_pid, signal.SIGTERM) == 0
            code = ended(owner, pid, end)
            assert (code == 0) == (end == signal.SIGTERM), code
    assert {path.stat().st_uid for path in volume.rglob("*")} == {USER}
