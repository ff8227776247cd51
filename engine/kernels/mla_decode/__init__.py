"""Multi-head latent attention, the newest tokens against pages of latents."""

from engine.kernels.mla_decode.mla_decode import mla_decode, specs

__all__ = ["mla_decode", "specs"]
