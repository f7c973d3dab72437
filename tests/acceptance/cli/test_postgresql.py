"""`perco postgresql init|check`, and a store on PostgreSQL that is served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perco.cli.serving import _reached_at
from tests.support import postgresql


def perco(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "perco", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def url() -> str:
    return postgresql.fresh()


def test_the_tables_are_made_once_and_rights_are_granted(url: str) -> None:
    role = f"app_{url.rpartition('=')[2]}"
    postgresql.execute(f"CREATE ROLE {role} LOGIN")
    found = perco("postgresql", "check", url)
    assert (found.returncode, "perco postgresql init makes them" in found.stdout) == (1, True), found
    made = perco("postgresql", "init", url)
    assert (made.returncode, "_sessions: made" in made.stdout) == (0, True), made
    app = url.replace("bench@", f"{role}@")
    lacking = perco("postgresql", "check", app, "--json")
    assert lacking.returncode == 1
    assert len(json.loads(lacking.stdout)["findings"]) == 16, "four rights on four tables"
    again = perco("postgresql", "init", url, "--grant", role)
    assert (again.returncode, "they exist already" in again.stdout) == (0, True), again
    fine = perco("postgresql", "check", app)
    assert (fine.returncode, "nothing is wrong" in fine.stdout) == (0, True), fine


def test_a_role_is_a_name(url: str) -> None:
    refused = perco("postgresql", "init", url, "--grant", 'x"; DROP')
    assert (refused.returncode, "not the name of a role" in refused.stderr) == (2, True), refused


def test_it_is_served_looked_at_and_checked(url: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'socket'}"
    command = [sys.executable, "-m", "perco", "serve", url, "--listen", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            assert "serving postgresql://" in serving.stdout.readline()
            status = perco("status", address)
            assert (status.returncode, "postgresql://" in status.stdout) == (0, True), status
            checked = perco("check", address)
            assert (checked.returncode, "clean" in checked.stdout) == (0, True), checked
            second = perco("serve", url, "--listen", f"unix:{tmp_path / 'other'}")
            assert (second.returncode, f"process {serving.pid} on " in second.stderr) == (2, True), second
            directly = perco("status", url)
            assert (directly.returncode, "perco serve URL --direct" in directly.stderr) == (2, True), directly
        finally:
            serving.terminate()
            serving.communicate()
    assert serving.returncode == 0


def test_without_an_address_to_listen_at_it_is_not_served(url: str) -> None:
    refused = perco("serve", url)
    assert (refused.returncode, "--listen" in refused.stderr) == (2, True), refused


def test_for_other_hosts_it_takes_a_token_that_is_given(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERCO_TOKEN", raising=False)
    refused = perco("serve", url, "--listen", "tcp://0.0.0.0:0")
    assert (refused.returncode, "PERCO_TOKEN" in refused.stderr) == (2, True), refused


@pytest.mark.parametrize(
    ("listening", "reached"),
    [
        (["unix:/run/a"], "unix:/run/a"),
        (["tcp://127.0.0.1:1", "tls://10.0.0.1:2"], "tls://10.0.0.1:2"),
        (["unix:/run/a", "tls://0.0.0.0:2"], f"tls://{os.uname().nodename}:2"),
        (["tls://[::]:2"], f"tls://{os.uname().nodename}:2"),
    ],
)
def test_clients_are_sent_to_where_other_hosts_reach_it(listening: list[str], reached: str) -> None:
    assert _reached_at(listening) == reached


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--advertise", "tcp://db:1"], "--advertise needs --direct"),
        (["--direct", "--advertise", "db:1"], "write unix:PATH, tcp://HOST:PORT"),
        (["--processes", "2"], "a database has no tablet servers"),
    ],
)
def test_options_that_make_no_sense_are_told(url: str, tmp_path: Path, options: list[str], said: str) -> None:
    refused = perco("serve", url, "--listen", f"unix:{tmp_path / 's'}", *options)
    assert (refused.returncode, said in refused.stderr) == (2, True), refused


def test_a_folder_has_no_direct_clients(tmp_path: Path) -> None:
    refused = perco("serve", str(tmp_path / "store"), "--direct")
    assert (refused.returncode, "are for a store on PostgreSQL or Bigtable" in refused.stderr) == (2, True), refused
    assert not (tmp_path / "store").exists()
