"""API keys: comparison, files of keys, and their change while the server runs."""

from __future__ import annotations

import hashlib
import hmac
from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from engine.errors import ConfigError
from engine.server import auth
from engine.server.auth import KeyRing, read_keys
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig, key_hash


def _headers(key):
    return Headers({"authorization": f"Bearer {key}"})


def test_every_key_is_compared_in_constant_time(monkeypatch, tmp_path):
    """Nothing of a key is compared but its SHA-256, with all known ones, in the same order.

    So time tells neither how much of a key is right, nor which key fits, nor whether one does.
    """
    known = [f"key-{i}" for i in range(5)]
    (tmp_path / "keys").write_text("\n".join(known[3:]))
    config = ServerConfig(
        api_key_hashes=tuple(map(key_hash, known[:3])), api_key_file=str(tmp_path / "keys")
    )
    ring, compared, digest = KeyRing(config), [], hmac.compare_digest

    def compare(first, second):
        compared.append((first, second))
        return digest(first, second)

    class Opaque(bytes):
        """A hash that only `compare_digest` compares."""

        def __eq__(self, other):
            raise AssertionError("not in constant time")

        __hash__ = None

    def sha256(key):
        return Opaque(hashlib.sha256(key).digest())

    monkeypatch.setattr(auth, "hmac", SimpleNamespace(compare_digest=compare))
    monkeypatch.setattr(auth, "_hash", sha256)
    for key in (*known, "key-", "key-00", "", "x" * auth.MAX_KEY_CHARS, "\xff"):
        compared.clear()
        if key in known:
            assert ring.check(_headers(key)) == key_hash(key)
        else:
            with pytest.raises(APIError):
                ring.check(_headers(key))
        given = hashlib.sha256(key.encode("latin-1")).digest()
        wanted = [(bytes.fromhex(key_hash(each)), given) for each in known]
        assert [tuple(map(bytes.hex, each)) for each in compared] == [
            tuple(map(bytes.hex, each)) for each in wanted
        ]


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


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "keys").write_text("first\nsecond\n", "utf-8-sig")
    ring = KeyRing(ServerConfig(api_key_file=str(tmp_path / "keys")))
    assert ring.check(_headers("first"))
    assert ring.check(_headers("second"))


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
