"""The golden models of `tests/models`."""

from tests.models.conftest import golden

__all__ = ["golden"]
