"""API keys: comparison, files of keys, and their change while the server runs."""

from __future__ import annotations

import hmac

import pytest
from starlette.datastructures import Headers

from engine.errors import ConfigError
from engine.server import auth
from engine.server.auth import KeyRing, read_keys
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig, key_hash


def _headers(key):
    return Headers({"authorization": f"Bearer {key}"})


def test_every_key_is_compared_in_constant_time(monkeypatch):
    ring = KeyRing(ServerConfig(api_key_hashes=tuple(key_hash(f"key-{i}") for i in range(5))))
    compared, digest = [], hmac.compare_digest

    def compare(known, given):
        compared.append((len(known), len(given)))
        return digest(known, given)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    for key in ("key-0", "key-4"):
        compared.clear()
        assert ring.check(_headers(key)) == key_hash(key)[:8]
        assert compared == [(32, 32)] * 5
    for key in ("key-", "x" * 100_000, "\xff"):
        compared.clear()
        with pytest.raises(APIError):
            ring.check(_headers(key))
        assert compared == [(32, 32)] * 5


def test_keys_are_not_kept_in_the_clear():
    ring = KeyRing(ServerConfig(api_key_hashes=(key_hash("a secret key"),)))
    assert "a secret key" not in repr(vars(ring))


def test_without_keys_everybody_is_let_in():
    assert KeyRing(ServerConfig()).check(Headers({})) is None


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_a_file_without_keys_is_refused(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match="must have a key"):
        read_keys(str(tmp_path / "keys"))


def test_a_file_that_is_missing_or_too_large_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "nothing"))
    monkeypatch.setattr(auth, "MAX_KEY_FILE_BYTES", 10)
    (tmp_path / "keys").write_text("a long key\n" * 2)
    with pytest.raises(ConfigError, match="at most 10 bytes"):
        read_keys(str(tmp_path / "keys"))


def test_a_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path, caplog):
    path, now = tmp_path / "keys", [0.0]
    path.write_text("first\n")
    ring = KeyRing(ServerConfig(api_key_file=str(path)), clock=lambda: now[0])
    path.write_text("second key\n")
    assert ring.check(_headers("first"))  # it is looked at once a second
    now[0] += 2
    assert ring.check(_headers("second key"))
    for change in (lambda: path.write_text("#\n"), path.unlink):
        change()
        now[0] += 2
        assert ring.check(_headers("second key"))
    assert "stay as they are" in caplog.text
