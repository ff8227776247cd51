"""Tokens that the files beside ``tokenizer.json`` add to it, or whose flags they change.

The rules are those of transformers:

- ``added_tokens_decoder`` in ``tokenizer_config.json`` lists tokens with all their flags, which
  replace those in ``tokenizer.json``. If it is absent, ``special_tokens_map.json`` replaces what
  ``tokenizer_config.json`` says, and ``added_tokens.json`` adds tokens.
- Every special token that one of them names, such as ``eos_token`` or ``image_token``, or lists in
  ``additional_special_tokens`` or ``extra_special_tokens``, becomes an added token. Those with a
  name become special.
- A token has the id that ``tokenizer.json`` gives it, or else the next one: ids in the other files
  only order their tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tokenizers import AddedToken

from engine.checks import shown
from engine.errors import ConfigError
from engine.text.parts import SPECIAL_NAMES

__all__ = ["is_unicode", "tokens_beside"]

_EXTRA = "extra_special_tokens"
_ADDITIONAL = "additional_special_tokens"  # its older name
_MAX_DIGITS = 9
_ORDER = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

_Fields = dict[str, Any]  # "content", and those of _FLAGS that are given


def tokens_beside(
    spec: Mapping[str, Any],
    known: Mapping[str, bool],
    config: Mapping[str, Any],
    special_map: Mapping[str, Any],
    added: Mapping[str, Any],
) -> tuple[list[AddedToken], dict[str, str]]:
    """Return the tokens to add to a ``tokenizer.json``, and the named special tokens.

    Parameters
    ----------
    spec : mapping
        The content of ``tokenizer.json``.
    known : mapping of str to bool
        Its added tokens, and whether they are special; those stay special.
    config, special_map, added : mapping
        The contents of ``tokenizer_config.json``, ``special_tokens_map.json`` and
        ``added_tokens.json``; empty if there is no such file.

    Raises
    ------
    ConfigError
        If a token is damaged; the message names it.
    """
    fields = _Config(config)
    if "added_tokens_decoder" in config:
        listed = _decoder(config["added_tokens_decoder"])
    else:
        fields.update(special_map)
        listed = _added(added, fields.plain_texts())
        listed |= {
            token["id"]: _fields(token)
            for token in spec.get("added_tokens") or []
            if type(token.get("id")) is int
        }
    fields.rename_additional()
    by_content = {token["content"]: token for token in listed.values()}
    named = fields.named()
    padding = spec.get("padding")
    if isinstance(padding, dict) and isinstance(padding.get("pad_token"), str):
        named.setdefault("pad_token", padding["pad_token"])
    named = {
        name: by_content.get(_content(token), token) if name in SPECIAL_NAMES else token
        for name, token in named.items()
    }
    found: list[_Fields | str] = [listed[token_id] for token_id in sorted(listed)]
    present = {*known, *by_content}
    for token in (*named.values(), *fields.extra()):
        if _content(token) not in present and token not in found:
            found.append(token)
    texts = {name: _content(token) for name, token in named.items()}
    return [_token(token, texts.values(), known) for token in found], texts


class _Config:
    """Special tokens of tokenizer_config.json, after special_tokens_map.json has replaced some."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._values = dict(config)
        self._explicit: dict[str, Any] = {}
        self._list_name = _EXTRA  # the name under which a file holds the list
        if _ADDITIONAL in config and not config.get(_EXTRA):
            self._use_additional()
        for name, value in config.items():
            is_own = name.endswith("_token") and name not in SPECIAL_NAMES
            if is_own and isinstance(value, str):
                self._explicit[name] = self._values.pop(name)
        self._split_extra()

    def update(self, special_map: Mapping[str, Any]) -> None:
        """Replace values by those of special_tokens_map.json."""
        for name, value in special_map.items():
            if isinstance(value, dict) and name != _EXTRA:
                value = {**value, "special": True}
            elif isinstance(value, list):
                value = [{**t, "special": True} if isinstance(t, dict) else t for t in value]
            if isinstance(value, list) and name == _EXTRA:
                _listed(value, name)
                own = self.extra()
                value = [*own, *(token for token in value if token not in own)]
            if name == _EXTRA:
                self._list_name = name
            self._values[name] = value
        self._split_extra()

    def rename_additional(self) -> None:
        """Read the older name if the newer one was absent, or an object."""
        if _ADDITIONAL in self._values and _EXTRA not in self._values:
            self._use_additional()

    def named(self) -> dict[str, Any]:
        """Return the named special tokens, in the order in which they are added."""
        found = {name: self._values.get(name) for name in _ORDER}
        others = {n: v for n, v in self._values.items() if n not in found and n.endswith("_token")}
        found |= {n: v for n, v in others.items() if isinstance(v, (str, dict))} | self._explicit
        return {name: _checked(v, name) for name, v in found.items() if v is not None}

    def plain_texts(self) -> set[str]:
        """Return the texts of special tokens that are not objects of tokenizer_config.json."""
        self.extra()  # checks the list
        found = [self._values.get(name) for name in _ORDER] + (self._values.get(_EXTRA) or [])
        return {
            _content(token)
            for token in found
            if isinstance(token, str) or (isinstance(token, dict) and "__type" not in token)
        }

    def extra(self) -> list[Any]:
        """Return the special tokens without a name."""
        return _listed(self._values.get(_EXTRA), self._list_name)

    def _use_additional(self) -> None:
        self._values[_EXTRA] = self._values.pop(_ADDITIONAL)
        self._list_name = _ADDITIONAL

    def _split_extra(self) -> None:
        if isinstance(self._values.get(_EXTRA), dict):
            self._explicit |= self._values.pop(_EXTRA)


def _listed(tokens: Any, name: str) -> list[Any]:
    """Return the tokens of a list."""
    tokens = tokens or []
    if not isinstance(tokens, list):
        raise ConfigError(f"{name} must be a list or an object; got {shown(tokens)}")
    return [_checked(token, f"{name}[{i}]") for i, token in enumerate(tokens)]


def _checked(value: Any, where: str) -> Any:
    """Return a token, which is a text or an object with "content"."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise ConfigError(f"{where} must be a string or an object with content; got {shown(value)}")
    if not is_unicode(content):
        raise ConfigError(f"{where} must be valid Unicode; got {shown(content)}")
    return value if isinstance(value, str) else _fields(value)


def _fields(value: Mapping[str, Any]) -> _Fields:
    flags = {name: bool(value[name]) for name in _FLAGS if value.get(name) is not None}
    return {"content": value["content"], "special": False, **flags}


def _content(token: Any) -> str:
    content: str = token.get("content", "") if isinstance(token, dict) else token
    return content


def _decoder(listed: Any) -> dict[int, _Fields]:
    if not isinstance(listed, Mapping):
        raise ConfigError(
            f"added_tokens_decoder in tokenizer_config.json must be an object; got {shown(listed)}"
        )
    found = {}
    for key, value in listed.items():
        token = _checked(value, f"added token {key}")
        if not _content(token):
            raise ConfigError(f"added token {key} must have content; it has none")
        found[_as_id(key)] = _fields({"content": token}) if isinstance(token, str) else token
    return found


def _added(added: Mapping[str, Any], special: Collection[str]) -> dict[int, _Fields]:
    found = {}
    for content, token_id in added.items():
        _checked(content, f"added token {token_id}")
        is_special = content in special
        flags = {"special": is_special, "normalized": not is_special}
        found[_as_id(str(token_id))] = {"content": content, **flags}
    return found


def _as_id(key: str) -> int:
    if not key.isdecimal() or len(key) > _MAX_DIGITS:
        raise ConfigError(
            f"an added token's id must be a whole number of at most {_MAX_DIGITS} digits; "
            f"got {shown(key)}"
        )
    return int(key)


def _token(token: Any, named: Collection[str], known: Mapping[str, bool]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    is_special = token["special"] or token["content"] in named
    flags = {"normalized": not is_special, **token}
    flags["special"] = is_special or known.get(token["content"], False)
    return AddedToken(**flags)


def is_unicode(text: str) -> bool:
    """Tell whether `text` has no unpaired surrogate, which JSON can spell but UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
